"""The straight way from the public functions to the library gives the bits of the long one."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import straight
import torch
from flash_attn import deterministic_mode, flash_attn_func
from harness import Config, assert_same_bits
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.gpu

CONFIG = Config(heads=4, heads_k=2)


@pytest.mark.parametrize("enabled", [False, True], ids=["off", "on"])
@pytest.mark.parametrize("named", straight.OPTIONS)
def test_both_ways_give_the_same_bits(named: str, enabled: bool) -> None:
    CONFIG.need("fwd", "split", "bwd")
    with deterministic_mode(enabled):
        for packed in (False, True):
            straight.assert_ways_agree(CONFIG, named, packed, gradients=False)
            # With the mode off sums of gradients have no order, unless it is asked for.
            if enabled or named == "ordered":
                straight.assert_ways_agree(CONFIG, named, packed, gradients=True)
        straight.assert_caches_agree(CONFIG, named)


def test_attention_may_come_last_in_a_checkpoint() -> None:
    CONFIG.need("fwd", "split", "bwd")
    inputs = [straight.drawn(CONFIG, 9, 4, seed, gradient=True) for seed in range(3)]

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        return flash_attn_func(*tensors, causal=True, deterministic=True)

    expected = torch.autograd.grad(attend(*inputs).float().sum(), inputs)
    kept = torch.autograd.grad(checkpoint(attend, *inputs, use_reentrant=False).float().sum(), inputs)
    for mine, other in zip(kept, expected, strict=True):
        assert_same_bits(mine, other, "checkpointed")


_CAPTURED_FIRST = """
import torch
from flash_attn import flash_attn_func
q, k, v = (torch.randn(2, 9, 4, 64, device="cuda", dtype=torch.float16) for _ in range(3))
graph, out = torch.cuda.CUDAGraph(), None
with torch.cuda.graph(graph):
    out = flash_attn_func(q, k, v, causal=True)
graph.replay()
torch.cuda.synchronize()
assert torch.equal(out, flash_attn_func(q, k, v, causal=True))
"""


def test_the_first_call_of_a_process_may_be_captured() -> None:
    """Memory that calls share must not come from the graph's pool."""
    CONFIG.need("fwd", "split")
    done = subprocess.run(
        [sys.executable, "-c", _CAPTURED_FIRST], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("on", ["the null stream", "a stream"])
def test_a_thread_s_first_use_of_the_gpu_may_be_a_call(on: str) -> None:
    """No context is current there yet, without which the driver launches nothing on the null stream."""
    CONFIG.need("fwd", "split")
    inputs = [straight.drawn(CONFIG, 9, 4, seed) for seed in range(3)]
    stream = torch.cuda.default_stream() if on == "the null stream" else torch.cuda.Stream()

    def call() -> torch.Tensor:
        with torch.cuda.stream(stream):
            return flash_attn_func(*inputs, causal=True)

    torch.cuda.synchronize()
    expected = call()
    call()  # leaves a block of memory that the next finds, without CUDA
    torch.cuda.synchronize()
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(call).result()
    torch.cuda.synchronize()
    assert_same_bits(found, expected, "in a new thread")


def test_calls_on_two_streams_share_no_result() -> None:
    CONFIG.need("fwd", "split")
    inputs = [[straight.drawn(CONFIG, 900, 4, 3 * n + seed) for seed in range(3)] for n in range(2)]
    expected = [flash_attn_func(*own, causal=True) for own in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    for _ in range(20):
        found = []
        for stream, own in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                found.append(flash_attn_func(*own, causal=True))
        torch.cuda.synchronize()
        for mine, other in zip(found, expected, strict=True):
            assert_same_bits(mine, other, "two streams")
