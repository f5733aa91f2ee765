"""What upstream adds and changes is noticed where no merge conflicts: fixtures shaped like its main branch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from scripts.base.errors import ActionNeeded, UpstreamError
from scripts.base.git import Repository
from scripts.commands import forecast as forecast_command
from scripts.series import model, own
from scripts.series.rebase.state import Report
from scripts.series.rebase.steps import Rebase
from scripts.series.upstream import forecast
from scripts.series.upstream import words as upstream_words
from scripts.series.upstream.report import Listing, UpstreamChanges
from scripts.source import kernel_set, matrix
from scripts.source.releases import Release
from tests.unit.conftest import BASE, GONE, PIN, ROOT, Make, checkout_of, commit_each, fill_repository

API = "csrc/flash_attn/flash_api.cpp"
LAUNCH = "csrc/flash_attn/src/launch.h"
INTERFACE = "flash_attn/interface.py"
FOLDER = "csrc/flash_attn/src"
KERNEL, NEW_KERNEL = "flash_fwd_hdim32_fp16_sm80.cu", "flash_fwd_split_align_hdim32_fp16_sm80.cu"
SETUP = """def threads(flags): return flags + ["--threads"]
if not ROCM:
    CUDAExtension(
        sources=["csrc/flash_attn/flash_api.cpp", "csrc/flash_attn/src/flash_fwd_hdim32_fp16_sm80.cu"],
        extra_compile_args={"nvcc": threads(["-O3"])},
    )
else:
    CUDAExtension(sources=["csrc/flash_attn_ck/flash_api.cu"], extra_compile_args=["-DROCM"])
"""
SERIES_FOLDER = "patches/flash-attn"
NAMES = ("Ask-for-one-split.patch", "Bind-a-second-name.patch")
FILES = BASE | {
    "setup.py": SETUP,
    "MANIFEST.in": "recursive-include csrc *.cu\n",
    "flash_attn/__init__.py": '__version__ = "2.8.3.post1"\nfrom flash_attn.interface import flash_attn_func\n',
    INTERFACE: "def flash_attn_func(q, k):\n    return q @ k\n\n\ndef _private(q):\n    return q\n",
    API: """namespace NS {
void set_params(Params &params, int num_splits) {
    params.num_splits = num_splits;
}
at::Tensor
mha_varlen_fwd(at::Tensor &q, const std::optional<at::Tensor> &k_, bool causal = false) {
    Params params;
    set_params(params, 0);
    check(q);
    check(k_);
    run(params);
    free(params);
    return q;
}
}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    m.def("varlen_fwd", &NS::mha_varlen_fwd, "Forward pass");
}
""",
    LAUNCH: """template<typename T, int Headdim>
__forceinline__ __device__ void dispatch(Params &params) {
    // 128 wide
    constexpr int kBlockN = 128;
    run<kBlockN>(params);
}

struct Mask {
    const int rows;

    __device__ void apply(int row) {
        hide(row);
    }
};
""",
    f"{FOLDER}/{KERNEL}": '#include "launch.h"\n',
}
SPLIT = (
    "Ask for one split",
    {
        API: FILES[API].replace(
            "set_params(params, 0);", "int one_split_of_ours = 1;\n    set_params(params, one_split_of_ours);"
        )
    },
    f"symbol one_split_of_ours in {API}",
)
BIND = (
    "Bind a second name",
    {
        "csrc/flash_attn/src/fork.h": "#pragma once\nauto fork = &NS::mha_varlen_fwd;\nauto d = dispatch<T, 32>;\n"
    },
    "symbol fork in csrc/flash_attn/src/fork.h",
)
GROWN = {API: FILES[API].replace("bool causal = false)", "bool causal = false,\n    int num_splits = 0)")}
OTHER_MEANING = {
    LAUNCH: FILES[LAUNCH].replace(
        "run<kBlockN>(params);", "params.num_splits == 1 ? run<64>(params) : run<kBlockN>(params);"
    )
}
ADDED = {
    f"{FOLDER}/{NEW_KERNEL}": '#include "launch.h"\n',
    "setup.py": SETUP.replace(
        'hdim32_fp16_sm80.cu"', f'hdim32_fp16_sm80.cu", "{FOLDER}/{NEW_KERNEL}"'
    ).replace('"-O3"', '"-O3", "-DMORE"'),
}
NEW = PIN.model_copy(
    update={
        "version": "9.9.9",
        "tag": "v9.9.9",
        "commit": "unknown",
        "cutlass": "unknown",
        "sdist_sha256": "9" * 64,
    }
)


NOTHING = UpstreamChanges(
    files=Listing(),
    sources=Listing(),
    flags=Listing(),
    manifest=Listing(),
    unknown_kernels=(),
    signatures=(),
    relied=(),
)


def with_new(new: dict[str, str]) -> dict[str, str]:
    return {name: text for name, text in (FILES | new).items() if text != GONE}


def changes_of(
    make_series: Make, tmp_path: Path, new: dict[str, str], history: Repository | None = None
) -> UpstreamChanges:
    """As a forecast tells them, of a series with SPLIT and BIND."""
    series = model.read(make_series(SPLIT, BIND, base=FILES))
    old_pin, new_pin = PIN, NEW
    if history is not None:
        commits = history.run("rev-list", "HEAD").split()
        old_pin, new_pin = (
            pin.model_copy(update={"commit": c}) for pin, c in ((PIN, commits[-1]), (NEW, commits[0]))
        )
    release = Release(new_pin, checkout_of(with_new(new)), "a fixture")
    found = forecast.run_forecast(tmp_path / "build", series, old_pin, checkout_of(FILES), release, history)
    assert [m.outcome.value for m in found.moves if not m.outcome.moves] == [], "no merge shows any of it"
    return found.upstream


def test_a_release_that_is_the_same_has_no_changes(make_series: Make, tmp_path: Path) -> None:
    found = changes_of(make_series, tmp_path, {})
    assert upstream_words.lines(found, NAMES) == []
    assert set(upstream_words.rows(found).values()) == {"–"}


def test_a_new_kernel_file_is_told_with_what_to_edit(make_series: Make, tmp_path: Path) -> None:
    found = changes_of(make_series, tmp_path, ADDED)
    assert found.unknown_kernels == (NEW_KERNEL,)
    assert found.files == Listing(added=(f"{FOLDER}/{NEW_KERNEL}",))
    assert found.sources == Listing(added=(f"{FOLDER}/{NEW_KERNEL}",))
    assert found.flags == Listing(added=("-DMORE",)), "and not those of another branch"
    text = "\n".join(upstream_words.lines(found, NAMES))
    for part in ("scripts/source/kernel_set.py", 'FWD_SPLIT_ALIGN = "fwd_split_align" to Pass', "LEFT_OUT"):
        assert part in text


def test_files_flags_and_lines_that_are_gone_are_told(make_series: Make, tmp_path: Path) -> None:
    gone = {f"{FOLDER}/{KERNEL}": GONE, "setup.py": SETUP.replace('"--threads"', ""), "MANIFEST.in": ""}
    found = changes_of(make_series, tmp_path, gone)
    assert found.files == Listing(gone=(f"{FOLDER}/{KERNEL}",))
    assert found.flags == Listing(gone=("--threads",))
    assert found.manifest == Listing(gone=("recursive-include csrc *.cu",))


def test_a_signature_that_grew_is_told_with_the_patches_that_change_or_name_it(
    make_series: Make, tmp_path: Path
) -> None:
    found = changes_of(make_series, tmp_path, GROWN)
    (signature,) = found.signatures
    assert signature.function == "flash_attn_2_cuda.varlen_fwd"
    assert signature.old == ("q", "k_", "causal")
    assert signature.what == "grew at its end: num_splits"
    assert signature.patches == NAMES[:1]
    assert signature.named == NAMES[1:]
    text = "\n".join(upstream_words.lines(found, NAMES))
    assert "named by patch 2: look at what is passed by place" in text


def test_parameters_that_a_patch_and_upstream_both_add_are_told(make_series: Make, tmp_path: Path) -> None:
    own = {API: FILES[API].replace("bool causal = false)", "bool causal = false, Mask attn_mask = {})")}
    series = model.read(make_series(("Take a mask", own), base=FILES))
    release = Release(NEW, checkout_of(FILES | GROWN), "a fixture")
    found = forecast.run_forecast(tmp_path / "build", series, PIN, checkout_of(FILES), release)
    (signature,) = found.upstream.signatures
    assert list(signature.own.values()) == [("attn_mask",)]
    assert "patch 1 gives it attn_mask: look at who passes by place" in "\n".join(
        upstream_words.lines(found.upstream, [m.patch for m in found.moves])
    )


def test_a_public_python_function_that_changed_its_parameters_is_told(
    make_series: Make, tmp_path: Path
) -> None:
    text = (
        FILES[INTERFACE]
        .replace("func(q, k)", "func(q, kv, *, scale=1)")
        .replace("_private(q)", "_private(k)")
    )
    (signature,) = changes_of(make_series, tmp_path, {INTERFACE: text}).signatures
    assert signature.function == "flash_attn.interface.flash_attn_func"
    assert signature.what == "changed: +kv, +scale, −k"


def test_a_function_that_means_something_else_is_told_by_patch(make_series: Make, tmp_path: Path) -> None:
    body = {API: FILES[API].replace("    return q;", "    return q.clone();")}
    found = changes_of(make_series, tmp_path, body | OTHER_MEANING)
    assert [(r.patch, r.how, r.function) for r in found.relied] == [
        (NAMES[0], "changes", "mha_varlen_fwd"),
        (NAMES[1], "names", "mha_varlen_fwd"),
        (NAMES[1], "names", "dispatch"),
    ]
    assert f"{LAUNCH}: dispatch has changed; named by patch 2" in upstream_words.lines(found, NAMES)


def test_what_our_own_files_name_is_told_by_their_paths(make_series: Make, tmp_path: Path) -> None:
    """Upstream's own files are none of ours, whatever they name."""
    (name, text), *_ = BIND[1].items()
    ours = own.OwnFiles(None, {name: text.encode()})
    series = replace(model.read(make_series(SPLIT, base=FILES)), own=ours)
    release = Release(NEW, checkout_of(FILES | OTHER_MEANING), "a fixture")
    found = forecast.run_forecast(tmp_path / "build", series, PIN, checkout_of(FILES), release)
    assert [(r.patch, r.how, r.function) for r in found.upstream.relied] == [(name, "names", "dispatch")]


def test_words_of_another_language_name_no_function(make_series: Make, tmp_path: Path) -> None:
    both = {
        "flash_attn/own.py": "apply = 'a dispatch in prose'\n",
        "csrc/flash_attn/src/own.h": "int flash_attn_func;\n",
    }
    series = model.read(make_series(("Say words", both), base=FILES))
    new = {INTERFACE: FILES[INTERFACE].replace("q @ k", "k @ q"), **OTHER_MEANING}
    release = Release(NEW, checkout_of(FILES | new), "a fixture")
    found = forecast.run_forecast(tmp_path / "build", series, PIN, checkout_of(FILES), release)
    assert found.upstream.relied == ()


def test_comments_and_other_functions_are_no_other_meaning(make_series: Make, tmp_path: Path) -> None:
    new = FILES[LAUNCH].replace("// 128 wide", "/* of\n keys */").replace("hide(row)", "hide(row + 1)")
    assert changes_of(make_series, tmp_path, {LAUNCH: new}).relied == ()


def test_a_function_that_is_gone_is_told(make_series: Make, tmp_path: Path) -> None:
    (relied,) = changes_of(
        make_series, tmp_path, {LAUNCH: FILES[LAUNCH].replace(" dispatch(", " chosen(")}
    ).relied
    assert (relied.function, relied.became) == ("dispatch", "gone")


@pytest.fixture
def history(tmp_path: Path) -> Repository:
    """Upstream's: a commit that changes a function's meaning between two that do not."""
    steps = (
        ("release", FILES),
        ("Say more in a comment", {LAUNCH: FILES[LAUNCH].replace("128 wide", "128 keys wide")}),
        ("Take other tiles for one split", OTHER_MEANING),
        ("Hide more", {LAUNCH: OTHER_MEANING[LAUNCH].replace("hide(row)", "hide(row, 1)")}),
    )
    return commit_each(tmp_path / "upstream", steps, UpstreamError)


def test_upstream_s_commits_on_a_function_are_told_where_git_has_them(
    make_series: Make, tmp_path: Path, history: Repository
) -> None:
    found = changes_of(make_series, tmp_path, OTHER_MEANING, history)
    (relied,) = found.relied
    assert [title.partition(" ")[2] for title in relied.commits] == ["Take other tiles for one split"]
    assert any("Take other tiles for one split" in line for line in upstream_words.lines(found, NAMES))


# --- the commands ---


def test_a_forecast_s_table_and_document_have_it(
    make_series: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    series = model.read(make_series(SPLIT, BIND, base=FILES))
    release = Release(NEW, checkout_of(FILES | ADDED | GROWN | OTHER_MEANING), "a fixture")
    found = forecast.run_forecast(tmp_path / "build", series, PIN, checkout_of(FILES), release)
    loaded = matrix.load(ROOT / "wheel_matrix.toml")
    told_of = forecast_command._Forecast(loaded, series, {"9.9.9": found}, {"9.9.9": "v9.9.9"})
    document = told_of.as_data()
    assert document["upstream"]["9.9.9"]["unknown_kernels"] == [NEW_KERNEL]
    assert document["upstream"]["9.9.9"]["signatures"][0]["new"][-1] == "num_splits"
    table = forecast_command._markdown(told_of).splitlines()
    assert "| kernel files that are not known here | 1 |" in table
    forecast_command._show(told_of)
    told = capsys.readouterr().out
    for part in (NEW_KERNEL, "grew at its end: num_splits", "dispatch has changed", "LEFT_OUT"):
        assert part in told
    assert told.splitlines()[-1].strip() == "next: nox -s rebase -- v9.9.9"


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"2.8.2": "2.8.2"}, "nox -s forecast -- latest"),
        ({"2.8.3.post1": "latest"}, "nothing; no release is newer"),
        (
            {"2.8.3.post10": "latest", "2.8.3.post9": "2.8.3.post9", "2.8.2": "2.8.2"},
            "nox -s rebase -- latest",
        ),
        ({"2.8.4.dev0+g0251105a": "0251105a"}, "nox -s rebase -- 0251105a"),
    ],
)
def test_a_forecast_ends_with_the_next_command(
    make_series: Make, asked: dict[str, str], expected: str
) -> None:
    found = dict.fromkeys(asked, forecast.Forecast([], NOTHING))
    loaded = matrix.load(ROOT / "wheel_matrix.toml")
    told_of = forecast_command._Forecast(loaded, model.read(make_series(SPLIT, base=FILES)), found, asked)
    assert told_of.what_next().startswith(expected)


@pytest.fixture
def repository(make_series: Make, tmp_path: Path) -> Path:
    fill_repository(tmp_path / "repository", make_series, (SPLIT, BIND), FILES)
    return tmp_path / "repository"


def rebased(root: Path, new: dict[str, str]) -> Report:
    loaded = matrix.load(root / "wheel_matrix.toml")
    release = Release(NEW, checkout_of(with_new(new)), "a fixture")
    return Rebase(root, root / "build/rebase").start(
        loaded, model.read(root / SERIES_FOLDER), checkout_of(FILES), release
    )


def test_a_rebase_tells_at_its_begin_and_in_its_report(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = rebased(repository, GROWN | OTHER_MEANING)
    told = capsys.readouterr().out
    assert told.index("grew at its end: num_splits") < told.index("1/2 "), "before the first patch moves"
    assert "dispatch has changed; named by patch 2" in told
    assert report.upstream.signatures[0].what == "grew at its end: num_splits"
    assert [r.function for r in report.upstream.relied if r.how == "names"][-1] == "dispatch"


def test_a_rebase_does_not_end_until_the_table_knows_new_kernel_files(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ActionNeeded) as caught:
        rebased(repository, ADDED)
    text = str(caught.value)
    for part in (NEW_KERNEL, "scripts/source/kernel_set.py", "STEMS", "LEFT_OUT", "--continue"):
        assert part in text
    assert matrix.load(repository / "wheel_matrix.toml").upstream == PIN, "nothing was written"
    monkeypatch.setitem(kernel_set.LEFT_OUT, "flash_fwd_split_align_*.cu", "a test does without them")
    report = Rebase(repository, repository / "build/rebase").proceed()
    assert report.new == "9.9.9"
    assert report.upstream.files == Listing(added=(f"{FOLDER}/{NEW_KERNEL}",))


def test_a_rebase_does_not_end_while_the_table_names_kernel_files_that_are_gone(repository: Path) -> None:
    with pytest.raises(ActionNeeded, match=rf"1 kernel files are gone in 9\.9\.9: {KERNEL}"):
        rebased(repository, {f"{FOLDER}/{KERNEL}": GONE})
