from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

SUITE = Path(__file__).resolve().parents[1] / "wheel"
FAKE = """
from contextlib import contextmanager
ON = []
@contextmanager
def deterministic_mode(enabled):
    ON.append(enabled)
    yield
    ON.pop()
class fork_kernels:
    ON = False
class fork_fa4:
    own = None
"""
KERNELS = sorted(
    f"{p}_hdim64_{dtype}{suffix}"
    for p in ("fwd", "split", "bwd")
    for dtype in ("fp16", "bf16")
    for suffix in ("", "_causal")
)


@pytest.fixture(scope="module")
def cases() -> ModuleType:
    """The module, with a flash_attn that it does not use."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
        patch.syspath_prepend(str(SUITE))
        spec = importlib.util.spec_from_file_location("upstream_cases", SUITE / "upstream_cases.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, "upstream_cases", module)
        spec.loader.exec_module(module)
    return module


@given(
    st.integers(1, 12),
    st.lists(st.sampled_from([32, 59, 64, 128]), unique=True, min_size=1),
    st.lists(st.integers(1, 400), unique=True, min_size=1),
)
def test_drawn_cases_are_of_the_test_fit_and_are_as_many_as_can_be(
    cases: ModuleType, count: int, dims: list[int], lengths: list[int]
) -> None:
    axes = [
        (("d",), dims),
        (("dtype",), ["torch.float16"]),
        (("seqlen_q", "seqlen_k"), [(n, 2 * n) for n in lengths]),
        (("local",), [True, False]),
    ]
    choice = cases.Choice(count, frozenset(KERNELS), 300)
    drawn = choice.draw("test_some", axes)
    fitting = [
        {"d": d, "dtype": "torch.float16", "seqlen_q": n, "seqlen_k": 2 * n, "local": local}
        for d, n, local in itertools.product(dims, lengths, (True, False))
        if d in (59, 64) and 2 * n <= 300
    ]
    assert all(case in fitting for case in drawn)
    assert len({cases.spell(case) for case in drawn}) == len(drawn) == min(count, len(fitting))
    assert choice.draw("test_some", axes) == drawn


UPSTREAM = """
import pytest, flash_attn

@pytest.mark.parametrize("dtype", ["torch.float16"])
@pytest.mark.parametrize("d", [32, 64])
@pytest.mark.parametrize("seqlen_q,seqlen_k", [(1, 2), (3, 4)])
def test_passes(seqlen_q, seqlen_k, d, dtype):
    assert d == 64 and seqlen_k == seqlen_q + 1

@pytest.mark.parametrize("dtype", ["torch.float16"])
@pytest.mark.parametrize("d", [64])
def test_with_the_mode_off_alone(d, dtype):
    assert flash_attn.ON == [False]

@pytest.mark.parametrize("dtype", ["torch.float16"])
@pytest.mark.parametrize("d", [64])
def test_skips(d, dtype):
    pytest.skip("as upstream says")

@pytest.mark.parametrize("dtype", ["torch.float16"])
@pytest.mark.parametrize("d", [32])
def test_of_kernels_that_are_not_there(d, dtype):
    assert False
"""


def run(folder: Path, text: str, options: str = "") -> Any:
    for name in ("site", "left"):
        (folder / name).mkdir()
    (folder / "site/flash_attn.py").write_text(FAKE, encoding="utf-8")
    (folder / "test_flash_attn.py").write_text(text, encoding="utf-8")
    program = "import json, sys, upstream_cases as u; from pathlib import Path\n"
    choice = f"u.Choice(9, frozenset(json.loads(sys.argv[1])){options})"
    program += f"found = u.run(Path('test_flash_attn.py').resolve(), {choice}, Path('left'))\n"
    program += "print(json.dumps([found, u.counts(found)]))"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(["site", str(SUITE)])}
    command = [sys.executable, "-c", program, json.dumps(KERNELS)]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


def test_each_case_runs_in_both_modes_and_what_came_of_it_is_told(tmp_path: Path) -> None:
    done = run(tmp_path, UPSTREAM)
    assert done.returncode == 0, done.stderr
    found, counts = json.loads(done.stdout)
    of_one = found.pop("test_with_the_mode_off_alone[d=64-dtype=float16]")
    assert of_one["off"] == "passed"
    assert of_one["on"].startswith("failed: assert [True] == [False]")
    assert found == {
        "test_passes[d=64-dtype=float16-seqlen_k=2-seqlen_q=1]": {"off": "passed", "on": "passed"},
        "test_passes[d=64-dtype=float16-seqlen_k=4-seqlen_q=3]": {"off": "passed", "on": "passed"},
        "test_skips[d=64-dtype=float16]": {
            "off": "skipped: as upstream says",
            "on": "skipped: as upstream says",
        },
    }
    assert counts == {
        "off": {"passed": 3, "skipped: as upstream says": 1},
        "on": {"failed": 1, "passed": 2, "skipped: as upstream says": 1},
    }
    assert list((tmp_path / "left").iterdir()) == []


STOCK = """
def fwd(*arguments):
    return arguments
varlen_fwd = bwd = varlen_bwd = fwd_kvcache = fwd
"""
ON_STOCK = """
import pytest, flash_attn

@pytest.mark.parametrize("dtype", ["torch.float16"])
@pytest.mark.parametrize("d", [59, 64])
def test_whose_kernels(d, dtype):
    assert flash_attn.fork_kernels.ON
    assert flash_attn.fork_fa4.own.fwd(1, 2) == (1, 2)
    assert flash_attn.fork_fa4.own.fork_fwd_kvcache(1, 2, None, None, None) == (1, 2)
    assert flash_attn.ON == []

@pytest.mark.parametrize("dtype", ["torch.float16"])
@pytest.mark.parametrize("d", [64])
def test_that_calls_nothing(d, dtype):
    pass
"""


def test_a_case_runs_on_stock_alone_where_it_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "stock.py").write_text(STOCK, encoding="utf-8")
    only = "test_whose_kernels[d=64-dtype=float16]"
    done = run(tmp_path, ON_STOCK, f", only=frozenset(['{only}']), stock=Path('stock.py')")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [{only: {"stock": "passed"}}, {"stock": {"passed": 1}}]


def test_a_case_that_reaches_no_kernel_of_stock_has_not_run_on_it(tmp_path: Path) -> None:
    (tmp_path / "stock.py").write_text(STOCK, encoding="utf-8")
    only = "test_that_calls_nothing[d=64-dtype=float16]"
    done = run(tmp_path, ON_STOCK, f", only=frozenset(['{only}']), stock=Path('stock.py')")
    (found,) = json.loads(done.stdout)[0].values()
    assert found["stock"].startswith("failed: RuntimeError: no call reached upstream's kernels"), done.stderr


@pytest.mark.parametrize(
    ("text", "told"), [("import nothing_like_it", "ModuleNotFoundError"), ("", "pytest exited with 5")]
)
def test_a_file_that_cannot_run_or_has_no_cases_is_an_error(tmp_path: Path, text: str, told: str) -> None:
    done = run(tmp_path, text)
    assert done.returncode == 1
    assert told in done.stderr


@pytest.mark.parametrize(
    ("of_case", "own"),
    [
        (
            {"off": "failed: assert 3 <= 2", "on": "failed: assert 3 <= 2", "stock": "failed: assert 3 <= 2"},
            True,
        ),
        (
            {
                "off": "failed: AssertionError: assert 3 <= 2",
                "on": "passed",
                "stock": "failed: AssertionError: assert 3 <= 2",
            },
            True,
        ),
        (
            {"off": "failed: assert 3 <= 2", "on": "failed: RuntimeError", "stock": "failed: assert 3 <= 2"},
            False,
        ),
        ({"off": "passed", "on": "failed: assert 3 <= 2", "stock": "failed: assert 3 <= 2"}, False),
        ({"off": "failed: assert 3 <= 2", "on": "passed", "stock": "passed"}, False),
        ({"off": "failed: assert 3 <= 2", "on": "passed", "stock": "failed: RuntimeError"}, False),
        ({"off": "failed: assert 3 <= 2", "on": "passed"}, False),
    ],
)
def test_a_case_is_upstreams_own_failure_if_stock_misses_its_bound_too(
    cases: ModuleType, of_case: dict[str, str], own: bool
) -> None:
    assert cases.is_upstreams_own(of_case) is own
