"""What can be proved of a wheel without a GPU."""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import os
import re
import subprocess
import sys
import threading
from importlib.util import find_spec
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
from torch._subclasses.fake_tensor import FakeTensorMode

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


@pytest.mark.parametrize("text", ["-1", "soon", "1.5", "86401"])
def test_a_wait_limit_is_a_number_of_seconds(text: str, in_process: Process) -> None:
    done = in_process("", FA2_WAIT_LIMIT=text)
    assert (
        f"ValueError: FA2_WAIT_LIMIT='{text}' is no number of seconds from 0 (no limit) to 86400"
        in done.stderr
    )
    assert in_process("print('imported')", FA2_WAIT_LIMIT="0").stdout == "imported\n"


def test_version_names_the_fork_and_cuda_s_major_release() -> None:
    info = fork_info()
    version, _, commit = info["upstream"]["version"].partition("+")  # of a commit that is no release
    passes_for = info.get("base_version", "")
    source = f"of.{version}." if passes_for else ""
    label = f"{source}{f'{commit}.' if commit else ''}cu{info['cuda'].partition('.')[0]}"
    expected = f"{passes_for or version}+det.{info['fork_revision']}.{label}"
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


def test_torch_is_built_for_the_same_major_release_of_cuda() -> None:
    assert torch.version.cuda.partition(".")[0] == fork_info()["cuda"].partition(".")[0]


def test_requirement_on_torch_is_a_range_and_this_torch_is_in_it() -> None:
    wanted = fork_info()["requires_torch"]
    assert f"torch{wanted}" in (DISTRIBUTION.requires or [])
    assert wanted.startswith(">=")
    here, least = ([int(n) for n in re.findall(r"\d+", text)[:2]] for text in (torch.__version__, wanted))
    assert here >= least


@pytest.mark.parametrize("has_torch", [True, False])
def test_the_doctor_knows_the_wheel_and_runs_where_it_does_not_import(
    has_torch: bool, tmp_path: Path
) -> None:
    """A folder with an empty torch, first on the path, stands for a torch that does not import."""
    if not has_torch:
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch/__init__.py").write_text("raise ImportError('broken')")
    done = subprocess.run(
        [sys.executable, "-m", "flash_attn.doctor", "--json"],
        check=False,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    told = json.loads(done.stdout)
    info = fork_info()
    assert told["wheel"]["version"] == DISTRIBUTION.version
    assert told["wheel"]["architectures"] == info["architectures"]
    stopping = {problem["check"] for problem in told["problems"] if problem["stops"] == "import"}
    assert stopping == (set() if has_torch else {"torch-cpu"})
    assert bool(told["import"]["flash_attn"]) is not has_torch


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
    library = Path(flash_attn.__file__).parent / "cpp/lib/libflash_attention_v2.so.1"
    assert architectures(library) == {f"sm_{a}" for a in fork_info()["architectures"]}


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


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "torch.version.cuda = '99.0'",
            [
                "this flash_attn was built for CUDA {cuda}; ",
                " is built for CUDA 99.0. ",
                "ends in cu99, or a torch for CUDA {cuda}.",
            ],
        ),
        (
            "torch.version.cuda = None",
            [" is built without CUDA; flash_attn needs one built for CUDA {cuda} "],
        ),
        ("sys.modules['tvm_ffi'] = None", ["flash_attn needs the package apache-tvm-ffi"]),
        ("sys.modules['torch'] = None", ["flash_attn needs torch, built for CUDA"]),
        (
            """sys.modules['tvm_ffi'] = type(sys)('tvm_ffi')
torch.compiled_with_cxx11_abi = lambda: False
torch.Tensor = object  # nothing made it exchange tensors""",
            ["has the C++ ABI of before C++11", "setuptools, a C++ compiler, Python's", "torch 2.7 or newer"],
        ),
        (
            """sys.modules['tvm_ffi'] = type(sys)('tvm_ffi')
torch.compiled_with_cxx11_abi = lambda: False
torch.Tensor = object
sys.modules['setuptools'] = None""",
            ["That failed: setuptools is not installed (pip install setuptools)"],
        ),
    ],
    ids=[
        "another CUDA",
        "no CUDA",
        "no apache-tvm-ffi",
        "no torch",
        "an old ABI without a compiler",
        "an old ABI without setuptools",
    ],
)
@pytest.mark.parametrize("module", ["flash_attn", "flash_attn_2_cuda"])
def test_what_does_not_fit_is_refused_by_name_before_a_symbol_is_missed(
    module: str, code: str, said: list[str]
) -> None:
    code = f"import sys\nimport torch\n{code}\ntry:\n    import {module}\nexcept ImportError as error:\n    print(error)\n"
    code += "print(any('core.so' in line for line in open('/proc/self/maps')))\n"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    for words in said:
        assert words.format(cuda=fork_info()["cuda"].partition(".")[0]) in done.stdout
    assert done.stdout.rstrip().endswith("False"), "the library was loaded first"


def test_importing_does_not_start_cuda_so_that_forked_processes_have_it() -> None:
    """apache-tvm-ffi asks a torch that it must complete whether there is a GPU, which starts CUDA."""
    code = """
import torch
asked, answer = [], torch.cuda.is_available
torch.cuda.is_available = lambda: asked.append(True) or answer()
import flash_attn
import os, sys
print(len(asked), os.environ.get("TVM_FFI_DISABLE_TORCH_C_DLPACK"), flush=True)
if sys.argv[1:] and not asked and not os.fork():
    print("on", torch.ones(2, device="cuda").device, flush=True)
"""
    complete = hasattr(torch.Tensor, "__dlpack_c_exchange_api__") and hasattr(
        torch.cuda.Stream, "__cuda_stream__"
    )
    gpu = ["gpu"] if torch.cuda.is_available() else []
    environment = {
        name: value for name, value in os.environ.items() if name != "TVM_FFI_DISABLE_TORCH_C_DLPACK"
    }
    done = subprocess.run(
        [sys.executable, "-c", code, *gpu], check=True, env=environment, stdout=subprocess.PIPE, text=True
    )
    first, *rest = done.stdout.splitlines()
    assert first.endswith(" None"), "what was set for the import is left in the environment"
    if complete:
        assert first == "0 None"
        assert rest == (["on cuda:0"] if gpu else [])


def _served() -> tuple[int, torch.dtype]:
    """A head dim and a dtype that the wheel has kernels for."""
    kernel = min(flash_attn_2_cuda.kernel_set())
    return int(re.search(r"hdim(\d+)", kernel)[1]), torch.float16 if "fp16" in kernel else torch.bfloat16


@pytest.mark.skipif(
    not torch.cuda.is_available() and not hasattr(torch._C, "_ensureCUDADeviceGuardSet"),
    reason=f"torch {torch.__version__} indexes no fake CUDA tensor without a driver",
)
def test_a_call_is_traced_without_a_gpu() -> None:
    dim, dtype = _served()
    with FakeTensorMode():
        q = torch.empty(2, 8, 4, dim, dtype=dtype, device="cuda")
        k = torch.empty(2, 9, 2, dim, dtype=dtype, device="cuda")
        assert flash_attn.flash_attn_func(q, k, k).shape == q.shape


def test_wrong_calls_that_are_traced_are_refused_as_they_would_be_when_they_run() -> None:
    dim, dtype = _served()
    with FakeTensorMode():

        def fake(*shape: int, dtype: torch.dtype = dtype, device: str = "cuda") -> torch.Tensor:
            return torch.empty(*shape, dtype=dtype, device=device)

        q, k = fake(2, 8, 4, dim), fake(2, 9, 2, dim)
        with pytest.raises(RuntimeError, match="must divide number of heads in query; they are 3 and 4"):
            flash_attn.flash_attn_func(q, fake(2, 9, 3, dim), fake(2, 9, 3, dim))
        with pytest.raises(RuntimeError, match="must be on CUDA"):
            flash_attn.flash_attn_func(q, fake(2, 9, 2, dim, device="cpu"), k)
        absent = {32, 64, 96, 128, 192, 256} - {
            int(re.search(r"hdim(\d+)", name)[1]) for name in flash_attn_2_cuda.kernel_set()
        }
        for head_dim in absent:
            with pytest.raises(RuntimeError, match=f"this wheel has no kernels for head_dim {head_dim}"):
                flash_attn.flash_attn_func(*[fake(2, 8, 4, head_dim)] * 3)
        if flash_attn_2_cuda.has_attn_bias:
            mask = fake(1, 1, 8, 7, dtype=torch.bool)
            with pytest.raises(ValueError, match=r"attn_mask has shape \[1, 1, 8, 7\]; allowed is "):
                flash_attn.flash_attn_func(q, k, k, attn_mask=mask)
        sums = fake(3, dtype=torch.int64)
        with pytest.raises(RuntimeError, match="cu_seqlens_q must have dtype int32; it has Long"):
            flash_attn.flash_attn_varlen_func(
                fake(8, 4, dim), fake(9, 2, dim), fake(9, 2, dim), sums, sums, 8, 9
            )


class Generator:
    """As much of torch's as the random state asks for; there is no GPU here to have a real one."""

    def __init__(self, seed: int, captured: tuple[torch.Tensor, ...] | None = None) -> None:
        self.seed, self.offset, self.reserved = seed, 0, []
        if captured is not None:
            self.philox_state = lambda increment: (self.reserved.append(increment), captured)[1]

    def initial_seed(self) -> int:
        return self.seed

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        self.offset = offset


class Shared(Generator):
    """One that another thread draws from whenever it can: not while an operator of torch's has its lock."""

    def __init__(self) -> None:
        super().__init__(1)
        self.drawn: list[tuple[int, int]] = []

    def take(self, increment: int) -> int:
        self.drawn.append((self.offset, increment))
        self.offset += increment
        return self.drawn[-1][0]

    def get_offset(self) -> int:
        offset = super().get_offset()
        self.take(4)  # of the other thread
        return offset


@pytest.mark.parametrize("method", [True, False], ids=["torch's method", "torch's attention"])
def test_beside_other_threads_dropout_takes_its_numbers_in_one_step(
    monkeypatch: pytest.MonkeyPatch, method: bool
) -> None:
    generator, state = Shared(), flash_attn_2_cuda.random_state

    def reserve(increment: int) -> tuple[torch.Tensor, ...]:
        numbers = 1, generator.take(increment), 0
        return tuple(torch.tensor([number], dtype=torch.int64) for number in numbers)

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "default_generators", [generator])
    if method:
        generator.philox_state = reserve
    else:
        monkeypatch.setattr(state, "_reserved_by_attention", lambda _, n: (0, 0, *reserve(n)[:2]))
    done = threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    try:
        found = [state.draw(None, torch.device("cuda:0"), 64) for _ in range(3)]
    finally:
        done.set()
        other.join()
    own = [offset if at is None else int(at) for _, offset, _, at in found]
    assert own == [0, 64, 128], f"of {generator.drawn}"
    assert sum(count for _, count in generator.drawn) == generator.offset


@pytest.mark.parametrize(
    ("seed", "signed"), [(1, 1), (2**63 - 1, 2**63 - 1), (2**63, -(2**63)), (2**64 - 1, -1)]
)
def test_dropout_takes_numbers_of_the_generator_in_fours(
    monkeypatch: pytest.MonkeyPatch, seed: int, signed: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    generator = Generator(seed)
    drawn = [flash_attn_2_cuda.random_state.draw(generator, torch.device("cuda:0"), n) for n in (32, 33, 4)]
    assert drawn == [(signed, 0, None, None), (signed, 32, None, None), (signed, 68, None, None)]
    assert generator.offset == 72


@pytest.mark.parametrize("rows", [0, -32])  # of no sequence; of an empty table of sequences
def test_a_call_without_rows_draws_nothing(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    generator = Shared()
    monkeypatch.setattr(torch.cuda, "default_generators", [generator])
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    drawn = flash_attn_2_cuda.random_state.draw(None, torch.device("cuda:0"), rows)
    assert (drawn, generator.drawn) == ((0, 0, None, None), [])


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_capture_gets_where_a_replay_finds_the_numbers(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """What is added to the offset is a number where torch has it on the host, else a tensor is."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    seed, offset = (torch.empty(1, dtype=torch.int64, device="meta") for _ in range(2))
    more = torch.full((1,), 12, dtype=torch.int64, device=device)
    generator = Generator(1, (seed, offset, more))
    added, *rest = flash_attn_2_cuda.random_state.draw(generator, torch.device("cuda:0"), 32)[1:]
    assert generator.reserved == [32]
    assert (added, rest[0]) == (12 if device == "cpu" else 0, seed)
    assert (rest[1] is offset) == (device == "cpu")


CROSS_ENTROPY = """
import contextlib, torch
from triton.runtime import interpreter
torch.cuda.device = lambda *_: contextlib.nullcontext()
known = interpreter._patch_lang_tensor

def patched(tensor, *scope):
    known(tensor, *scope)
    tensor.__index__ = lambda self: self.handle.data.item()  # numpy no longer makes a number of an array of one

interpreter._patch_lang_tensor = patched
from flash_attn.ops.triton.cross_entropy import cross_entropy_loss
for columns in (30, 70000):
    for finite in ([0], [columns - 1], [columns - 1, 3], []):
        logits = torch.full((2, columns), -torch.inf)
        logits[:, finite] = torch.randn(2, len(finite))
        labels = torch.tensor([columns - 1, finite[0] if finite else 0])
        mine, right = (logits.clone().requires_grad_() for _ in range(2))
        loss, _ = cross_entropy_loss(mine, labels)
        expected = torch.nn.functional.cross_entropy(right, labels, reduction="none")
        torch.testing.assert_close(loss, expected, equal_nan=True)
        pairs = [torch.autograd.grad(one.sum(), of)[0] for one, of in ((loss, mine), (expected, right))]
        torch.testing.assert_close(*pairs, equal_nan=True)
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_cross_entropy_of_few_finite_logits_is_torch_s() -> None:
    """Also where the first block of them is hidden, of a row that several blocks hold."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CROSS_ENTROPY],
        check=False, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
