"""The arithmetic of folding a chunk's result into the running one: the same in every kernel.

A result is a row's largest score, the sum of its exponentials, and the accumulator, which is not normalised.
Chunks are folded from the last to the first. Products and sums have explicit rounding, so that no compiler
contracts them in one kernel and not in another.
"""

import cutlass.cute as cute
from cutlass import Float32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


def _instruction(text, constraints, operands, loc, ip) -> Float32:
    return Float32(
        llvm.inline_asm(
            T.f32(),
            [Float32(operand).ir_value(loc=loc, ip=ip) for operand in operands],
            text,
            constraints,
            has_side_effects=False,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
        )
    )


@dsl_user_op
def _mul(a, b, *, loc=None, ip=None) -> Float32:
    return _instruction("mul.rn.f32 $0, $1, $2;", "=f,f,f", (a, b), loc, ip)


@dsl_user_op
def _fma(a, b, c, *, loc=None, ip=None) -> Float32:
    return _instruction("fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", (a, b, c), loc, ip)


@cute.jit
def weights(run_max: Float32, chunk_max: Float32, scale_log2: Float32):
    """The larger maximum, and the factors of the running result and of the chunk's.

    The factor of a result without a key is -0: times its zeros that is -0, which leaves the other as it is.
    Of two without a key the running one stays.
    """
    both = cute.arch.fmax(run_max, chunk_max)
    of_run = -Float32(0.0)
    of_chunk = -Float32(0.0)
    if both == -Float32.inf:
        of_run = Float32(1.0)
    if run_max != -Float32.inf:
        of_run = cute.math.exp2(_mul(run_max - both, scale_log2), fastmath=True)
    if chunk_max != -Float32.inf:
        of_chunk = cute.math.exp2(_mul(chunk_max - both, scale_log2), fastmath=True)
    return both, of_run, of_chunk


def folded(run, of_run, chunk, of_chunk):
    """An element of the accumulator, or the sum."""
    return _fma(chunk, of_chunk, _mul(run, of_run))
