"""Upstream's kernel files, and the words that choose some of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from itertools import product
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

HEAD_DIMS = (32, 64, 96, 128, 192, 256)
DTYPES = ("fp16", "bf16")


class Pass(str, Enum):
    """A kind of kernel file."""

    FWD = "fwd"
    SPLIT = "split"
    BWD = "bwd"


@dataclass(frozen=True, order=True)
class Kernel:
    """One kernel file of upstream: a pass, a head dim, a dtype, causal or not."""

    kind: Pass
    head_dim: int
    dtype: str
    causal: bool
    bias: bool = True  # with attn_mask and attn_bias

    @property
    def name(self) -> str:
        """The name that the extension reports, such as ``split_hdim64_fp16_causal``."""
        return f"{self.kind.value}_hdim{self.head_dim}_{self.dtype}{'_causal' if self.causal else ''}"

    @property
    def source(self) -> str:
        """The file under ``csrc/flash_attn/src``."""
        kind = {Pass.FWD: "fwd", Pass.SPLIT: "fwd_split", Pass.BWD: "bwd"}[self.kind]
        return f"flash_{kind}_hdim{self.head_dim}_{self.dtype}{'_causal' if self.causal else ''}_sm80.cu"

    @property
    def bit(self) -> int:
        """Its place in the masks of ``fork_kernel_set.h``."""
        return (HEAD_DIMS.index(self.head_dim) * 2 + DTYPES.index(self.dtype)) * 2 + self.causal


NO_BIAS = "no-bias"
ALL_KERNELS = tuple(Kernel(*parts) for parts in product(Pass, HEAD_DIMS, DTYPES, (False, True)))

_WORDS: dict[str, tuple[str, Any]] = {
    **{f"hdim{d}": ("head_dim", d) for d in HEAD_DIMS},
    **{d: ("dtype", d) for d in DTYPES},
    **{p.value: ("kind", p) for p in Pass},
    "causal": ("causal", True),
    "full": ("causal", False),
}


def parse_kernels(text: str) -> tuple[Kernel, ...]:
    """Kernels that a choice such as ``hdim64,fp16,fwd`` or ``all`` names.

    A kind of word (head dim, dtype, pass, causal or full) that is absent means all of its values. With
    ``no-bias`` they do without attn_mask and attn_bias.

    >>> [k.name for k in parse_kernels("hdim64,fp16,fwd")]
    ['fwd_hdim64_fp16', 'fwd_hdim64_fp16_causal']
    >>> len(parse_kernels("all"))
    72
    >>> any(k.bias for k in parse_kernels("all,no-bias"))
    False

    Raises:
        ValueError: a word that is none of these.
    """
    words = [word.strip() for word in text.split(",")]
    if NO_BIAS in words:
        rest = ",".join(word for word in words if word != NO_BIAS)
        return tuple(replace(k, bias=False) for k in parse_kernels(rest or "all"))
    if words == ["all"]:
        return ALL_KERNELS
    chosen: dict[str, set[Any]] = {}
    for word in words:
        if word == "all":
            raise ValueError(f"'all' stands alone, or beside {NO_BIAS!r}; {text!r} has more")
        if not word:
            raise ValueError(
                f"{text!r} has an empty word; choose 'all', or some of {', '.join([*_WORDS, NO_BIAS])}"
            )
        if word not in _WORDS:
            raise ValueError(
                f"{word!r} names no kernels; choose 'all', or some of {', '.join([*_WORDS, NO_BIAS])}"
            )
        kind, value = _WORDS[word]
        chosen.setdefault(kind, set()).add(value)
    return tuple(k for k in ALL_KERNELS if all(getattr(k, kind) in values for kind, values in chosen.items()))


def spell_kernels(kernels: Iterable[Kernel]) -> tuple[str, ...]:
    """The words that name these kernels for :func:`parse_kernels`.

    They name more where the kernels are no product of kinds.

    >>> spell_kernels(parse_kernels("hdim64,fp16,fwd"))
    ('hdim64', 'fp16', 'fwd')
    >>> spell_kernels(ALL_KERNELS)
    ('all',)
    >>> spell_kernels(parse_kernels("all,no-bias"))
    ('all', 'no-bias')
    """
    kernels = tuple(kernels)
    words: list[str] = []
    for attribute in ("head_dim", "dtype", "kind", "causal"):
        values = {getattr(k, attribute) for k in kernels}
        if len(values) < len({getattr(k, attribute) for k in ALL_KERNELS}):
            words += [word for word, (kind, value) in _WORDS.items() if kind == attribute and value in values]
    return (*(words or ["all"]), *(() if all(k.bias for k in kernels) else (NO_BIAS,)))
