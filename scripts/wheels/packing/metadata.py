"""What a wheel says of itself: its metadata, and the provenance."""

from __future__ import annotations

import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from pyproject_metadata import Readme, StandardMetadata

from scripts.base import layout
from scripts.base.errors import WheelError
from scripts.source import build_script
from scripts.wheels.compiling.flags import CORE_FLAGS
from scripts.wheels.compiling.kernels import nvcc_flags
from scripts.wheels.toolchain import tvm_ffi

if TYPE_CHECKING:
    from collections.abc import Sequence

    from scripts.series.model import Series
    from scripts.series.tree import Tree
    from scripts.source.matrix import Matrix, Target
    from scripts.wheels.compiling.kernels import Plan

PROVENANCE = "flash_attn/_fork.json"


PROVENANCE_FORMAT = 1


DESCRIPTION = "docs/wheel.md"  # what an index shows of a wheel


# What Python finds no error in, and torch has a CUDA build for.
_REQUIRES_PYTHON = ">=3.10"
_SUMMARY = "FlashAttention-2 whose deterministic mode makes each row's bits independent of its batch"
# What other programs call when they start: vLLM and SGLang load their plugins by these groups' names.
_ENTRY_POINTS = {
    "vllm.general_plugins": {"flash_attn_deterministic": "flash_attn.serving.vllm:register"},
    "sglang.srt.plugins": {"flash_attn_deterministic": "flash_attn.serving.sglang:register"},
}


def entry_points(root: Path) -> str:
    """The wheel's entry_points.txt, of those whose module is in the tree; empty for none."""
    lines: list[str] = []
    for group, points in _ENTRY_POINTS.items():
        there = [
            f"{name} = {target}"
            for name, target in points.items()
            if (root / f"{target.split(':')[0].replace('.', '/')}.py").is_file()
        ]
        lines += [f"[{group}]", *there] if there else []
    return "".join(f"{line}\n" for line in lines)


def python_files(root: Path, others: Sequence[str] = ()) -> list[str]:
    """The Python files of the packages that upstream's setup.py packs, and of other packages of a tree.

    Raises:
        WheelError: setup.py does not say which, in the words that it used to.
    """
    excluded = build_script.excluded_packages((root / "setup.py").read_bytes())
    if excluded is None:
        raise WheelError(f"{root / 'setup.py'} calls find_packages no more; which files belong to a wheel?")
    names = []
    for top in ("flash_attn", *others):
        for init in sorted((root / top).rglob("__init__.py")):
            folder = init.parent.relative_to(root)
            dotted = [".".join(folder.parts[: i + 1]) for i in range(len(folder.parts))]
            whole = all((root / Path(*name.split(".")) / "__init__.py").is_file() for name in dotted)
            if whole and not any(fnmatch.fnmatchcase(dotted[-1], pattern) for pattern in excluded):
                names += [str(path.relative_to(root)) for path in sorted(init.parent.glob("*.py"))]
    return names


def fork_metadata(root: Path, matrix: Matrix, target: Target) -> str:
    """The wheel's METADATA: the fork's own words, with what upstream requires."""
    told = StandardMetadata(
        "flash_attn",
        version=Version(matrix.version(target)),
        description=_SUMMARY,
        requires_python=SpecifierSet(_REQUIRES_PYTHON),
        dependencies=[Requirement(text) for text in _requirements(root, target)],
        license="BSD-3-Clause",
        license_files=[Path(name) for name in ("LICENSE", "AUTHORS", "NOTICE")],
        urls={"Upstream": matrix.upstream.repository},
        readme=Readme((layout.ROOT / DESCRIPTION).read_text(encoding="utf-8"), None, "text/markdown"),
        metadata_version="2.4",
    )
    return str(told.as_rfc822())


def _requirements(root: Path, target: Target) -> list[str]:
    """What upstream requires, torch in the target's range, and what the binding is called through."""
    listed = build_script.requirements((root / "setup.py").read_bytes())
    if "torch" not in listed:
        raise WheelError(f"{root / 'setup.py'} does not require torch as expected: {listed}.")
    own = [tvm_ffi.REQUIREMENT]
    if any(release in SpecifierSet(target.torch) for release in tvm_ffi.TORCH_WITHOUT_EXCHANGE):
        own.append(tvm_ffi.EXCHANGE)
    if any(release in SpecifierSet(target.torch) for release in tvm_ffi.TORCH_OF_OLD_ABI):
        own.append(tvm_ffi.COMPILER)
    return [f"torch{target.torch}" if name == "torch" else name for name in listed] + own


def version_facts(matrix: Matrix) -> dict[str, str]:
    """What a provenance says of a wheel that passes for another release than it was built from."""
    return {"base_version": matrix.base_version} if matrix.base_version else {}


def series_facts(series: Series, tree: Tree) -> dict[str, Any]:
    """What a provenance says of the series."""
    return {
        "digest": tree.digest,
        "base": tree.base,
        "commit": tree.commit,
        "patches": [
            {
                "name": p.name,
                "subject": p.subject,
                "sha256": p.sha256,
                "upstream_status": p.upstream_status,
            }
            for p in series.patches
        ],
        "own_files": series.own.digests,
    }


def provenance(matrix: Matrix, target: Target, series: Series, plan: Plan) -> dict[str, Any]:
    """What ``flash_attn/_fork.json`` holds and ``fork_info()`` returns."""
    pin, tree = matrix.upstream, plan.tree
    return {
        "format": PROVENANCE_FORMAT,
        "upstream": {
            "version": pin.version,
            "commit": pin.commit,
            "cutlass": pin.cutlass,
            "sdist_sha256": pin.sdist_sha256,
        },
        **version_facts(matrix),
        "fork_revision": matrix.table.revision,
        "series": series_facts(series, tree),
        "target": target.name,
        "kernel_set": [k.name for k in plan.kernels],
        "attn_bias": all(k.bias for k in plan.kernels),
        "architectures": list(plan.architectures),
        "cuda": target.cuda,
        "torch": target.reference_torch,
        "requires_torch": target.torch,
        "tvm_ffi": tvm_ffi.VERSION,
        "nvcc": {"version": plan.toolchain.toolkit.version, "flags": nvcc_flags(plan)},
        "cxx": {"version": plan.toolchain.cxx_version, "flags": list(CORE_FLAGS)},
    }
