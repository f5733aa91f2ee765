"""Causal attention from Python, without torch or NumPy: python forward.py LIBRARY [CUDA RUNTIME]."""

import ctypes
import struct
import sys
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_char_p,
    c_float,
    c_int32,
    c_int64,
    c_size_t,
    c_uint64,
    c_void_p,
    sizeof,
)

TOKENS, HEADS, DIM = 128, 4, 64
FLOAT16 = 0


class Tensor(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("dtype", c_int32),
        ("rank", c_int32),
        ("sizes", c_int64 * 4),
        ("strides", c_int64 * 4),
    ]


class Options(Structure):
    _fields_ = [
        *((name, c_float) for name in ("softmax_scale", "softcap", "dropout")),
        *((name, c_int32) for name in ("causal", "window_left", "window_right")),
        ("split_size", c_int64),
        *((name, c_uint64) for name in ("seed", "offset")),
        *((name, POINTER(c_int64)) for name in ("seed_at", "offset_at")),
        *((name, Tensor) for name in ("alibi_slopes", "mask", "bias")),
        ("reserved", c_int64 * 8),
    ]


class ForwardCall(Structure):
    _fields_ = [
        ("size", c_size_t),
        ("options", Options),
        *((name, Tensor) for name in ("q", "k", "v", "out", "lse", "cu_seqlens_q", "cu_seqlens_k")),
        *((name, c_int32) for name in ("max_seqlen_q", "max_seqlen_k")),
        ("seqused_k", Tensor),
        ("zero_gaps", c_int32),
        *((name, Tensor) for name in ("cache_seqlens", "k_new", "v_new", "rotary_cos", "rotary_sin")),
        *((name, c_int32) for name in ("rotary_interleaved", "num_splits")),
        *((name, Tensor) for name in ("cache_batch_idx", "block_table", "leftpad_k")),
        ("workspace", c_void_p),
        ("workspace_size", c_size_t),
    ]


library = ctypes.CDLL(sys.argv[1])
runtime = ctypes.CDLL(sys.argv[2] if len(sys.argv) > 2 else "libcudart.so.13")
library.flash_attention_v2_last_error.restype = c_char_p
runtime.cudaGetErrorString.restype = c_char_p
runtime.cudaMemcpy.argtypes = [c_void_p, c_void_p, c_size_t, ctypes.c_int]


def check(status, what):
    if status:
        words = library.flash_attention_v2_last_error() or runtime.cudaGetErrorString(status)
        sys.exit(f"{what}: error {status}: {words.decode()}")


def rows(content=None):
    sizes = (1, TOKENS, HEADS, DIM)
    made = Tensor(None, FLOAT16, 4, sizes, (TOKENS * HEADS * DIM, HEADS * DIM, DIM, 1))
    data = c_void_p()
    check(runtime.cudaMalloc(byref(data), c_size_t(2 * TOKENS * HEADS * DIM)), "cudaMalloc")
    made.data = data
    if content:
        check(runtime.cudaMemcpy(data, content, len(content), 1), "cudaMemcpy")  # 1: to the device
    return made


numbers = struct.pack(
    f"{TOKENS * HEADS * DIM}e", *((i * 37 % 101) / 50 - 1 for i in range(TOKENS * HEADS * DIM))
)
call = ForwardCall()
check(library.flash_attention_v2_forward_defaults(byref(call), c_size_t(sizeof(call))), "defaults")
call.options.causal = 1
call.q, call.k, call.v, call.out = rows(numbers), rows(numbers), rows(numbers), rows()
check(library.flash_attention_v2_run_forward(byref(call), None), "forward")
out = ctypes.create_string_buffer(len(numbers))
check(runtime.cudaMemcpy(out, call.out.data, len(numbers), 2), "cudaMemcpy")  # 2: from it
first = 2 * HEADS * DIM
if out.raw[:first] != numbers[:first]:
    sys.exit("the first token sees itself alone, but its row of the result is not its value")
print("last row:", *(f"{number:.4f}" for number in struct.unpack("4e", out.raw[-8:])))
