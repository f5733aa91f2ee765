"""The table of patches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from scripts.commands import patches
from scripts.series import model


def test_eighty_columns_cut_no_name(make_series: Callable[..., Path]) -> None:
    name = "csrc/flash_attn/src/flash_bwd_launch_template_of_a_long_name.h"
    series = model.read(make_series(("Add a header", {name: "int a;\n"})))
    console = Console(width=80, record=True)
    console.print(patches._table(series, {1: []}))
    text = console.export_text()
    folded = "".join(line.split("│")[2].strip() for line in text.splitlines() if line.count("│") == 5)
    assert folded == "src/flash_bwd_launch_template_of_a_long_name.h (new)"
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
