"""What patches do to kernels: the machine code with them and without them, kernel by kernel."""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.base import layout
from scripts.base.errors import CompileError, UsageError
from scripts.lab.objects import Code, read_kernels
from scripts.series import clone
from scripts.source import kernel_set, matrix, upstream
from scripts.wheels.compiling import flags, kernels, ninja
from scripts.wheels.toolchain import compilers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from scripts.series.tree import Tree

KERNELS = "hdim64,fp16,causal"  # a file of each pass
_FREE_OF_TORCH = "Keep-torch-out-of-the-kernels.patch"  # kernel files compile without it from here on
# The flags of upstream's kernel templates, in their order.
_FLAGS = {
    "flash_fwd_kernel": ("dropout", "causal", "local", "alibi", "even_MN", "even_K", "softcap", "softmax"),
    "flash_fwd_splitkv_kernel": (
        "causal",
        "local",
        "alibi",
        "even_MN",
        "even_K",
        "softcap",
        "split",
        "append",
    ),
    "flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel": (
        "dropout",
        "causal",
        "local",
        "alibi",
        "even_MN",
        "even_K",
        "softcap",
        "ordered",
    ),
}


def _template(name: str) -> str | None:
    match = re.search(r"\d(f(?:lash|ork)_\w+?_kernel)(?=I|P|v|\d|N)", name)
    return match and match[1]


def _own(name: str) -> str:
    """The arguments after the traits, whose last is the dtype again."""
    return re.split(r"S\w*_E{2,}", name)[-1]


def template_flags(name: str) -> list[str] | None:
    """The flags that a kernel is compiled for; None where it has other arguments. By its mangled name."""
    known = _FLAGS.get(_template(name) or "")
    return known and [
        word for word, flag in zip(known, re.findall(r"Lb([01])E", _own(name)), strict=False) if flag == "1"
    ]


def spell(name: str) -> str:
    """A kernel's name for people: its template, its tile's sizes, and its flags.

    Of arguments that are no flags, it has the values.
    """
    template, own_flags = _template(name), template_flags(name)
    if template is None:
        return name
    sizes = re.search(r"traitsI((?:Li\d+E)+)", name)
    words = [template, "x".join(re.findall(r"\d+", sizes[1])) if sizes else ""]
    words += ["mask or bias"] * ("WithScores" in name)
    words += (
        re.findall(r"L[bi](\d+)E", name.partition("traits")[0] + _own(name))
        if own_flags is None
        else own_flags
    )
    return " ".join(word for word in words if word)


@dataclass(frozen=True)
class Difference:
    """One kernel file, before and after; kernels by their mangled names."""

    file: str
    before: Mapping[str, Code]
    after: Mapping[str, Code]

    def names(self, what: str) -> list[str]:
        """Of the kernels that are ``same``, ``changed``, ``gone`` or ``new``."""
        both = [name for name in self.before if name in self.after]
        same = {name for name in both if self.before[name].text == self.after[name].text}
        chosen = {
            "same": [name for name in both if name in same],
            "changed": [name for name in both if name not in same],
            "gone": [name for name in self.before if name not in self.after],
            "new": [name for name in self.after if name not in self.before],
        }
        return sorted(chosen[what], key=spell)


KINDS = ("same", "changed", "gone", "new")


def compiled(
    sources: Sequence[tuple[Tree, tuple[kernel_set.Kernel, ...]]], architecture: str, jobs: int | None = None
) -> list[dict[str, dict[str, Code]]]:
    """Of each tree, by kernel file: the kernels, by their mangled names.

    The default target's compiler makes them, with the compile cache.
    """
    tools = compilers.assemble(matrix.load(layout.MATRIX).default(), None, layout.BUILD, cache=True)
    flavour = replace(kernels.FORK, code=tuple(flags.gencode((architecture,), {})))  # not packed
    plans = [
        kernels.Plan(applied, tools, chosen, (architecture,), layout.BUILD, flavour)
        for applied, chosen in sources
    ]
    work = [(plan, kernels.kernel_units(plan)) for plan in plans]
    ninja.compile_together(work, jobs)
    return [
        {unit.target.stem: read_kernels(unit.target, architecture) for unit in units} for _, units in work
    ]


@dataclass(frozen=True)
class Request:
    """What is compiled on both sides."""

    kernels: tuple[kernel_set.Kernel, ...]
    architecture: str
    source: upstream.Source
    jobs: int | None = None


def includes_torch(root: Path) -> bool:
    """Whether a tree's kernel files include torch's headers, as upstream's do."""
    parameters = (root / "csrc/flash_attn/src/flash.h").read_text(encoding="utf-8")
    return "fork_runtime.h" not in parameters


def differences(loaded: matrix.Matrix, first: int, last: int, request: Request) -> list[Difference]:
    """What the patches in these places of the series, and those between, do to each kernel file.

    Raises:
        UsageError: they come before kernel files compile without torch.
        CompileError: a compiler failed.
    """
    trees = []
    layout.BUILD.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=layout.BUILD, prefix="compare-") as folder:
        for count in (first, last + 1):
            _, applied = clone.apply(loaded, request.source, Path(folder) / str(count), count=count)
            if includes_torch(applied.root):
                raise UsageError(
                    f"kernel files include torch until {_FREE_OF_TORCH}; compare patches that come after it."
                )
            trees.append((applied, request.kernels))
        before, after = compiled(trees, request.architecture, request.jobs)
    if not before.keys() == after.keys():
        raise CompileError("the two builds have other kernel files; nothing can be compared.")
    return [Difference(file, before[file], after[file]) for file in sorted(before)]
