"""What the core refuses, and says, before a launch; the tables that FA2_CHECK=1 looks into."""

from __future__ import annotations

import os
import subprocess
import sys

import flash_attn_2_cuda
import pytest
import torch
from conftest import DIM, HALF
from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache


def tensor(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


def dense(**changed: object) -> object:
    q, k, v = (changed.pop(name, tensor(2, 8, 4, DIM)) for name in ("q", "k", "v"))
    return flash_attn_func(q, k, v, **changed)


def packed(q: list[int], k: list[int], **changed: object) -> object:
    sums = [torch.tensor(sums, dtype=torch.int32) for sums in (q, k)]
    tensors = (tensor(8, 2, DIM), tensor(12, 2, DIM), tensor(12, 2, DIM))
    return flash_attn_varlen_func(*tensors, *sums, 8, 12, **changed)


def cached(length: int, table: list[int] | None = None, new: int = 0, page: int = 256) -> object:
    pages = 4 if table else 1
    caches = [tensor(pages, page, 2, DIM) for _ in range(2)]
    keys = [tensor(1, new, 2, DIM) for _ in range(2)] if new else [None, None]
    block_table = None if table is None else torch.tensor([table], dtype=torch.int32)
    lengths = torch.tensor([length], dtype=torch.int32)
    q = tensor(1, 1, 2, DIM)
    return flash_attn_with_kvcache(q, *caches, *keys, cache_seqlens=lengths, block_table=block_table)


def test_pages_have_a_multiple_of_16_tokens() -> None:
    cached(30, [3, 1], page=16)
    with pytest.raises(RuntimeError, match=r"block size must be divisible by 16; it is 24"):
        cached(30, [3, 1], page=24)


@pytest.mark.parametrize(
    ("changed", "error", "said"),
    [
        ({"q": [[0.0]]}, TypeError, "q must be a torch.Tensor on the GPU; it is a list"),
        ({"q": tensor(8, 4, DIM)}, ValueError, "q must have 4 dimensions; it has shape [8, 4, "),
        (
            {"k": tensor(2, 8, 3, DIM), "v": tensor(2, 8, 3, DIM)},
            RuntimeError,
            "must divide number of heads in query; they are 3 and 4",
        ),
        (
            {"k": tensor(2, 8, 4, DIM, dtype=torch.float32)},
            RuntimeError,
            "query and k must have the same dtype; they have",
        ),
        (
            {"v": tensor(2, 9, 4, DIM)},
            RuntimeError,
            "v must have shape (batch_size, seqlen_k, num_heads_k, head_size), which is [2, 8, 4",
        ),
        ({"attn_mask": True}, TypeError, "attn_mask must be a torch.Tensor on the GPU; it is a bool"),
        (
            {"alibi_slopes": tensor(3, dtype=torch.float32)},
            RuntimeError,
            "alibi_slopes must have shape [4] or [2, 4]; it has [3]",
        ),
        ({"softmax_scale": "x"}, ValueError, "softmax_scale"),
        ({"dropout_p": 1.5}, RuntimeError, "dropout_p=1.5 is not a probability below 1"),
        ({"nothing": 1}, TypeError, "flash_attn_func() got an unexpected keyword argument 'nothing'"),
    ],
)
def test_a_wrong_argument_is_named(changed: dict[str, object], error: type[Exception], said: str) -> None:
    with pytest.raises(error) as caught:
        dense(**changed)
    if said != "softmax_scale":
        assert said in str(caught.value)


def test_a_cache_with_fewer_sequences_than_q_is_refused() -> None:
    q, cache = tensor(3, 1, 2, DIM), tensor(2, 64, 2, DIM)
    with pytest.raises(RuntimeError, match="k_cache has 2 sequences, fewer than q, which has 3"):
        flash_attn_with_kvcache(q, cache, cache)


def test_a_head_dim_without_kernels_is_refused_with_those_there_are() -> None:
    q = tensor(1, 8, 2, 256)
    with pytest.raises(
        NotImplementedError, match=r"this wheel has no kernels for head_dim 256 .* it has forward: head_dim"
    ):
        flash_attn_func(q, q, q)


def test_gradients_with_dropout_need_the_forward_call_s_random_state() -> None:
    q = tensor(1, 8, 2, DIM)
    lse = tensor(1, 2, 8, dtype=torch.float32)
    arguments = (q, q, q, q, q, lse, None, None, None, None, 0.1, 1.0, False, -1, -1, 0.0, False, None, None)
    with pytest.raises(
        RuntimeError, match=r"needs the random state that its forward call gave \(rng_state\)"
    ):
        flash_attn_2_cuda.bwd(*arguments)


CHECKED = """
import test_core as t
try:
    print(t.{call} is not None)
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("packed([0, 8], [0, 12])", "True"),
        ("packed([1, 8], [0, 12])", "FA2_CHECK: cu_seqlens_q[0] is 1; it must begin at 0"),
        (
            "packed([0, 8, 5], [0, 6, 12])",
            "FA2_CHECK: cu_seqlens_q[2] is 5; it must not be less than the number before",
        ),
        ("packed([0, 8], [0, 13])", "FA2_CHECK: cu_seqlens_k[1] is 13; there are 12 tokens"),
        ("cached(256)", "True"),
        ("cached(257)", "FA2_CHECK: cache_seqlens[0] is 257; it must be from 0 to 256"),
        ("cached(-1)", "FA2_CHECK: cache_seqlens[0] is -1; it must be from 0 to 256"),
        (
            "cached(250, new=7)",
            "cache_seqlens[0] is 250; it must be from 0 to 249: the cache has 256, and 7 are appended",
        ),
        ("cached(300, [3, 0])", "True"),
        ("cached(256, [3, 9])", "True"),  # the length does not reach the second page
        ("cached(300, [3, 9])", "FA2_CHECK: block_table[0, 1] is 9; the pool has 4 pages"),
    ],
)
def test_tables_are_looked_into_when_asked(call: str, said: str) -> None:
    env = {**os.environ, "FA2_CHECK": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", CHECKED.format(call=call)],
        env=env,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert said in done.stdout


def test_tables_of_a_call_that_a_cuda_graph_captures_are_not_looked_into() -> None:
    """Which is warned about once."""
    code = CHECKED.format(call="packed([1, 8], [0, 12])") * 2
    env = {
        **os.environ,
        "FA2_CHECK": "1",
        "FORK_EMULATED_CAPTURE": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["True", "True"]
    assert (
        done.stderr.count("FA2_CHECK=1 does not look into the tables of calls that a CUDA graph captures")
        == 1
    )


def test_a_misspelt_variable_is_named() -> None:
    env = {**os.environ, "FA2_DETERMINISTC": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", "import flash_attn"], env=env, check=True, capture_output=True, text=True
    )
    assert (
        "flash_attn knows no variable FA2_DETERMINISTC; it knows FA2_DETERMINISTIC, FA2_SPLIT_SIZE"
        in done.stderr
    )
