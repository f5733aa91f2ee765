"""What the host does of a call, where functions that note their arguments stand for the library's.

So it runs without a GPU, on tensors of the CPU.
"""

from __future__ import annotations

import contextvars
import gc
import inspect
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import flash_attn_2_cuda
import harness
import pytest
import torch
import tracing
import tvm_ffi
from flash_attn import (
    flash_attn_func,
    flash_attn_interface,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
    fork_bias_backward,
    fork_bias_forward,
    fork_cache,
    fork_fa4,
    fork_front,
    fork_kernels,
    fork_straight,
    kernels,
    set_deterministic_mode,
    set_kernels,
)

_OPERATORS = (
    *(
        getattr(flash_attn_interface, f"_flash_attn_{name}")
        for name in ("forward", "varlen_forward", "backward", "varlen_backward")
    ),
    *(fork_bias_forward.forward, fork_bias_backward.backward_operator),
    *(fork_cache.reading, fork_cache.appending),
)
_LIBRARY = {
    flash_attn_2_cuda: ("_fwd", "_varlen_fwd", "_fwd_kvcache", "_bwd", "_varlen_bwd"),
    fork_straight: ("_fwd", "_varlen_fwd"),
    fork_front: ("_fwd_kvcache", "_fwd_kvcache_short"),
}
ONE, OTHER = 384, 640  # tokens of a chunk, which are no other argument of a call here


class Library:
    """Stands for the library, whose every call it notes."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.launched: list[int] = []  # the tokens of each call's chunks

    def function(self, name: str) -> Callable[..., bool]:
        def call(*args: Any) -> bool:
            for one in args:
                if isinstance(one, torch.Tensor) and (type(one) is not torch.Tensor or not one.data_ptr()):
                    raise RuntimeError("has no memory behind it")
            self.calls.append((name, args))
            tokens = [one for one in args if type(one) is int and one in (ONE, OTHER)]
            self.launched.append(tokens[0] if tokens else _process_mode() & 0x7FFFFFFF)
            return True

        return call


_process_mode = flash_attn_2_cuda._process_mode


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    found = Library()
    monkeypatch.setattr(flash_attn_2_cuda, "NEEDS_GPU", False)
    monkeypatch.setattr(flash_attn_2_cuda.random_state, "draw", lambda *_: (1, 0, None, None))
    monkeypatch.setattr(fork_straight, "_needs_gpu", False)
    monkeypatch.setattr(fork_straight, "_strided", torch._C._dynamo.guards._empty_strided_cpu)
    monkeypatch.setattr(fork_straight, "_current_device", lambda: -1)
    for module, names in _LIBRARY.items():
        for name in names:
            monkeypatch.setattr(module, name, found.function(name))
    for operator in _OPERATORS:
        operator.register_kernel("cpu")(operator._init_fn)
    yield found
    set_kernels("fa2")


def drawn(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.float16)


def leaf(*shape: int) -> torch.Tensor:
    return drawn(*shape).requires_grad_()


SUMS = torch.tensor([0, 3, 8], dtype=torch.int32)
DENSE, PACKED = {"q": (2, 5, 4, 32), "k": (2, 5, 2, 32)}, {"q": (8, 4, 32), "k": (8, 2, 32)}


def dense(**options: Any) -> Any:
    return flash_attn_func(leaf(*DENSE["q"]), leaf(*DENSE["k"]), leaf(*DENSE["k"]), **options)


def packed(**options: Any) -> Any:
    tensors = (leaf(*PACKED["q"]), leaf(*PACKED["k"]), leaf(*PACKED["k"]))
    return flash_attn_varlen_func(*tensors, SUMS, SUMS, 5, 5, **options)


RECORDED: dict[str, Callable[[], Any]] = {
    "dense": dense,
    "dense, on the long way": lambda: dense(return_attn_probs=True)[0],
    "dropout": lambda: dense(dropout_p=0.1),
    "bias": lambda: dense(attn_bias=leaf(5, 5)),
    "sink": lambda: dense(learnable_sink=torch.ones(4).requires_grad_()),
    "qkv": lambda: flash_attn_qkvpacked_func(leaf(2, 5, 3, 4, 32)),
    "kv": lambda: flash_attn_kvpacked_func(leaf(2, 5, 4, 32), leaf(2, 5, 2, 2, 32)),
    "packed": packed,
    "packed, on the long way": lambda: packed(return_attn_probs=True)[0],
    "packed with a mask": lambda: packed(attn_mask=torch.ones(8, 5, dtype=torch.bool)),
    "packed qkv": lambda: flash_attn_varlen_qkvpacked_func(leaf(8, 3, 4, 32), SUMS, 5),
    "packed kv": lambda: flash_attn_varlen_kvpacked_func(leaf(8, 4, 32), leaf(8, 2, 2, 32), SUMS, SUMS, 5, 5),
}


def noted(out: torch.Tensor) -> Any:
    """The node of the graph that computes the gradients."""
    node = out.grad_fn
    while not hasattr(node, "fork_mode"):
        node = node.next_functions[0][0]
    return node


def in_another_thread(function: Callable[[], Any]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


@pytest.fixture
def changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread changes the mode whenever it has been read."""

    def read_and_changed() -> int:
        word = _process_mode()
        in_another_thread(lambda: set_deterministic_mode(True, OTHER if word & 0x7FFFFFFF == ONE else ONE))
        return word

    monkeypatch.setattr(flash_attn_2_cuda, "_process_mode", read_and_changed)


@pytest.mark.parametrize("named", RECORDED)
def test_the_mode_that_is_noted_is_the_mode_that_is_launched(
    library: Library, changes: None, named: str
) -> None:
    set_deterministic_mode(True, ONE)
    out = RECORDED[named]()
    out.sum().backward()
    assert library.launched == [noted(out).fork_mode[1]] * 2


@pytest.mark.parametrize("gradients", [flash_attn_2_cuda.bwd, flash_attn_2_cuda.varlen_bwd])
def test_gradients_have_memory_for_the_mode_that_they_are_launched_under(
    library: Library, monkeypatch: pytest.MonkeyPatch, gradients: Callable[..., Any]
) -> None:
    def read_and_changed() -> int:
        word = _process_mode()
        in_another_thread(lambda: set_deterministic_mode(word < 1 << 32, ONE))
        return word

    monkeypatch.setattr(flash_attn_2_cuda, "_process_mode", read_and_changed)
    is_packed = gradients is flash_attn_2_cuda.varlen_bwd
    q, k = (drawn(*shape) for shape in (PACKED if is_packed else DENSE).values())
    lse = torch.ones(4, 8) if is_packed else torch.ones(2, 4, 5)
    lengths, longest, zeros = ((SUMS, SUMS), (5, 5), (False,)) if is_packed else ((), (), ())
    for enabled in (False, True):
        set_deterministic_mode(enabled, ONE)
        gradients(
            q, q, k, k, q, lse, None, None, None, *lengths, None, *longest, 0.0, 1.0, *zeros, False, 7, 7,
            0.0, False,
        )  # fmt: skip
        _, args = library.calls[-1]
        assert (ONE in [one for one in args if type(one) is int]) is enabled
        assert -1 not in [one for one in args if type(one) is int], "the library would read it again"
        assert (args[9] is None) is enabled


# Wrapped tensors ------------------------------------------------------------------------------------------


class Wrapped(torch.Tensor):
    """As a collective's result that has not come yet: no memory of its own."""

    @staticmethod
    def __new__(cls: type[Wrapped], inner: torch.Tensor) -> Wrapped:
        made: Wrapped = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def inner(one: Any) -> Any:
            return one.inner if isinstance(one, Wrapped) else one

        args, kwargs = torch.utils._pytree.tree_map(inner, (args, kwargs or {}))
        return function(*args, **kwargs)


def table(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


GIVEN: dict[Callable[..., Any], dict[str, Any]] = {
    flash_attn_func: {
        "q": drawn(*DENSE["q"]),
        "k": drawn(*DENSE["k"]),
        "v": drawn(*DENSE["k"]),
        "alibi_slopes": torch.ones(4),
    },
    flash_attn_varlen_func: {
        "q": drawn(*PACKED["q"]),
        "k": drawn(*PACKED["k"]),
        "v": drawn(*PACKED["k"]),
        "cu_seqlens_q": SUMS,
        "cu_seqlens_k": SUMS,
        "alibi_slopes": torch.ones(4),
        "max_seqlen_q": 5,
        "max_seqlen_k": 5,
    },
    flash_attn_with_kvcache: {
        "q": drawn(2, 1, 4, 32),
        "k_cache": drawn(2, 16, 2, 32),
        "v_cache": drawn(2, 16, 2, 32),
        "k": drawn(2, 1, 2, 32),
        "v": drawn(2, 1, 2, 32),
        "cache_seqlens": table(3, 5),
        "rotary_cos": drawn(16, 8),
        "rotary_sin": drawn(16, 8),
        "cache_batch_idx": table(1, 0),
        "cache_leftpad": table(0, 0),
        "alibi_slopes": torch.ones(4),
    },
}
SCORES: dict[str, torch.Tensor] = {
    "attn_mask": torch.ones(1, 1, dtype=torch.bool),
    "attn_bias": drawn(1, 1),
    "learnable_sink": torch.ones(4),
}


@pytest.mark.parametrize("function", GIVEN)
def test_any_tensor_may_be_wrapped(library: Library, function: Callable[..., Any]) -> None:
    for with_scores in (False, True):
        given = {**GIVEN[function], **(SCORES if with_scores else {})}
        function(**given)
        expected = library.calls.pop()[0].removesuffix("_short")
        for name, tensor in given.items():
            if not isinstance(tensor, torch.Tensor):
                continue
            function(**{**given, name: Wrapped(tensor)})
            assert library.calls.pop()[0] == expected, name
            assert library.calls == [], name


def test_a_gradient_of_the_result_may_be_wrapped(library: Library) -> None:
    for make in RECORDED.values():
        out = make()
        out.backward(Wrapped(torch.ones_like(out)))
        assert library.calls[-1][0].endswith("bwd")


class _Forgotten(torch.autograd.Function):
    """Passes a tensor on, and no gradient back."""

    @staticmethod
    def forward(_: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @staticmethod
    def backward(_: Any, *__: Any) -> None:
        return None


@pytest.mark.parametrize("call", [dense, packed])
def test_where_no_gradient_comes_none_is_computed(library: Library, call: Callable[..., Any]) -> None:
    out = call(return_attn_probs=True)[0]
    before = len(library.calls)
    _Forgotten.apply(out).sum().backward()
    assert library.calls[before:] == []


# Other kernels --------------------------------------------------------------------------------------------


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch, library: Library) -> Library:
    """As where the flash_attn_4 wheel is installed: its calls are noted too."""
    monkeypatch.setattr(fork_kernels, "_calls", Counter())  # which fork_info() tells
    monkeypatch.setattr(fork_fa4, "check_usable", lambda _: None)
    monkeypatch.setattr(fork_fa4, "capability", lambda _: (9, 0))
    for name in ("fwd", "varlen_fwd", "bwd", "varlen_bwd"):

        def run(*args: Any, name: str = name) -> Any:
            library.calls.append((f"fa4 {name}", args))
            return getattr(flash_attn_2_cuda, name)(*args)

        run.__signature__ = inspect.signature(getattr(fork_fa4, name))  # type: ignore[attr-defined]
        monkeypatch.setattr(fork_fa4, name, run)
    return library


def test_other_kernels_cost_calls_nothing_once_nothing_has_chosen_them(others: Library) -> None:
    assert not fork_kernels.ON
    with kernels("fa4"):
        assert fork_kernels.ON
        kept = contextvars.copy_context()
        with kernels("fa2"):
            assert fork_kernels.ON
    assert fork_kernels.ON, "a task may go on under it"
    kept.run(dense)
    assert others.calls[0][0] == "fa4 fwd"
    del kept
    gc.collect()
    assert not fork_kernels.ON
    set_kernels("fa4")
    with kernels("fa2"), kernels("fa4"):
        set_kernels("fa2")
        assert fork_kernels.ON
    assert not fork_kernels.ON
    others.calls.clear()
    dense()
    assert [name for name, _ in others.calls] == ["_fwd"]


@pytest.mark.parametrize("chosen", ["fa2", "fa4"])
@pytest.mark.parametrize("named", ["dense", "dense, on the long way", "qkv", "packed"])
def test_gradients_take_the_kernels_of_their_forward_call(others: Library, chosen: str, named: str) -> None:
    other = "fa4" if chosen == "fa2" else "fa2"
    with kernels(chosen):
        out = RECORDED[named]()
    for later in (chosen, other):
        set_kernels(later)
        others.calls.clear()
        out.sum().backward(retain_graph=True)
        assert others.calls[0][0].startswith("fa4") is (chosen == "fa4")


# Words ----------------------------------------------------------------------------------------------------


class Odd:
    """As a number of numpy's: an int to those that ask, and no int of Python's."""

    def __index__(self) -> int:
        return 3


META = torch.empty(2, 16, 2, 32, dtype=torch.float16, device="meta")
WRONG: list[tuple[Callable[..., Any], dict[str, Any], type[Exception], str]] = [
    *(
        (
            flash_attn_with_kvcache,
            {"cache_seqlens": lengths},
            TypeError,
            rf"cache_seqlens must .* is a {kind}",
        )
        for lengths, kind in ((Odd(), r"\w+\.Odd"), (3.0, "float"), ([3, 5], "list"), ("3", "str"))
    ),
    *(
        (
            flash_attn_with_kvcache,
            {"cache_seqlens": length},
            ValueError,
            f"cache_seqlens={length} is no length",
        )
        for length in (2**70, 2**31, -1)
    ),
    (flash_attn_with_kvcache, {"k_cache": META, "v_cache": META}, RuntimeError, "k_cache must .* on meta"),
    (
        flash_attn_with_kvcache,
        {"cache_seqlens": META[:, 0, 0, 0].int()},
        RuntimeError,
        "cache_seqlens .* meta",
    ),
    (flash_attn_with_kvcache, {"num_splits": 2**70}, ValueError, f"num_splits={2**70} does not fit"),
    *(
        (flash_attn_varlen_func, {name: value}, error, f"{name}{words}")
        for name in ("max_seqlen_q", "max_seqlen_k")
        for value, error, words in (
            (2**70, ValueError, f"={2**70} is no length"),
            (2.0, TypeError, " must be an int; it is 2.0"),
            (None, TypeError, " must be an int; it is None"),
        )
    ),
    *(
        (flash_attn_func, given, error, words)
        for given, error, words in (
            ({"window_size": (2**70, 0)}, ValueError, "window_size=.* does not fit"),
            ({"window_size": 3}, TypeError, "window_size must be two ints .* it is 3"),
            ({"window_size": (1.5, 0)}, TypeError, "window_size must be two ints"),
            ({"softcap": None}, TypeError, "softcap must be a number; it is None"),
            ({"softmax_scale": "x"}, TypeError, "softmax_scale must be a number; it is 'x'"),
            ({"k": META[:, :5], "v": META[:, :5]}, RuntimeError, "k must .* on meta"),
            ({"alibi_slopes": META[0, 0, 0, :4].float()}, RuntimeError, "alibi_slopes must .* on meta"),
            ({"q": drawn(2, 5, 4, 0)}, ValueError, "q has head_dim 0"),
        )
    ),
    (flash_attn_qkvpacked_func, {"qkv": drawn(2, 5, 3, 4, 0)}, ValueError, "qkv has head_dim 0"),
]


@pytest.mark.parametrize(("function", "wrong", "error", "said"), WRONG)
def test_what_no_call_takes_is_told_by_the_caller_s_name(
    monkeypatch: pytest.MonkeyPatch,
    function: Callable[..., Any],
    wrong: dict[str, Any],
    error: type[Exception],
    said: str,
) -> None:
    monkeypatch.setattr(flash_attn_2_cuda, "NEEDS_GPU", False)
    with pytest.raises(error, match=said) as told:
        function(**{**GIVEN.get(function, {}), **wrong})
    assert "\n" not in str(told.value)


def test_a_warning_that_is_made_an_error_is_raised_as_itself() -> None:
    """The library warns, from within a call."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="of this test"):
            tvm_ffi.get_global_func("flash_attn.warn")("of this test")


# Programs that are traced ---------------------------------------------------------------------------------


@pytest.fixture
def on_the_cpu(library: Library, monkeypatch: pytest.MonkeyPatch) -> harness.Config:
    monkeypatch.setattr(harness, "DEVICE", "cpu")
    return harness.Config(head_dim=32, dtype="fp16")


@pytest.mark.parametrize("named", tracing.PROGRAMS)
def test_a_program_is_traced_once_for_all_lengths(on_the_cpu: harness.Config, named: str) -> None:
    call, counter = tracing.compiled(named, "aot_eager")
    gradients = tracing.PROGRAMS[named].has_gradients
    with torch._dynamo.config.patch(**tracing.CAPTURED):
        for n in tracing.LENGTHS:
            tracing.results(call, tracing.arguments(on_the_cpu, named, n, gradients), gradients)
    assert counter.frame_count <= tracing.FRAMES


@pytest.mark.parametrize("dims", [(0, 1), (2,), (0, 1, 2)])
def test_sizes_may_be_such_as_only_a_run_tells(on_the_cpu: harness.Config, dims: tuple[int, ...]) -> None:
    """Batch, tokens and heads."""
    for function, rest in ((flash_attn_func, ()), (flash_attn_varlen_func, (SUMS, SUMS, 5, 5))):
        torch._dynamo.reset()
        shapes = DENSE if function is flash_attn_func else PACKED
        q, k = leaf(*shapes["q"]), leaf(*shapes["k"])
        for dim in dims:
            if dim < q.dim() - 1:
                for tensor in (q, k):
                    torch._dynamo.decorators.mark_unbacked(tensor, dim)
        call = torch.compile(function, backend="aot_eager", fullgraph=True)
        call(q, k, k, *rest, causal=True).sum().backward()
        assert q.grad.shape == q.shape


class Exported(torch.nn.Module):
    def __init__(self, call: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.call = call

    def forward(self, *given: Any) -> torch.Tensor:
        return self.call(*given)


@pytest.mark.parametrize(
    ("named", "strict"),
    [("unpadded", True), ("unpadded", False), ("longest", False), ("cache with new keys", False)],
)
def test_a_program_may_be_exported(on_the_cpu: harness.Config, named: str, strict: bool) -> None:
    given = tracing.arguments(on_the_cpu, named, 8, gradients=False)
    free = torch.export.Dim.DYNAMIC
    tokens = {0: free} if named == "longest" else {1: free}
    dims = [tokens if isinstance(one, torch.Tensor) and one.dim() > 1 else None for one in given]
    dims = [free if isinstance(one, int) else dim for one, dim in zip(given, dims, strict=True)]
    if named == "cache with new keys":
        dims[0] = dims[3] = None
    program = Exported(tracing.PROGRAMS[named].call)
    found = torch.export.export(program, tuple(given), dynamic_shapes=((*dims,),), strict=strict)
    assert "flash_attn" in str(found.graph)


def test_operators_say_what_they_do(on_the_cpu: harness.Config) -> None:
    q, k = drawn(*DENSE["q"]), drawn(*DENSE["k"])
    lse, scalars = torch.ones(2, 4, 5), (0.5, True, 3, 4, 0.0)
    bias, sink = drawn(4, 5, 5), torch.ones(4)
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (_OPERATORS[0], (q, k, k, 0.0, *scalars, None, False)),
        (_OPERATORS[2], (q, q, k, k, q, lse, q.clone(), k.clone(), k.clone(), 0.0, *scalars, None, False)),
        (_OPERATORS[4], (q, k, k, None, bias, sink, None, None, 0, 0, None, None, 0.0, *scalars)),
        (
            _OPERATORS[5],
            (q, q, k, k, q, lse, None, bias, sink, None, None, 0, 0, None, *scalars, False, True, False),
        ),
        (fork_cache.reading, (q, k, k, *[None] * 12, *scalars, True, 0, True)),
        (fork_cache.appending, (q, k.clone(), k.clone(), k, k, *[None] * 10, *scalars, True, 0, False)),
    ]
    for operator, given in calls:
        torch.library.opcheck(
            operator, given, test_utils=("test_schema", "test_autograd_registration", "test_faketensor")
        )
