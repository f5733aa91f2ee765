from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts import __main__
from scripts.base import layout
from scripts.base.errors import NotVerified, UsageError
from scripts.lab import kernel_figures, kernel_picture, kernel_speed
from scripts.source import kernel_set, matrix
from scripts.source.upstream import Source
from scripts.wheels.building import build, jobs
from scripts.wheels.proof import verify


def row(
    group: str,
    variant: str,
    ms: float,
    mb: float = 100.0,
    batch: int = 4,
    len_k: int = 2048,
    head_dim: int = 64,
) -> dict[str, Any]:
    case = f"{group} d{head_dim} {batch}x{len_k}"
    return {
        "group": group,
        "case": case,
        "variant": variant,
        "ms": ms,
        "mb": mb,
        "ratio": ms,
        "batch": batch,
        "len_k": len_k,
        "head_dim": head_dim,
    }


def rows(**changed: float) -> list[dict[str, Any]]:
    """Figures that meet every goal, but for those that are named."""
    told = {
        "prefill": 1.04,
        "one_chunk": 1.0,
        "fine": 1.1,
        "chunked": 1.05,
        "decode": 0.9,
        "one_split": 20.0,
        "backward": 1.05,
        "million": 9.4,
        "mb": 100.0,
    } | changed
    found = []
    for length in (2048, 4096):
        found += [row("prefill", "stock", 1.0, len_k=length), row("prefill", "off", 1.0, len_k=length)]
        found += [
            row("prefill", "on", told["prefill"], told["mb"], len_k=length),
            row("prefill", "on 512", told["fine"], len_k=length),
        ]
        found.append(row("prefill", "on 2048", told["one_chunk"] if length == 2048 else 1.2, len_k=length))
    found += [
        row("chunked", name, ms, batch=1, len_k=131584)
        for name, ms in (("stock", 1.2), ("stock, one split", 1.0), ("on", told["chunked"]))
    ]
    for batch, keys in ((1, 131072), (256, 2048)):
        found += [
            row("decode", "stock", 1.0, batch=batch, len_k=keys),
            row("decode", "on", told["decode"], batch=batch, len_k=keys),
        ]
    found.append(row("decode", "stock, one split", told["one_split"], batch=1, len_k=131072))
    found += [row("backward", "stock", 1.0), row("backward", "on", told["backward"], told["mb"])]
    return [
        *found,
        row("million keys", "stock", 9.0, batch=1, len_k=2**20),
        row("million keys", "on", told["million"], batch=1, len_k=2**20),
    ]


def goals(measured: list[dict[str, Any]]) -> list[kernel_figures.Goal]:
    return kernel_figures.goals([kernel_figures.Row(**row) for row in measured])


def test_figures_that_meet_every_goal() -> None:
    assert [goal.what for goal in goals(rows()) if not goal.met] == []


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        ({"prefill": 1.06}, ["prefill, default split_size: geometric mean"]),
        (
            {"prefill": 1.2},
            ["prefill, default split_size: geometric mean", "prefill, default split_size: the worst"],
        ),
        ({"one_chunk": 1.02}, ["prefill, keys within one chunk: the worst"]),
        (
            {"mb": 110.0},
            ["prefill: memory above stock's, the most", "backward: memory above stock's, the most"],
        ),
        ({"fine": 1.2}, ["prefill, split_size 512: geometric mean"]),
        ({"chunked": 1.1}, ["512 new tokens on 16 k and 128 k, against stock's best: the worst"]),
        ({"decode": 1.05}, ["decode, default split_size: geometric mean"]),
        ({"one_split": 13.0}, ["decode, batch 1 and 128 k keys: times faster than one split"]),
        ({"million": 9.5}, ["512 queries on 2**20 keys, default split_size: the worst"]),
        ({"backward": 1.2}, ["backward, against stock's deterministic=True: the worst"]),
    ],
)
def test_a_goal_that_is_missed_is_called_so(changed: dict[str, float], missed: list[str]) -> None:
    assert [goal.what for goal in goals(rows(**changed)) if goal.met is False] == missed


def test_several_cases_count_by_their_geometric_mean_their_worst_and_the_most_memory() -> None:
    found = rows()
    for length, ms, mb in ((2048, 0.5, 90.0), (4096, 2.0, 103.0)):
        next(
            r for r in found if r["variant"] == "on" and r["group"] == "prefill" and r["len_k"] == length
        ).update(ms=ms, mb=mb)
    told = {goal.what: goal.value for goal in goals(found)}
    assert told["prefill, default split_size: geometric mean"] == pytest.approx(1.0)
    assert told["prefill, default split_size: the worst"] == 2.0
    assert told["prefill: memory above stock's, the most"] == pytest.approx(3.0)


def test_what_was_not_measured_is_neither_met_nor_missed() -> None:
    found = goals([r for r in rows() if r["group"] != "backward"])
    assert {goal.what.split(":")[0] for goal in found if goal.met is None} == {
        "backward, against stock's deterministic=True",
        "backward",
    }


def test_other_head_dims_have_goals_of_their_own_where_they_were_measured() -> None:
    other = [
        row(group, variant, ms, head_dim=256)
        for group in ("prefill", "backward")
        for variant, ms in (("stock", 1.0), ("on", 1.2 if group == "prefill" else 0.6))
    ]
    found = goals([*rows(), *other])
    assert [(goal.what, goal.value, goal.met) for goal in found[len(goals(rows())) :]] == [
        ("head dims 256, prefill, default split_size: the worst", 1.2, False),
        ("head dims 256, backward, against stock's deterministic=True: the worst", 0.6, True),
    ]
    assert found[: len(goals(rows()))] == goals(rows())


def figures(path: Path, found: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps({"gpu": "a GPU", "torch": "2.11.0", "rows": found}), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{", "Invalid JSON"),
        ("[]", "should be an object"),
        ('{"rows": [], "torch": ""}', "gpu: Field required"),
        ('{"gpu": "", "torch": "", "rows": [{"group": "decode"}]}', r"rows\.0\.case: Field required"),
        (
            json.dumps({"gpu": "", "torch": "", "rows": [row("decode", "on", 1.0) | {"ms": "fast"}]}),
            r"rows\.0\.ms: Input should be a valid number",
        ),
        ('{"format": 2, "gpu": "", "torch": "", "rows": []}', "format 2 is of another version"),
    ],
)
def test_a_file_that_is_none_of_figures_is_an_error_that_names_it(
    tmp_path: Path, content: str, expected: str
) -> None:
    path = tmp_path / "bench.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UsageError, match=f"bench.json is damaged: .*{expected}.*; give a file"):
        kernel_figures.read(path)


def test_the_figures_of_the_documentation_are_such_a_file() -> None:
    figures = kernel_figures.read(layout.ROOT / "docs/bench.json")
    assert {row.variant for row in figures.rows} >= {"stock", "on", "on 512"}
    assert all(goal.met is not None for goal in kernel_figures.goals(figures.rows))


def test_figures_without_stock_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="was measured without stock"):
        kernel_figures.read(figures(tmp_path / "bench.json", [r for r in rows() if r["variant"] != "stock"]))


@pytest.mark.parametrize("name", ["time.svg", "time.png"])
def test_the_picture_has_a_line_for_each_variant(tmp_path: Path, name: str) -> None:
    found = [
        row("length", variant, 1.0, 100.0, 32768 // n, n)
        for variant in ("stock", "on", "on 512")
        for n in (1024, 2048)
    ]
    folder = tmp_path / "pictures"
    folder.mkdir()
    picture = folder / name
    facts = kernel_figures.read(figures(tmp_path / "bench.json", found))
    kernel_picture.draw(facts, picture)
    content = picture.read_bytes()
    kernel_picture.draw(facts, picture)
    assert picture.read_bytes() == content
    assert [path.name for path in folder.iterdir()] == [name]
    if name.endswith("svg"):
        assert content.count(b"<!-- deterministic, split_size 512 -->") == 1
        assert content.count(b"<!-- upstream -->") == 1


def test_without_a_gpu_nothing_is_built_and_the_way_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_speed, "_has_gpu", lambda: False)
    monkeypatch.setattr(kernel_speed, "measure", lambda *_: pytest.fail("began to build"))
    with pytest.raises(NotVerified, match="no CUDA device here"):
        __main__.main_inner(["bench"])


def test_the_benchmark_finds_its_own_modules_and_measures_the_head_dims_of_the_kernels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Builds and environments are stand-ins, and so is what bench.py does there: it tells how it was called."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/called\n', encoding="utf-8")
    python.chmod(0o755)
    (tmp_path / "env").mkdir()
    monkeypatch.setattr(layout, "BUILD", tmp_path)
    monkeypatch.setattr(build, "build_one", lambda *_: SimpleNamespace(path=tmp_path / "made"))
    monkeypatch.setattr(verify, "facts_of", lambda _: None)
    monkeypatch.setattr(verify, "installed", lambda *_: python)
    loaded = matrix.load(layout.MATRIX)
    target = loaded.default()
    job = jobs.Job(target, kernel_set.parse_kernels("hdim256,hdim96,fp16,fwd"), target.architectures)
    kernel_speed.measure(loaded, job, build.BuildOptions(Source.AUTO, 1), tmp_path / "bench.json")
    script, *words = (tmp_path / "called").read_text().split()
    assert {"timing.py", "extension_files.py"} <= {path.name for path in Path(script).parent.iterdir()}
    assert words == [
        *(
            "--stock",
            str(tmp_path / "made"),
            "--json",
            str(tmp_path / "bench.json"),
            "--head-dim",
            "96",
            "256",
        )
    ]


FIGURES = {  # of a row of README.md, each with the means that it tells
    "prefill and decode, mode off": [("prefill", "off"), ("decode", "off")],
    "prefill, mode on": [("prefill", "on 2048")],
    "decode, mode on": [("decode", "on 2048")],
    "gradients, mode on, against stock's": [("backward", "on")],
}


@pytest.mark.parametrize("told_of", FIGURES)
def test_the_readme_s_means_are_those_of_the_file(told_of: str) -> None:
    """They were those of an earlier wheel once."""
    measured = kernel_figures.read(layout.ROOT / "docs/bench.json").rows
    (line,) = [
        line
        for line in (layout.ROOT / "README.md").read_text(encoding="utf-8").splitlines()
        if line.startswith(f"| {told_of} ")
    ]
    told = [re.findall(r"(\d\.\d\d) ×", cell) for cell in line.split("|")[2:4]]
    for head_dim, cell in zip((64, 128), told, strict=True):
        rows = [row for row in measured if row.head_dim == head_dim]
        means = [kernel_figures.mean(kernel_figures.ratios(rows, *which)) for which in FIGURES[told_of]]
        assert cell == [f"{mean:.2f}" for mean in means]
