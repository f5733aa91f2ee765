"""Link what was compiled, and pack it: a wheel, the archive of the C++ API, or stock's bare extension."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from scripts.base import console
from scripts.wheels.compiling import kernels
from scripts.wheels.packing import cpp_archive, linking, wheel
from scripts.wheels.packing.linking import Product
from scripts.wheels.trust import binaries

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from scripts.source.matrix import Matrix, Target
    from scripts.wheels.compiling.kernels import Plan


@dataclass(frozen=True)
class Made:
    """What was compiled for a target."""

    matrix: Matrix
    target: Target
    plan: Plan
    objects: tuple[Path, ...]
    facts: dict[str, Any]  # what a wheel of it says of itself, but for static libraries

    @property
    def binding(self) -> tuple[Path, ...]:
        """The objects that Python's calls come through."""
        return tuple(u.target for u in kernels.binding_units(self.plan) if u.source == kernels.BINDING)

    @property
    def library(self) -> tuple[Path, ...]:
        """The others: core, C++ API and kernels."""
        binding = set(self.binding)
        return tuple(path for path in self.objects if path not in binding)


def link(plan: Plan, objects: Sequence[Path], product: Product) -> Path:
    """Link one product where it is not there yet; the file is named by its inputs."""
    options = [*linking.link_options(plan.toolchain, product), linking.shown(product)]
    key = kernels.extension_key(objects, options)
    linked = plan.build / "linked" / f"{product.name.lower()}-{key}.so"
    if not linking.is_linked(linked):
        console.step(f"Linking {product.value}")
        linking.link(plan.toolchain, objects, linked, plan.build / "logs" / "link.log", product)
    return linked


def linked_for_wheel(made: Made) -> dict[Product, Path]:
    """What a wheel holds: the library, and the binding that calls it."""
    library = link(made.plan, made.library, Product.LIBRARY)
    return {
        Product.LIBRARY: library,
        Product.BINDING: link(made.plan, [*made.binding, library], Product.BINDING),
    }


def _told(made: Made, linked: Iterable[Path]) -> dict[str, Any]:
    static = {name for library in linked for name in linking.static_libraries(library)}
    return {**made.facts, "static_libraries": sorted(static)}


def wheel_of(made: Made, out: Path) -> Path:
    """The wheel, in ``out``."""
    linked = linked_for_wheel(made)
    return wheel.pack(made.matrix, made.target, made.plan, linked, _told(made, linked.values()), out)


def archive(made: Made, out: Path) -> Path:
    """The archive of the C++ API, in ``out``."""
    library = link(made.plan, made.library, Product.ARCHIVED)
    if newer := binaries.too_new(library):
        console.warn(f"the library asks for more than manylinux_2_28 has: {', '.join(newer)}")
    return cpp_archive.pack(made.matrix, made.target, made.plan, library, _told(made, [library]), out)


def stock(made: Made, out: Path) -> Path:
    """Upstream's extension as Python names it, in ``out``."""
    extension = link(made.plan, made.objects, Product.STOCK)
    tag = made.plan.toolchain.environment.tag[2:]
    path = out / f"{made.plan.flavour.extension}.cpython-{tag}-x86_64-linux-gnu.so"
    out.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(extension, path.with_suffix(".part"))
    path.with_suffix(".part").replace(path)
    return path
