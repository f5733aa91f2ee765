from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from scripts.base.errors import MatrixError, UsageError
from scripts.source import kernel_set, matrix
from scripts.wheels.compiling.flags import masks

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "wheel_matrix.toml").read_text(encoding="utf-8")


def load(tmp_path: Path, text: str) -> matrix.Matrix:
    path = tmp_path / "wheel_matrix.toml"
    path.write_text(text, encoding="utf-8")
    return matrix.load(path)


def changed(old: str, new: str) -> str:
    assert old in TEXT
    return TEXT.replace(old, new, 1)


def test_the_repository_s_matrix_has_the_pin_of_the_design() -> None:
    loaded = matrix.load(ROOT / "wheel_matrix.toml")
    assert loaded.upstream.version == "2.8.3.post1"
    assert loaded.upstream.commit == "a8aa52b1ab3e9ca574c8a33b3f35afc017ffa2e2"
    assert loaded.version(loaded.default()) == "2.8.3.post1+det.2.cu13"


def test_a_commit_that_is_no_release_has_no_tag_and_gives_wheels_a_valid_version(tmp_path: Path) -> None:
    text = changed('version = "2.8.3.post1"', 'version = "2.8.4.dev0+g0251105a"')
    loaded = load(tmp_path, text.replace('tag = "v2.8.3.post1"\n', ""))
    assert loaded.upstream.tag is None
    version = loaded.version(loaded.default())
    assert version == "2.8.4.dev0+det.2.g0251105a.cu13"
    assert str(Version(version)) == version
    assert Version("2.8.3.post1+det.2.cu13") < Version(version) < Version("2.8.4")


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            'cuda = "13.0"',
            'cuda = "13.0"\ncudda = "13.0"',
            ["targets.cu13.cudda: unknown key", "allowed are default, cuda, torch"],
        ),
        ('cuda = "13.0"', "cuda = 13.0", ["targets.cu13.cuda", "string", "13.0"]),
        ('arch = ["90"]', 'arch = ["91"]', ["targets.cu13.arch.0", "'80'", "'91'"]),
        ('torch = ">=2.10"', 'torch = "2.10"', ["targets.cu13.torch", "'2.10' is no range of versions"]),
        (
            'reference-torch = "2.11.0"',
            'reference-torch = "2.99.0"',
            ["targets.cu13.reference-torch: torch 2.99.0 is not in [torch-cuda]", "2.11.0"],
        ),
        (
            'torch = ">=2.10"',
            'torch = ">=2.12"',
            ["targets.cu13.reference-torch: torch 2.11.0 is not in the range >=2.12"],
        ),
        (
            'cuda = "13.0"\ntorch = ">=2.10"',
            'cuda = "12.4"\ntorch = ">=2.10"',
            ["torch 2.11.0 is built for CUDA 13.0, not 12.4", "there is 2.6.0"],
        ),
        (
            'cuda = "12.4"\ntorch = ">=2.4"',
            'cuda = "13.0"\ntorch = ">=2.4"',
            ["torch 2.6.0 is built for CUDA 12.4, not 13.0", "there is 2.11.0"],
        ),
        ('toolkit = "13.0.2"', 'toolkit = "12.8.1"', ["toolkit: 12.8.1 is no full release of CUDA 13.0"]),
        ('kernels = "hdim64,', 'kernels = "hdim65,', ["'hdim65' names no kernels", "hdim64"]),
        (
            "default = true",
            "default = false",
            ["one target of flash-attn must have default = true; none has"],
        ),
        ('commit = "a8aa', 'commit = "xyz', ["upstreams.flash-attn.commit", "is not a full commit id"]),
        ('sdist-sha256 = "55', 'sdist-sha256 = "5', ["upstreams.flash-attn.sdist-sha256", "is not a sha256"]),
        ('version = "2.8.3.post1"', "", ["upstreams.flash-attn.version: this key is missing"]),
        ("revision = 2", "revision = 0", ["upstreams.flash-attn.revision", "greater than or equal to 1"]),
        ('"2.6.0" = "12.4"', '"2.6.0" = 12.4', ["torch-cuda.2.6.0"]),
        ('arch = ["90"]', "arch = [90]", ["arch.0", 'write "90", in quotes']),
        ('arch = ["90"]', 'arch = ["90", "90"]', ["arch: 90 is named twice"]),
        ('toolkit = "13.0.2"', 'toolkit = "13.0"', ["toolkit: 13.0 is no full release of CUDA 13.0"]),
        ('"2.8.3" = "1e', '"2.8.3" = "1', ["upstreams.flash-attn.releases.2.8.3", "is not a sha256"]),
        ("[torch-cuda]", "[torch-cuda", ["not TOML", "line"]),
        (
            "[shared-ptx]",
            '[shared-ptx]\n"90" = ["80"]',
            ["shared-ptx.90: 80 is no later than 90, whose PTX it would be made from"],
        ),
        (
            "[shared-ptx]",
            '[shared-ptx]\n"80" = ["90"]\n"86" = ["90"]',
            ["shared-ptx.86: 90 is made from the PTX of 80 already"],
        ),
        (
            'toolkit = "12.4.1"',
            'toolkit = "12.4.2"',
            ["toolkit: the package index has no compiler of CUDA 12.4; describe 12.4.2 in [toolkits]"],
        ),
        (
            'package = "pool/',
            'package = "/pool/',
            ["toolkits.12.4.1.package", "is not the path of a package on a Debian mirror"],
        ),
        (
            '"nvidia-cuda-runtime-cu12==12.4.127"',
            '"nvidia-cuda-runtime-cu12"',
            ["toolkits.12.4.1.headers.0", "is no package of one version"],
        ),
        (
            'sha256 = "cd5f',
            'sha = "cd5f',
            ["toolkits.12.4.1.sha: unknown key; allowed are package, sha256, headers", "this key is missing"],
        ),
        (
            'torch = "2.6.0"\narch = ["90"]',
            'torch = "2.6.0"\narch = ["90", "120"]',
            ["targets.cu12.arch: nvcc 12.4 knows no compute capability 120 (CUDA 12.8 and later)"],
        ),
        (
            "[targets.cu13]",
            '[targets."cu13/../x"]',
            ["targets.cu13/../x: a target's name is a folder's"],
        ),
        (
            '[upstreams.flash-attn-4]\nkind = "python"',
            "[upstreams.flash-attn-4]",
            ["upstreams.flash-attn-4.kind: this key is missing"],
        ),
        ('kind = "python"', 'kind = "rust"', ["upstreams.flash-attn-4.kind", "'cuda' or 'python'"]),
        (
            'package = "flash_attn/cute"\n',
            "",
            ["upstreams.flash-attn-4.package: this key is missing; kind python needs it"],
        ),
        (
            'package = "flash_attn/cute"\n',
            'package = "flash_attn/cute"\ncutlass = "unknown"\n',
            ["upstreams.flash-attn-4.cutlass: kind python has none"],
        ),
        (
            'series = "patches/flash-attn-4"',
            'series = "patches/flash-attn"',
            ["upstreams.flash-attn.series: patches/flash-attn is the folder of flash-attn-4 already"],
        ),
        (
            'series = "patches/flash-attn-4"',
            'series = "../x"',
            ["series", "is not a folder such as patches/"],
        ),
        (
            'arch = ["90"]',
            'upstream = "flash-attn-4"\narch = ["90"]',
            ["targets.cu13.upstream: 'flash-attn-4' must be of kind cuda; there is flash-attn"],
        ),
        (
            "[torch-cuda]",
            "[torch-cude]",
            [
                "torch-cude: unknown key; allowed are upstreams, torch-cuda, images, shared-ptx, toolkits, targets"
            ],
        ),
    ],
)
def test_a_mistake_is_named_with_file_key_and_what_is_allowed(
    tmp_path: Path, old: str, new: str, expected: list[str]
) -> None:
    with pytest.raises(MatrixError) as caught:
        load(tmp_path, changed(old, new))
    for part in [str(tmp_path / "wheel_matrix.toml"), *expected]:
        assert part in str(caught.value)


def test_an_upstream_s_name_is_that_of_an_option_and_a_folder(tmp_path: Path) -> None:
    text = TEXT.replace("[upstreams.flash-attn-4", '[upstreams."Flash 4"')
    number = text.splitlines().index('[upstreams."Flash 4"]') + 1
    with pytest.raises(MatrixError, match=f"wheel_matrix.toml:{number}: .*an upstream's name is an option's"):
        load(tmp_path, text)


def test_each_upstream_sees_its_own_pin_and_targets() -> None:
    first = matrix.load(ROOT / "wheel_matrix.toml")
    second = first.of("flash-attn-4")
    assert [one.name for one in first.each()] == ["flash-attn", "flash-attn-4"]
    assert first.is_first
    assert first.of(None) == first == second.of("flash-attn")
    assert not second.is_first
    assert (second.upstream.package, second.upstream.cutlass) == ("flash_attn/cute", None)
    assert second.version() == f"{second.upstream.version}+det.{second.table.revision}"
    assert second.targets == ()
    assert first.targets == first.all_targets == second.all_targets
    assert not set(first.releases) & set(second.releases)
    with pytest.raises(UsageError, match="no target for flash-attn-4, which is of kind python"):
        second.default()
    with pytest.raises(UsageError, match="no upstream 'flash'; it has flash-attn, flash-attn-4"):
        first.of("flash")


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ('arch = ["90"]', 'arch = ["91"]', 'arch = ["91"]'),
        ("revision = 2", "revision = -1", "revision = -1"),
        ('cuda = "13.0"', "cuda = 1", "cuda = 1"),
        ("default = true", "default = false", "[targets.cu13]"),
        (
            "[targets.cu13-full]",
            "[targets.cu13-full]\ndefault =  true",
            "default =  true",
        ),
    ],
)
def test_the_line_is_that_of_the_key(tmp_path: Path, old: str, new: str, line: str) -> None:
    text = changed(old, new)
    number = next(i for i, candidate in enumerate(text.splitlines(), 1) if candidate.startswith(line))
    with pytest.raises(MatrixError, match=f"wheel_matrix.toml:{number}: "):
        load(tmp_path, text)


def test_a_file_that_is_not_utf_8_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "wheel_matrix.toml"
    path.write_bytes(b"# caf\xe9\n")
    with pytest.raises(MatrixError, match="not UTF-8"):
        matrix.load(path)


@given(
    st.sets(st.sampled_from(kernel_set.HEAD_DIMS), min_size=1),
    st.sets(st.sampled_from(kernel_set.DTYPES), min_size=1),
    st.sets(st.booleans(), min_size=1),
    st.booleans(),
)
def test_a_choice_is_spelled_by_words_that_name_it_again(
    dims: set[int], dtypes: set[str], causal: set[bool], bias: bool
) -> None:
    chosen = tuple(
        replace(k, bias=bias)
        for k in kernel_set.ALL_KERNELS
        if k.head_dim in dims and k.dtype in dtypes and k.causal in causal
    )
    assert kernel_set.parse_kernels(",".join(kernel_set.spell_kernels(chosen))) == chosen


def test_kernels_without_bias_are_others() -> None:
    """Their objects must not answer for those that have it, nor the binding's."""
    with_bias, without = (
        kernel_set.parse_kernels("hdim64,fp16"),
        kernel_set.parse_kernels("no-bias,hdim64,fp16"),
    )
    assert [k.name for k in without] == [k.name for k in with_bias]
    assert not set(with_bias) & set(without)
    assert "-DFORK_NO_BIAS" in masks(without)
    assert "-DFORK_NO_BIAS" not in masks(with_bias)
    assert len(kernel_set.parse_kernels("no-bias")) == len(kernel_set.ALL_KERNELS)


def test_every_mistake_is_reported_at_once(tmp_path: Path) -> None:
    text = changed("revision = 2", "revision = 0").replace('arch = ["90"]', 'arch = ["91"]', 1)
    with pytest.raises(MatrixError) as caught:
        load(tmp_path, text)
    assert len(str(caught.value).splitlines()) == 2


def test_a_missing_file_and_an_unknown_target_are_errors(tmp_path: Path) -> None:
    with pytest.raises(MatrixError, match="No such file"):
        matrix.load(tmp_path / "absent.toml")
    with pytest.raises(UsageError, match=r"no target 'cu999'; it has cu13"):
        matrix.load(ROOT / "wheel_matrix.toml").named("cu999")


words = st.lists(
    st.sampled_from(
        [
            *(f"hdim{d}" for d in kernel_set.HEAD_DIMS),
            *kernel_set.DTYPES,
            "fwd",
            "split",
            "bwd",
            "causal",
            "full",
        ]
    ),
    min_size=1,
)


@given(words, words)
def test_a_choice_holds_the_kernels_that_every_kind_of_word_allows(
    first: list[str], second: list[str]
) -> None:
    chosen = set(kernel_set.parse_kernels(",".join(first)))
    assert chosen
    for kernel in kernel_set.ALL_KERNELS:
        parts = {
            f"hdim{kernel.head_dim}",
            kernel.dtype,
            kernel.kind.value,
            "causal" if kernel.causal else "full",
        }
        kinds = [
            {f"hdim{d}" for d in kernel_set.HEAD_DIMS},
            set(kernel_set.DTYPES),
            {"fwd", "split", "bwd"},
            {"causal", "full"},
        ]
        wanted = all(not (kind & set(first)) or parts & kind & set(first) for kind in kinds)
        assert (kernel in chosen) == wanted
    assert set(kernel_set.parse_kernels(",".join(first + second))) >= (
        chosen & set(kernel_set.parse_kernels(",".join(second)))
    )


@given(st.sets(st.sampled_from(kernel_set.ALL_KERNELS)))
def test_masks_name_each_kernel_by_one_bit(kernels: set[kernel_set.Kernel]) -> None:
    values = {
        name: int(value, 16)
        for name, value in (m.removeprefix("-DFORK_KERNELS_").split("=") for m in masks(sorted(kernels)))
    }
    assert sum(value.bit_count() for value in values.values()) == len(kernels)
    assert all(values[k.kind.name] >> k.bit & 1 for k in kernels)


@given(st.text())
def test_a_word_that_is_none_is_an_error_that_lists_them(text: str) -> None:
    try:
        kernel_set.parse_kernels(text)
    except ValueError as e:
        assert "hdim64" in str(e)  # noqa: PT017 - either outcome is fine


def test_kernel_files_are_named_as_upstream_names_them() -> None:
    names = {k.source for k in kernel_set.ALL_KERNELS}
    assert len(names) == 72
    assert {
        "flash_fwd_hdim64_fp16_sm80.cu",
        "flash_fwd_split_hdim256_bf16_causal_sm80.cu",
        "flash_bwd_hdim32_bf16_sm80.cu",
    } <= names
