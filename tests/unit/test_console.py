"""What long work shows."""

from __future__ import annotations

import pytest
from rich.console import Console

from scripts.base import console


@pytest.mark.parametrize("terminal", [False, True])
def test_a_log_has_a_line_for_each_file_and_a_terminal_a_bar(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "out", Console(force_terminal=terminal, width=160, _environ={}))
    with console.progress("compiling", 5, 2) as advance:
        advance("third.cu", 65.0)
        advance("fourth.cu", 7.4)
    said = capsys.readouterr().out
    lines = ["  3/5 third.cu, about 1m05s left", "  4/5 fourth.cu, about 7s left"]
    assert [line in said.splitlines() for line in lines] == [not terminal] * 2
    assert "4/5" in said
    assert "about 7s left" in said
