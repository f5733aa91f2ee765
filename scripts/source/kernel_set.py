"""Upstream's kernel files, and the words that choose some of them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import Enum
from fnmatch import fnmatch
from itertools import product
from typing import TYPE_CHECKING, Any

from scripts.base.errors import UpstreamError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

HEAD_DIMS = (32, 64, 96, 128, 192, 256)
DTYPES = ("fp16", "bf16")


class Pass(str, Enum):
    """A kind of kernel file."""

    FWD = "fwd"
    SPLIT = "split"
    BWD = "bwd"


# How the names of a pass's files begin, after flash_. A new kind of kernel file is a Pass and a line here.
STEMS = {Pass.FWD: "fwd", Pass.SPLIT: "fwd_split", Pass.BWD: "bwd"}
# Kernel files of upstream's that no wheel has: a pattern of names, and why.
LEFT_OUT: dict[str, str] = {}
FOLDER = "csrc/flash_attn/src"


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
        causal = "_causal" if self.causal else ""
        return f"flash_{STEMS[self.kind]}_hdim{self.head_dim}_{self.dtype}{causal}_sm80.cu"

    @property
    def bit(self) -> int:
        """Its place in the masks of ``fork_kernel_set.h``."""
        return (HEAD_DIMS.index(self.head_dim) * 2 + DTYPES.index(self.dtype)) * 2 + self.causal


NO_BIAS = "no-bias"
ALL_KERNELS = tuple(Kernel(*parts) for parts in product(Pass, HEAD_DIMS, DTYPES, (False, True)))


def unknown(paths: Iterable[str]) -> tuple[str, ...]:
    """Of these files the kernel files that this table does not know.

    >>> unknown(["csrc/flash_attn/src/flash_fwd_hdim32_fp16_sm80.cu", "csrc/flash_attn/src/flash.h"])
    ()
    >>> unknown(["csrc/flash_attn/src/flash_new_hdim32_fp16_sm80.cu"])
    ('flash_new_hdim32_fp16_sm80.cu',)
    """
    known = {kernel.source for kernel in ALL_KERNELS}
    names = (path.removeprefix(f"{FOLDER}/") for path in paths if path.startswith(f"{FOLDER}/"))
    return tuple(
        name
        for name in names
        if name.endswith(".cu") and name not in known and not any(fnmatch(name, p) for p in LEFT_OUT)
    )


def require_known(root: Path) -> None:
    """Refuse a tree with kernel files that this table does not know, for no wheel would have them.

    Raises:
        UpstreamError: it says what to edit.
    """
    if names := unknown(f"{FOLDER}/{path.name}" for path in sorted((root / FOLDER).glob("*.cu"))):
        raise UpstreamError(
            f"{root / FOLDER} has {len(names)} kernel files that no wheel would have: {names[0]} …\n"
            f"{how_to_know(names)}"
        )


def missing(before: Iterable[str], after: Iterable[str]) -> tuple[str, ...]:
    """The kernel files of this table that one release has and another does not."""
    gone = set(before) - set(after)
    return tuple(k.source for k in ALL_KERNELS if f"{FOLDER}/{k.source}" in gone)


def how_to_know(names: Iterable[str]) -> str:
    """What to edit, so that this table knows kernel files.

    >>> print(how_to_know(["flash_fwd_new_hdim64_fp16_sm80.cu", "flash_fwd_new_hdim512_bf16_causal_sm80.cu"]))
    In scripts/source/kernel_set.py
      build them:    add FWD_NEW = "fwd_new" to Pass, Pass.FWD_NEW: "fwd_new" to STEMS; 512 to HEAD_DIMS
                     (csrc/flash_attn/src/fork_kernel_set.h has the same lists; a patch makes it)
      or leave out:  add "flash_fwd_new_*.cu": "WHY" to LEFT_OUT
    """
    edits: dict[str, None] = {}
    patterns: dict[str, None] = {}
    for name in names:
        parts = re.fullmatch(r"flash_(\w+?)_hdim(\d+)_(\w+?)(?:_causal)?_sm80\.cu", name)
        if parts is None:
            patterns[name] = None
            continue
        stem, head_dim, dtype = parts.groups()
        if stem in STEMS.values():  # no wider than what is new
            patterns[f"flash_{stem}_hdim{head_dim}_{dtype}*_sm80.cu"] = None
        else:
            patterns[f"flash_{stem}_*.cu"] = None
        if stem not in STEMS.values():
            edits[f'{stem.upper()} = "{stem}" to Pass, Pass.{stem.upper()}: "{stem}" to STEMS'] = None
        if int(head_dim) not in HEAD_DIMS:
            edits[f"{head_dim} to HEAD_DIMS"] = None
        if dtype not in DTYPES:
            edits[f'"{dtype}" to DTYPES'] = None
    lines = ["In scripts/source/kernel_set.py"]
    if edits:
        lines.append(f"  build them:    add {'; '.join(edits)}")
        lines.append(f"                 ({FOLDER}/fork_kernel_set.h has the same lists; a patch makes it)")
    left_out = ", ".join(f'"{pattern}": "WHY"' for pattern in patterns)
    lines.append(f"  {'or leave out:' if edits else 'leave them out:'}  add {left_out} to LEFT_OUT")
    return "\n".join(lines)


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
