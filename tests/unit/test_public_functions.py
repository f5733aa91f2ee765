"""Parameters of what a python upstream offers: a fixture shaped like flash-attn-4."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.series import changes, model
from scripts.series.rebase.steps import Rebase
from scripts.series.upstream import forecast
from scripts.series.upstream import words as upstream_words
from scripts.series.upstream.report import Signature, UpstreamChanges
from scripts.source import matrix
from scripts.source.releases import Release
from tests.unit.conftest import ROOT, Make, checkout_of, fill_repository

MATRIX = matrix.load(ROOT / "wheel_matrix.toml").of("flash-attn-4")
NEW = MATRIX.upstream.model_copy(update={"version": "4.0.0b99", "sdist_sha256": "9" * 64})
PACKAGE = "flash_attn/cute"
INIT, INTERFACE, HELPER = (f"{PACKAGE}/{name}.py" for name in ("__init__", "interface", "helper"))
FILES = {
    INIT: """from .interface import func, varlen_func as varlen
from .helper import hidden
__all__ = ["func", "varlen"]
""",
    INTERFACE: """def func(q, k, v, scale=None, causal=False):
    return _fwd(q, k, v, scale)


def varlen_func(q, k, *, lengths):
    return q


def _fwd(q, k, v, scale):
    return q


def _other(q):
    return q


class Function:
    def forward(q):
        return q
""",
    HELPER: "def hidden(a):\n    return a\n",
    f"{PACKAGE}/pyproject.toml": "[project]\n",
}
# One patch that calls a private function, in a file of its own.
PATCH = (
    "Call the private function",
    {f"{PACKAGE}/fork_call.py": "from .interface import _fwd\n\nresult = _fwd(1, 2, 3, 4)\n"},
    f"symbol _fwd in {PACKAGE}/fork_call.py",
)
NAMES = ("Call-the-private-function.patch",)


def signatures(make_series: Make, folder: Path, old: str, new: str, file: str = INTERFACE) -> UpstreamChanges:
    """What a forecast tells of a release in which a text is another."""
    assert FILES[file].count(old) == 1
    there = FILES | {file: FILES[file].replace(old, new)}
    series = model.read(make_series(PATCH, base=FILES))
    release = Release(NEW, checkout_of(there), "a fixture")
    return forecast.run_forecast(
        folder / "build", series, MATRIX.upstream, checkout_of(FILES), release
    ).upstream


def only(found: UpstreamChanges) -> Signature:
    (signature,) = found.signatures
    return signature


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("causal=False)", "causal=False, window=None)", "grew at its end: window"),
        ("func(q, k, v, scale=None", "func(q, k, v, window, scale=None", "changed: +window"),
        ("func(q, k, v, scale=None", "func(q, v, k, scale=None", "changed: another order"),
        ("scale=None, causal", "softmax_scale=None, causal", "changed: +softmax_scale, −scale"),
        ("def func(", "def func2(", "is gone"),
    ],
    ids=["grew", "inserted", "reordered", "renamed", "gone"],
)
def test_an_exported_function_with_other_parameters_is_told(
    make_series: Make, tmp_path: Path, old: str, new: str, what: str
) -> None:
    signature = only(signatures(make_series, tmp_path, old, new))
    assert (signature.function, signature.file, signature.what) == ("flash_attn.cute.func", INTERFACE, what)
    assert signature.named == ()


def test_a_function_has_the_name_that_it_is_exported_by(make_series: Make, tmp_path: Path) -> None:
    signature = only(signatures(make_series, tmp_path, "*, lengths", "*, sizes"))
    assert signature.function == "flash_attn.cute.varlen"
    assert signature.what == "changed: +sizes, −lengths"


def test_a_private_function_that_a_patch_names_is_told_with_the_patch(
    make_series: Make, tmp_path: Path
) -> None:
    found = signatures(make_series, tmp_path, "_fwd(q, k, v, scale):", "_fwd(q, k, v, scale, splits=1):")
    signature = only(found)
    assert signature.function == "flash_attn.cute.interface._fwd"
    assert signature.what == "grew at its end: splits"
    assert signature.named == NAMES
    assert upstream_words.rows(found)["parameters of public functions"] == "1"
    assert "    named by patch 1: look at what is passed by place" in upstream_words.lines(found, NAMES)


@pytest.mark.parametrize(
    ("old", "new", "file"),
    [
        ("_other(q)", "_other(q, k)", INTERFACE),
        ("forward(q)", "forward(q, k)", INTERFACE),
        ("hidden(a)", "hidden(a, b)", HELPER),
        ("scale=None, causal=False", "scale=1.0, causal=True", INTERFACE),
    ],
    ids=["nobody calls it", "a method", "not exported", "defaults"],
)
def test_other_parameters_are_not_told(
    make_series: Make, tmp_path: Path, old: str, new: str, file: str
) -> None:
    assert signatures(make_series, tmp_path, old, new, file).signatures == ()


def test_a_rebase_tells_and_reports_them(
    make_series: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, series = tmp_path / "repository", "patches/flash-attn-4"
    fill_repository(root, make_series, (), FILES)
    make_series(PATCH, base=FILES, folder=root, to=series)
    changes.write(root / "CHANGES.md", changes.render(matrix.load(root / "wheel_matrix.toml"), root))
    there = FILES | {INTERFACE: FILES[INTERFACE].replace("causal=False)", "causal=False, window=None)")}
    loaded = matrix.load(root / "wheel_matrix.toml").of("flash-attn-4")
    release = Release(NEW, checkout_of(there), "a fixture")
    rebase = Rebase(root, root / "build/rebase")
    report = rebase.start(loaded, model.read(root / series), checkout_of(FILES), release)
    assert only(report.upstream).what == "grew at its end: window"
    assert "flash_attn.cute.func grew at its end: window" in capsys.readouterr().out
