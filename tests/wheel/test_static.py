"""What can be proved of a wheel without a GPU."""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import flash_attn
import flash_attn_2_cuda
import pytest
import torch
from fatbin import architectures
from flash_attn import deterministic_mode, fork_info, set_deterministic_mode
from mode_rules import *  # noqa: F403 - the cases of the mode, which find the fixtures below
from mode_rules import VARIABLES, Process

DISTRIBUTION = importlib.metadata.distribution("flash_attn")


@pytest.fixture
def package() -> ModuleType:
    return flash_attn


@pytest.fixture
def in_process() -> Process:
    def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", f"import flash_attn as f\n{code}"],
            check=False,
            env={**os.environ, **dict.fromkeys(VARIABLES, ""), **environment},
            capture_output=True,
            text=True,
        )

    return run


def test_version_names_the_fork_cuda_and_torch() -> None:
    info = fork_info()
    version, _, commit = info["upstream"]["version"].partition("+")  # of a commit that is no release
    expected = f"{version}+det.{info['fork_revision']}.{f'{commit}.' if commit else ''}cu{info['cuda'].replace('.', '')}.torch{'.'.join(info['torch'].split('.')[:2])}"
    assert DISTRIBUTION.version == expected
    if commit:  # its files name the release that it came after, or that it leads to
        numbers = [re.match(r"\d+(\.\d+)*", text)[0] for text in (flash_attn.__version__, version)]
        assert numbers[0] == numbers[1]
    else:
        assert flash_attn.__version__ == version


def test_docstrings_tell_of_mask_and_bias_before_what_is_returned() -> None:
    functions = [
        getattr(flash_attn, name)
        for name in dir(flash_attn)
        if name.startswith("flash_attn_") and name.endswith(("func", "kvcache"))
    ]
    assert len(functions) == 7
    for function in functions:
        text = inspect.getdoc(function) or ""
        places = [
            re.search(rf"(?m)^ *{words}", text)
            for words in ("Arguments:", "    attn_mask: bool", "    attn_bias: dtype", "Return:")
        ]
        starts = [place.start() if place else -1 for place in places]
        assert -1 not in starts, function
        assert starts == sorted(starts), function


def test_torch_is_the_one_it_was_built_for() -> None:
    assert torch.__version__.split("+")[0] == fork_info()["torch"]
    assert torch.version.cuda == fork_info()["cuda"]


def test_requirement_on_torch_is_the_minor_release_it_was_built_for() -> None:
    series = ".".join(fork_info()["torch"].split(".")[:2])
    assert f"torch=={series}.*" in (DISTRIBUTION.requires or [])


def test_wheel_carries_both_licence_files() -> None:
    names = {Path(str(f)).name for f in DISTRIBUTION.files or []}
    assert {"LICENSE", "NOTICE"} <= names


def test_provenance_is_complete() -> None:
    info = fork_info()
    assert re.fullmatch(r"[0-9a-f]{40}", info["upstream"]["commit"])
    assert re.fullmatch(r"[0-9a-f]{64}", info["series"]["digest"])
    assert re.fullmatch(r"[0-9a-f]{40}", info["series"]["commit"])
    assert all(p["name"].endswith(".patch") and p["subject"] for p in info["series"]["patches"])
    assert info["nvcc"]["flags"] and info["nvcc"]["version"]


def test_kernels_inside_are_those_the_provenance_names() -> None:
    assert sorted(flash_attn_2_cuda.kernel_set()) == sorted(fork_info()["kernel_set"])


def test_masks_and_biases_are_taken_if_the_provenance_says_so() -> None:
    provenance = json.loads(Path(flash_attn.__file__).with_name("_fork.json").read_text(encoding="utf-8"))
    assert provenance["attn_bias"] is flash_attn_2_cuda.has_attn_bias is fork_info()["attn_bias"]


def test_machine_code_is_for_the_architectures_the_provenance_names() -> None:
    assert architectures(Path(flash_attn_2_cuda.__file__)) == {
        f"sm_{a}" for a in fork_info()["architectures"]
    }


def test_upstream_surface_is_all_there() -> None:
    functions = [
        "flash_attn_func",
        "flash_attn_kvpacked_func",
        "flash_attn_qkvpacked_func",
        "flash_attn_varlen_func",
    ]
    functions += [
        "flash_attn_varlen_kvpacked_func",
        "flash_attn_varlen_qkvpacked_func",
        "flash_attn_with_kvcache",
    ]
    for name in functions:
        parameters = inspect.signature(getattr(flash_attn, name)).parameters
        assert all(
            parameters[own].kind is inspect.Parameter.KEYWORD_ONLY for own in ("attn_mask", "attn_bias")
        )
    for name in ("fwd", "varlen_fwd", "bwd", "varlen_bwd", "fwd_kvcache"):
        assert callable(getattr(flash_attn_2_cuda, name))
    assert list(inspect.signature(flash_attn.flash_attn_func).parameters)[:6] == [
        "q",
        "k",
        "v",
        "dropout_p",
        "softmax_scale",
        "causal",
    ]


@torch.library.custom_op("fork_test::split_size_now", mutates_args=())
def split_size_now(x: torch.Tensor) -> torch.Tensor:
    enabled, size = flash_attn_2_cuda.get_deterministic_mode()
    return torch.full_like(x, size if enabled else 0)


@split_size_now.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_compiled_function_obeys_the_mode_it_runs_under() -> None:
    """An operator that reads the mode as the forward pass does, compiled once and called in several modes."""
    compiled = torch.compile(lambda x: split_size_now(x) + 0, backend="aot_eager", fullgraph=True)
    x = torch.zeros(1)
    assert compiled(x).item() == 0
    with deterministic_mode(split_size=256):
        assert compiled(x).item() == 256
        with deterministic_mode(split_size=512):
            assert compiled(x).item() == 512
    set_deterministic_mode(True, 1024)
    assert compiled(x).item() == 1024
    set_deterministic_mode(False)
    assert compiled(x).item() == 0


def test_scope_inside_a_compiled_function() -> None:
    @torch.compile(backend="aot_eager")
    def function(x: torch.Tensor) -> torch.Tensor:
        before = split_size_now(x)
        with deterministic_mode(split_size=768):
            inside = split_size_now(x)
        return torch.stack([before, inside, split_size_now(x)])

    for _ in range(2):
        assert function(torch.zeros(1)).flatten().tolist() == [0, 768, 0]


@pytest.mark.parametrize(("torch_version", "cuda"), [("1.99.0", None), (None, "99.0"), (None, "None")])
def test_another_torch_or_cuda_is_refused_by_name_before_a_symbol_is_missed(
    torch_version: str | None, cuda: str | None
) -> None:
    code = "import torch\n"
    code += f"torch.__version__ = {torch_version!r}\n" if torch_version else ""
    code += f"torch.version.cuda = {None if cuda == 'None' else cuda!r}\n" if cuda else ""
    code += "import sys\ntry:\n    import flash_attn\nexcept ImportError as error:\n    print(error, 'flash_attn_2_cuda' in sys.modules)\n"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    wanted = ".".join(fork_info()["torch"].split(".")[:2])
    assert (
        f"built for torch {wanted} with CUDA {fork_info()['cuda'].split('.')[0]}; here is torch "
        in done.stdout
    )
    assert (torch_version or cuda if cuda != "None" else "absent") in done.stdout
    assert f"Install the wheel for this torch, or torch {wanted}.*." in done.stdout
    assert done.stdout.rstrip().endswith("False"), "the extension was loaded first"
