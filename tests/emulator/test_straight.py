"""The straight way from the public functions to the library: who takes it, and that its results are the same."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import flash_attn_2_cuda
import pytest
import straight
import torch
from conftest import DIM, HALF, built
from flash_attn import (
    deterministic_mode,
    flash_attn_func,
    flash_attn_interface,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    fork_front,
    fork_straight,
    get_deterministic_mode,
    set_deterministic_mode,
)
from harness import assert_same_bits, cu_seqlens
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

Spied = tuple[Any, str, str]  # an object, the name of its function, and what a call of it is told as


def spied(monkeypatch: pytest.MonkeyPatch, *functions: Spied) -> list[str]:
    """What calls reach of these functions, in order, as they come."""
    reached: list[str] = []

    def spy(owner: Any, name: str, said: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            reached.append(said)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    for function in functions:
        spy(*function)
    return reached


@pytest.fixture
def long_way(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what calls on the long way reached, in order."""
    return spied(
        monkeypatch,
        (flash_attn_interface.FlashAttnFunc, "apply", "dense"),
        (flash_attn_interface.FlashAttnVarlenFunc, "apply", "varlen"),
        (flash_attn_2_cuda, "fork_fwd_kvcache", "cache"),
    )


def drawn(*shape: int, seed: int = 0, gradient: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(HALF).requires_grad_(gradient)


def off_by_one(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, in rows that begin at no multiple of 16 bytes."""
    room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    room[1:] = tensor.flatten()
    return room[1:].view(tensor.shape)


def test_plain_calls_take_it(long_way: list[str]) -> None:
    q, k = drawn(2, 5, 4, DIM), drawn(2, 9, 2, DIM, seed=1)
    lengths = cu_seqlens([5, 5]), cu_seqlens([9, 9])
    flash_attn_func(q, k, k, causal=True)
    flash_attn_func(q, k, k, attn_mask=torch.ones(5, 9, dtype=torch.bool))
    flash_attn_varlen_func(q.flatten(0, 1), *[k.flatten(0, 1)] * 2, *lengths, 5, 9)
    flash_attn_with_kvcache(q, k, k, cache_seqlens=torch.tensor([9, 4], dtype=torch.int32))
    flash_attn_with_kvcache(q, k, k, cache_seqlens=7)
    with torch.enable_grad():
        flash_attn_func(q.requires_grad_(), k, k)
    assert long_way == []


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def test_calls_that_something_sees_take_the_long_way(long_way: list[str]) -> None:
    q, k = drawn(2, 5, 4, DIM), drawn(2, 9, 2, DIM, seed=1)
    with Seen():
        flash_attn_func(q, k, k)
    flash_attn_func(q, k, k, return_attn_probs=True)
    flash_attn_func(torch.nn.Parameter(q), k, k)
    flash_attn_func(q[..., :12], k[..., :12], k[..., :12])
    assert long_way == ["dense"] * 4


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which of the library's functions calls on a cache reached, in order."""
    names = "_fwd_kvcache", "_fwd_kvcache_short"
    return spied(monkeypatch, *((fork_front, name, name) for name in names))


CACHE = 2, 512, 2, DIM  # two sequences of two chunks, or two pages
CHUNK = 256


def lengths() -> torch.Tensor:
    return torch.tensor([500, 270], dtype=torch.int32)


STEPS: dict[str, Callable[[], dict[str, Any]]] = {
    "whole": dict,
    "lengths": lambda: {"cache_seqlens": lengths()},
    "causal": lambda: {"causal": True, "cache_seqlens": 400},
    "scale": lambda: {"softmax_scale": 0.3},
    "whole scale": lambda: {"softmax_scale": 1},
    "pages": lambda: {"block_table": torch.tensor([[1], [0]], dtype=torch.int32), "cache_seqlens": lengths()},
}
# What few have, and whether it reaches the library: the rest is refused.
RARE: dict[str, tuple[Callable[[], dict[str, Any]], bool]] = {
    "new keys": (lambda: {"k": keys(1), "v": keys(1), "cache_seqlens": lengths()}, True),
    "new keys without values": (lambda: {"k": keys(1), "cache_seqlens": lengths()}, False),
    "values without new keys": (lambda: {"v": keys(1)}, True),
    "rotary without new keys": (lambda: {"rotary_cos": keys(512)[0, :, 0, :8]}, False),
    "rotary's sines alone": (lambda: {"rotary_sin": keys(512)[0, :, 0, :8]}, True),
    "index": (lambda: {"cache_batch_idx": torch.tensor([1, 0], dtype=torch.int32)}, True),
    "padding": (
        lambda: {"cache_leftpad": torch.tensor([2, 0], dtype=torch.int32), "cache_seqlens": 9},
        True,
    ),
    "window": (lambda: {"window_size": (3, 1)}, True),
    "softcap": (lambda: {"softcap": 5.0}, True),
    "slopes": (lambda: {"alibi_slopes": torch.linspace(0.1, 0.5, 4)}, True),
    "mask": (lambda: {"attn_mask": torch.ones(3, 512, dtype=torch.bool)}, True),
    "bias": (lambda: {"attn_bias": drawn(4, 3, 512)}, True),
    "sink": (lambda: {"learnable_sink": torch.zeros(4)}, True),
}


def keys(count: int) -> torch.Tensor:
    return drawn(2, count, 2, DIM, seed=3)


def step(wants_lse: bool = True, **given: Any) -> Any:
    """A call on a cache of its own: out, and lse if that is wanted."""
    k, v = drawn(*CACHE, seed=1), drawn(*CACHE, seed=2)
    return flash_attn_with_kvcache(drawn(2, 3, 4, DIM), k, v, return_softmax_lse=wants_lse, **given)


def assert_both_ways_agree(named: str, **given: Any) -> None:
    short, full = step(**given), step(window_size=[-1, -1], **given)  # a list, which the short way leaves
    for mine, other in zip(short, full, strict=True):
        assert_same_bits(mine, other, named)


@pytest.mark.parametrize("enabled", [False, True], ids=["off", "on"])
@pytest.mark.parametrize("named", STEPS)
def test_a_decoding_step_gives_the_library_few_arguments_for_the_same_bits(
    entries: list[str], long_way: list[str], named: str, enabled: bool
) -> None:
    with deterministic_mode(enabled, CHUNK):
        assert_both_ways_agree(named, **STEPS[named]())
        assert_same_bits(step(False, **STEPS[named]()), step(**STEPS[named]())[0], "without lse")
    assert entries == ["_fwd_kvcache_short", "_fwd_kvcache", *["_fwd_kvcache_short"] * 2]
    assert long_way == []


def test_it_gives_the_number_of_splits_too(entries: list[str], long_way: list[str]) -> None:
    """Which changes a row's bits."""
    assert_both_ways_agree("two splits", num_splits=2)
    assert not torch.equal(step(num_splits=2)[1], step(num_splits=1)[1])
    assert entries == ["_fwd_kvcache_short", "_fwd_kvcache", *["_fwd_kvcache_short"] * 2]
    assert long_way == []


@pytest.mark.parametrize("named", RARE)
def test_what_few_decoding_steps_have_reaches_the_library(
    entries: list[str], long_way: list[str], named: str
) -> None:
    make, is_taken = RARE[named]
    if is_taken:
        step(**make())
    else:
        with pytest.raises(RuntimeError, match="must also be"):
            step(**make())
    assert entries == ["_fwd_kvcache"]
    assert long_way == ["cache"] * (not is_taken)


def test_tensors_that_kernels_cannot_load_take_the_long_way_to_the_same_bits(long_way: list[str]) -> None:
    q, k = drawn(2, 5, 4, DIM), drawn(2, 9, 2, DIM, seed=1)
    expected = flash_attn_func(q, k, k, causal=True)
    assert long_way == []
    gaps = drawn(2, 9, 2, 2 * DIM)[..., ::2]
    gaps.copy_(k)
    for which, changed in {"q": (off_by_one(q), k), "k": (q, off_by_one(k)), "gaps": (q, gaps)}.items():
        assert torch.equal(flash_attn_func(changed[0], changed[1], k, causal=True), expected), which
    assert long_way == ["dense"] * 3
    with pytest.raises(ValueError, match=r"k_cache .* a cache is used in place"):
        flash_attn_with_kvcache(q, off_by_one(k), k)


def other_signs(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, in a view whose memory has the other sign."""
    view = torch.complex(torch.zeros_like(tensor.float()), -tensor.float()).conj().imag
    room = torch._neg_view(-tensor)  # float16 has no complex numbers with all operations
    assert view.is_neg()
    assert torch.equal(view.to(tensor.dtype), room)
    return room


SIGNED = "q", "k", "v", "alibi_slopes", "attn_bias", "learnable_sink", "rotary_cos", "rotary_sin"


@pytest.mark.parametrize("named", [*SIGNED, "dout"])
def test_views_of_other_signs_count_as_what_they_say(named: str) -> None:
    """On both ways, forward and backward; but a cache is used in place, and such a view is an error there."""
    own = {
        "alibi_slopes": torch.linspace(0.1, 0.5, 4),
        "attn_bias": drawn(4, 5, 9, seed=5),
        "learnable_sink": torch.linspace(-1, 1, 4),
    }

    def signed(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return other_signs(tensor) if name == named else tensor

    def results(signed: Callable[[str, torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        q, k, v = (
            signed(name, drawn(2, n, h, DIM, seed=n))
            for name, n, h in (("q", 5, 4), ("k", 9, 2), ("v", 9, 2))
        )
        options = {named: signed(named, own[named])} if named in own else {}
        found = [
            flash_attn_func(q, k, v, **options),
            flash_attn_func(q, k, v, return_attn_probs=True, **options)[0],
        ]
        with torch.enable_grad():
            inputs = [t.detach().requires_grad_() for t in (q, k, v)]
            out = flash_attn_func(*inputs, **options)
            found += torch.autograd.grad(out, inputs, signed("dout", drawn(2, 5, 4, DIM, seed=8)))
        cache = [drawn(2, 16, 2, DIM, seed=seed) for seed in (1, 2)]
        turned = {name: signed(name, drawn(16, DIM // 2, seed=6)) for name in ("rotary_cos", "rotary_sin")}
        found.append(
            flash_attn_with_kvcache(
                q,
                *cache,
                k[:, :3],
                v[:, :3],
                **turned,
                cache_seqlens=6,
                causal=True,
                **(options if named != "attn_bias" else {}),
            )
        )
        return [*found, *cache]

    for place, (got, expected) in enumerate(zip(results(signed), results(lambda _, t: t), strict=True)):
        assert_same_bits(got, expected, f"{named}, result {place}")


def test_a_cache_of_other_signs_is_an_error_that_says_so() -> None:
    q, cache = drawn(2, 1, 4, DIM), drawn(2, 16, 2, DIM, seed=1)
    for caches in ((other_signs(cache), cache), (cache, other_signs(cache))):
        with pytest.raises(
            ValueError, match=r"[kv]_cache is a view whose memory has the other sign \(is_neg\)"
        ):
            flash_attn_with_kvcache(q, *caches)


def laid_out(how: str) -> torch.Tensor:
    """The same queries of two sequences."""
    q = drawn(1, 5, 4, DIM).expand(2, -1, -1, -1)
    if how == "heads first":
        return q.transpose(1, 2).contiguous().transpose(1, 2)
    return q if how == "expanded" else q.contiguous()


@pytest.mark.parametrize("how", ["contiguous", "heads first", "expanded"])
@pytest.mark.parametrize("allocator", ["torch.compile's", "torch.empty"])
def test_results_have_memory_of_their_own_wherever_queries_lie(
    monkeypatch: pytest.MonkeyPatch, long_way: list[str], how: str, allocator: str
) -> None:
    """torch.empty makes them where this torch has no other way, or another GPU is the current one."""
    q, k = laid_out(how), torch.cat([drawn(1, 9, 2, DIM, seed=seed) for seed in (1, 2)])
    length = torch.tensor([9, 9], dtype=torch.int32)
    expected = [flash_attn_func(q[i : i + 1], k[i : i + 1], k[i : i + 1]) for i in range(2)]
    asked: list[int] = []
    if allocator == "torch.empty":
        monkeypatch.setattr(fork_straight, "_current_device", lambda: asked.append(1))
    for call in (
        lambda: flash_attn_func(q, k, k),
        lambda: flash_attn_with_kvcache(q, k, k, cache_seqlens=length),
    ):
        out = call()
        assert_same_bits(out, torch.cat(expected), how)
        assert out.stride() == torch.empty_like(q).stride()
    assert bool(asked) == (allocator == "torch.empty" and how == "contiguous")
    assert long_way == []


@pytest.mark.parametrize("enabled", [False, True], ids=["off", "on"])
@pytest.mark.parametrize("named", straight.OPTIONS)
def test_its_results_and_gradients_are_those_of_the_long_way(
    long_way: list[str], named: str, enabled: bool
) -> None:
    config = built(heads=4, heads_k=2)
    with torch.enable_grad(), deterministic_mode(enabled):
        for packed in (False, True):
            for gradients in (False, True):
                straight.results(config, named, packed, gradients, long_way=False)
                assert long_way == [] or gradients
                straight.assert_ways_agree(config, named, packed, gradients)
                long_way.clear()
        straight.assert_caches_agree(config, named)


def leaves() -> list[torch.Tensor]:
    return [drawn(2, 5, 4, DIM, seed=seed, gradient=True) for seed in range(3)]


@pytest.mark.parametrize("packed", [False, True])
def test_attention_may_come_last_in_a_checkpoint(packed: bool) -> None:
    """Which ends a recomputation by an exception from a hook of the last tensor that is saved."""
    lengths = cu_seqlens([5, 5])

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        if packed:
            return flash_attn_varlen_func(*(t.flatten(0, 1) for t in tensors), lengths, lengths, 5, 5)
        return flash_attn_func(*tensors)

    def gradients(out: torch.Tensor, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out.float().sum(), inputs)

    with torch.enable_grad():
        inputs = leaves()
        expected = gradients(attend(*inputs), inputs)
        kept = gradients(checkpoint(attend, *inputs, use_reentrant=False), inputs)
    for mine, other in zip(kept, expected, strict=True):
        assert_same_bits(mine, other, "checkpointed")


def test_a_checkpoint_may_meet_a_mode_in_one_pass_alone() -> None:
    """As a counter of operations does; both ways save the same tensors."""
    with torch.enable_grad():
        inputs = leaves()
        with Seen():
            out = checkpoint(lambda *t: flash_attn_func(*t).sin(), *inputs, use_reentrant=False)
        assert all(g is not None for g in torch.autograd.grad(out.float().sum(), inputs))


def test_the_error_of_a_hook_on_saved_tensors_is_raised() -> None:
    calls: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        raise LookupError("of the hook")

    with (
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
        pytest.raises(LookupError, match="of the hook"),
    ):
        flash_attn_func(*leaves())
    assert len(calls) == 1


def test_a_traced_program_holds_the_attention(long_way: list[str]) -> None:
    q = drawn(2, 5, 4, DIM)
    traced = torch.jit.trace(lambda t: flash_attn_func(t, t, t, softmax_scale=0.25), (q,), check_trace=False)
    assert "empty_like" not in str(traced.graph)
    assert long_way == ["dense"]


def test_a_call_on_a_cache_that_is_traced_takes_the_long_way(long_way: list[str]) -> None:
    q, k = drawn(2, 1, 8, DIM), drawn(2, 9, 2, DIM, seed=1)
    lengths = torch.tensor([4, 9], dtype=torch.int32)

    # Sliced within: torch.jit.trace makes a program's inputs contiguous. With a scale: else it is one of them.
    def call(query: torch.Tensor) -> torch.Tensor:
        return flash_attn_with_kvcache(query[:, :, :4], k, k, cache_seqlens=lengths, softmax_scale=0.25) * 1

    expected = call(q)
    assert long_way == []
    assert_same_bits(torch.compile(call, backend="eager")(q), expected, "compiled")
    assert set(long_way) == {"cache"}
    long_way.clear()
    torch.jit.trace(call, (q,), check_trace=False)
    assert long_way == ["cache"]


def test_results_for_a_tensor_elsewhere_do_not_ask_for_the_current_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fork_straight, "_needs_gpu", True)
    monkeypatch.setattr(fork_straight, "_current_device", lambda: pytest.fail("which starts CUDA"))
    out, lse = fork_straight.results(drawn(2, 5, 4, DIM), 2, 5, 4, DIM, True)
    assert (out.shape, lse.shape) == ((2, 5, 4, DIM), (2, 4, 5))
    step(wants_lse=False)


def test_a_call_on_a_cache_without_memory_is_traced(long_way: list[str]) -> None:
    with FakeTensorMode() as mode:
        q, k = (mode.from_tensor(drawn(2, tokens, 2, DIM)) for tokens in (1, 9))
        out, lse = flash_attn_with_kvcache(q, k, k, k, k, return_softmax_lse=True)
    assert (out.shape, lse.shape) == ((2, 1, 2, DIM), (2, 2, 1))


def test_forward_derivatives_are_refused_and_not_lost() -> None:
    q = drawn(2, 5, 4, DIM)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        flash_attn_func(forward_ad.make_dual(q, torch.ones_like(q)), q, q)


def test_a_view_of_other_signs_takes_the_long_way(long_way: list[str]) -> None:
    q = drawn(2, 5, 4, DIM)
    expected = flash_attn_func(-q, q, q)
    assert torch.equal(flash_attn_func(torch._neg_view(q), q, q), expected)
    assert long_way == ["dense"]


def test_a_warning_that_is_an_error_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attn_2_cuda, "_warned", set())
    q = drawn(2, 5, 4, DIM)
    with deterministic_mode(), warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="num_splits"):
            flash_attn_with_kvcache(q, q, q, num_splits=3)


def test_gradients_take_the_mode_that_their_forward_call_ran_under(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may change the process-wide mode meanwhile."""
    before = get_deterministic_mode()
    launch = fork_straight._fwd

    def changed_meanwhile(*arguments: Any) -> Any:
        done = launch(*arguments)
        set_deterministic_mode(True)
        return done

    monkeypatch.setattr(fork_straight, "_fwd", changed_meanwhile)
    try:
        with torch.enable_grad():
            assert flash_attn_func(*leaves()).grad_fn.fork_mode[0] is False
    finally:
        set_deterministic_mode(*before)


def test_what_goes_wrong_on_it_is_said_as_on_the_long_way(long_way: list[str]) -> None:
    q = drawn(2, 5, 4, DIM)
    with pytest.raises(RuntimeError, match="query and k must have the same dtype"):
        flash_attn_func(q, q.float(), q)
    assert long_way == ["dense"]


def test_an_operator_looks_at_all_tensors_by_place_and_by_name() -> None:
    class Own(torch.Tensor):
        pass

    taken: list[str] = []

    def plain(
        q: torch.Tensor, k: torch.Tensor, scale: float, v: torch.Tensor, bias: torch.Tensor | None = None
    ) -> None:
        taken.append("itself")

    run = fork_front.operator(lambda *_, **__: taken.append("operator"), plain)
    q, own = drawn(1, 1, 1, DIM), drawn(1, 1, 1, DIM).as_subclass(Own)
    run(q, q, v=q, scale=1.0)
    run(scale=1.0, v=q, k=q, q=q)
    assert taken == ["itself", "itself"]
    for call in ({"q": own}, {"k": own}, {"v": own}, {"bias": own}):
        run(**{"scale": 1.0, "q": q, "k": q, "v": q, **call})
    run(q, own, v=q, scale=1.0)
    assert taken[2:] == ["operator"] * 5
