"""A call like an earlier one launches what that one launched, and has its bits; any other call is looked at anew."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import machine
import pytest
import torch
from bits import same_bits
from flash_attn.cute import deterministic_mode, flash_attn_func, fork_plan, fork_split, interface

gpu = pytest.mark.gpu
DEVICE = "cuda" if machine.GPU else "cpu"
CALLS = {
    "one chunk": (300, 300, {}),
    "walked": (1500, 1500, {"causal": True}),
    "spread": (1, 1500, {}),
    "spread, windows": (2, 1500, {"window_size": (900, 0)}),
    "lse": (1, 1500, {"return_lse": True, "softmax_scale": 0.25}),
}
calls = pytest.mark.parametrize("name", CALLS)
modes = pytest.mark.parametrize("enabled", [False, True], ids=["off", "on"])


@pytest.fixture(autouse=True)
def _no_plans() -> Iterator[None]:
    fork_plan.forget()
    yield
    fork_plan.forget()


def drawn(len_q: int, len_k: int, device: str = "cuda") -> list[torch.Tensor]:
    shapes = ((2, len_q, 4, 64), (2, len_k, 2, 64), (2, len_k, 2, 64))
    return [torch.randn(shape, dtype=torch.float16, device=device) for shape in shapes]


def refused(*_: Any, **__: Any) -> None:
    raise AssertionError("upstream's function was called")


def results(inputs: list[torch.Tensor], options: dict[str, Any], enabled: bool) -> list[torch.Tensor]:
    with deterministic_mode(enabled=enabled, split_size=512):
        return [result for result in flash_attn_func(*inputs, **options) if result is not None]


def assert_same(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    assert len(one) == len(other)
    assert all(same_bits(*both) for both in zip(one, other, strict=True))


@gpu
@modes
@calls
def test_a_call_like_an_earlier_one_has_the_bits_that_it_had_alone(
    name: str, enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    len_q, len_k, options = CALLS[name]
    inputs = drawn(len_q, len_k)
    alone = results(inputs, options, enabled)
    fork_plan.forget()
    results(drawn(len_q, len_k), options, enabled)
    if machine.GPU:
        monkeypatch.setattr(interface, "_flash_attn_fwd", refused)
    assert_same(results(inputs, options, enabled), alone)


@gpu
def test_a_call_takes_the_mode_and_the_path_that_hold() -> None:
    inputs = drawn(1, 1500)
    alone = {enabled: results(inputs, {}, enabled) for enabled in (False, True)}
    for enabled in (True, False, True):
        assert_same(results(inputs, {}, enabled), alone[enabled])
    before = fork_split.force_path("walked")
    try:
        assert_same(results(inputs, {}, True), alone[True])
        if machine.GPU:
            assert len(fork_plan.remembered()) == 3  # off, on, and on where chunks are walked
    finally:
        fork_split.force_path(before)


@gpu
def test_running_results_in_memory_begin_anew_each_time() -> None:
    inputs = drawn(1500, 1500)
    alone = results(inputs, {"causal": True}, True)
    before = fork_split.force_path("walked in memory")
    try:
        for _ in range(3):
            assert_same(results(inputs, {"causal": True}, True), alone)
        if not machine.GPU:
            return
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = results(inputs, {"causal": True}, True)
        for _ in range(2):
            captured[0].fill_(float("nan"))
            graph.replay()
            assert_same(captured, alone)
    finally:
        fork_split.force_path(before)


@gpu
def test_gradients_take_upstreams_way() -> None:
    if not machine.GPU:  # without one autograd ends the process
        return
    inputs = [tensor.requires_grad_() for tensor in drawn(300, 300)]
    for _ in range(2):
        assert flash_attn_func(*inputs)[0].grad_fn is not None
    with torch.no_grad():
        found = [flash_attn_func(*given) for given in (inputs, [one.detach() for one in inputs], inputs)]
    assert [lse is None for _, lse in found] == [False, True, False]
    assert same_bits(found[0][0], found[2][0])
    assert len(fork_plan.remembered()) == 1


@gpu
def test_copies_are_not_remembered() -> None:
    if not machine.GPU:
        return
    q, k, v = drawn(300, 300)
    turned = k.transpose(1, 3).contiguous().transpose(1, 3)  # which upstream copies
    first, second = (flash_attn_func(q, turned, v)[0] for _ in range(2))
    assert fork_plan.remembered() == ()
    assert same_bits(first, flash_attn_func(q, k, v)[0])
    assert same_bits(second, first)


@gpu
def test_a_wrong_call_is_refused_each_time() -> None:
    if not machine.GPU:
        return
    q, k, v = drawn(300, 300)
    for _ in range(2):
        with pytest.raises(ValueError, match="v must have k's shape"):
            flash_attn_func(q, k, v[:, :, :1])
        with pytest.raises(TypeError):
            flash_attn_func(q, k)
    assert fork_plan.remembered() == ()


@gpu
def test_calls_of_two_threads_are_remembered_apart() -> None:
    wanted: dict[str, Any] = {}
    found: dict[str, list[list[torch.Tensor]]] = {name: [] for name in CALLS}
    inputs = {name: drawn(len_q, len_k) for name, (len_q, len_k, _) in CALLS.items()}
    for name in CALLS:
        wanted[name] = results(inputs[name], CALLS[name][2], True)
    fork_plan.forget()
    if not machine.GPU:  # where one thread alone makes tensors without values
        return
    start = threading.Barrier(len(CALLS))

    def run(name: str) -> None:
        start.wait()
        found[name] += [results(inputs[name], CALLS[name][2], True) for _ in range(20)]

    threads = [threading.Thread(target=run, args=(name,)) for name in CALLS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    for name, rounds in found.items():
        assert len(rounds) == 20
        for one in rounds:
            assert_same(one, wanted[name])


@gpu
def test_a_graph_of_a_remembered_call_has_its_bits() -> None:
    inputs = drawn(1, 1500)
    alone = results(inputs, {}, True)
    if not machine.GPU:
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(inputs, {}, True)
    for result in captured:
        result.fill_(float("nan"))
    graph.replay()
    assert_same(captured, alone)


OTHERS: dict[str, Callable[[list[torch.Tensor]], tuple[list[Any], dict[str, Any]]]] = {
    "a length": lambda x: ([x[0][:, :2], *x[1:]], {}),
    "strides": lambda x: ([x[0], x[1].transpose(1, 2).contiguous().transpose(1, 2), x[2]], {}),
    "a dtype": lambda x: ([one.bfloat16() for one in x], {}),
    "a scale": lambda x: (x, {"softmax_scale": 0.5}),
    "causal": lambda x: (x, {"causal": True}),
    "a window": lambda x: (x, {"window_size": (3, 0)}),
    "softcap": lambda x: (x, {"softcap": 3.0}),
    "softcap that is an int": lambda x: (x, {"softcap": 0}),
    "splits": lambda x: (x, {"num_splits": 2}),
    "pack_gqa": lambda x: (x, {"pack_gqa": False}),
    "lse": lambda x: (x, {"return_lse": True}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_call_is_of_another_kind(name: str) -> None:
    inputs = drawn(4, 8, DEVICE)
    others, options = OTHERS[name](inputs)
    known = fork_plan.kind(*inputs)
    assert known is not None
    assert known == fork_plan.kind(*[one.clone() for one in inputs])
    assert fork_plan.kind(*others, **options) not in (None, known)


def test_the_mode_is_part_of_a_calls_kind() -> None:
    inputs = drawn(4, 8, DEVICE)
    kinds = []
    for enabled, split_size in ((False, 512), (True, 512), (True, 1024)):
        with deterministic_mode(enabled=enabled, split_size=split_size):
            kinds.append(fork_plan.kind(*inputs))
    assert len(set(kinds)) == 3


def test_a_call_during_which_the_mode_changed_is_not_remembered() -> None:
    inputs = drawn(4, 8, DEVICE)
    out = torch.empty_like(inputs[0])
    arguments = [*inputs, out, None, 0.125, None, None]
    seen = []

    def made(*_: Any) -> Any:
        with deterministic_mode(enabled=changes, split_size=512):
            fork_plan.note_kernel(refused, arguments, None, 64, fork_plan.get_deterministic_mode())
        return out, None

    for changes in (True, False):  # noqa: B007 - for made
        with deterministic_mode(enabled=False, split_size=512):
            fork_plan.remembering(made)(*inputs)
        seen.append(len(fork_plan.remembered()))
    assert seen == [0, 1]


def test_a_tangent_is_not_lost() -> None:
    from torch.autograd import forward_ad

    q, k, v = drawn(4, 8, DEVICE)
    with forward_ad.dual_level():
        assert fork_plan.kind(forward_ad.make_dual(q, torch.ones_like(q)), k, v) is None


class Own(torch.Tensor):
    """A subclass, whose operators may do anything."""


NOT_SERVED: dict[str, Callable[[list[torch.Tensor]], tuple[list[Any], dict[str, Any]]]] = {
    "a subclass": lambda x: ([x[0].as_subclass(Own), *x[1:]], {}),
    "gradients": lambda x: ([x[0].clone().requires_grad_(), *x[1:]], {}),
    "a sink": lambda x: (x, {"learnable_sink": x[0][0, 0, :, 0]}),
    "a scale that may change": lambda x: (x, {"softmax_scale": torch.tensor(0.5)}),
    "an odd address": lambda x: (
        [x[0].flatten()[1:].as_strided((1, 1, 4, 64), (256, 256, 64, 1)), *x[1:]],
        {},
    ),
}


@pytest.mark.parametrize("name", NOT_SERVED)
def test_such_a_call_takes_upstreams_way(name: str) -> None:
    others, options = NOT_SERVED[name](drawn(4, 8, DEVICE))
    assert fork_plan.kind(*others, **options) is None


def test_a_call_under_a_mode_of_torchs_takes_upstreams_way() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    inputs = drawn(4, 8, DEVICE)
    with Mode():
        assert fork_plan.kind(*inputs) is None
    assert fork_plan.kind(*inputs) is not None


def test_plans_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_plan, "MOST", 3)
    for length in range(10):
        inputs = drawn(4, length + 1, DEVICE)
        out = torch.empty_like(inputs[0])
        arguments = [*inputs, out, None, 0.125, None, None]

        def made(*_: Any) -> Any:
            fork_plan.note_kernel(refused, arguments, None, 64, fork_plan.get_deterministic_mode())
            return out, None

        fork_plan.remembering(made)(*inputs)
        assert 1 <= len(fork_plan.remembered()) <= 3
