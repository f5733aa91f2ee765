"""Upstream's functions that others call: users, by the names that a package exports, and patches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from scripts.source import build_script, functions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Set

    from scripts.source.functions import Function

_INIT = "__init__.py"


@dataclass(frozen=True)
class Called:
    """A function that others call."""

    file: str
    name: str  # in the file
    parameters: tuple[str, ...]


def of_extension(read: Callable[[str], bytes]) -> dict[str, Called]:
    """What a wheel with an extension offers, by the names that others call: of the binding, and of modules.

    Args:
        read: a file of upstream's by its path; empty where there is none.
    """
    binding = read(build_script.BINDING)
    listed = functions.functions(build_script.BINDING, binding)
    found = {
        f"flash_attn_2_cuda.{name}": Called(build_script.BINDING, function, listed[function].parameters)
        for name, function in functions.bound(binding).items()
        if function in listed
    }
    for module in functions.imported_modules(read(f"flash_attn/{_INIT}"), "flash_attn"):
        path = f"{module.replace('.', '/')}.py"
        if module.startswith("flash_attn."):
            found |= {
                f"{module}.{name}": Called(path, name, function.parameters)
                for name, function in functions.functions(path, read(path)).items()
                if not name.startswith("_") and _is_of_module(function)
            }
    return found


def of_package(package: str, read: Callable[[str], bytes], words: Set[str]) -> dict[str, Called]:
    """What a python upstream's package offers, by the names that others call.

    Its ``__init__.py`` exports some functions. Patches call more of the same modules, private ones too.

    Args:
        package: its folder.
        read: a file of upstream's by its path; empty where there is none.
        words: of the lines that patches add.
    """
    dotted = package.replace("/", ".")
    exported = functions.exported(read(f"{package}/{_INIT}"), dotted)
    modules: dict[str, Mapping[str, Function]] = {}
    found = {}
    for name, (module, own) in exported.items():
        path = f"{module.replace('.', '/')}.py"
        listed = modules.setdefault(module, functions.functions(path, read(path)))
        if own in listed:
            found[f"{dotted}.{name}"] = Called(path, own, listed[own].parameters)
    return found | dict(_called(modules, words, {(c.file, c.name) for c in found.values()}))


def _called(
    modules: Mapping[str, Mapping[str, Function]], words: Set[str], known: Set[tuple[str, str]]
) -> Iterator[tuple[str, Called]]:
    """Functions of modules that words name."""
    for module, listed in modules.items():
        path = f"{module.replace('.', '/')}.py"
        for name, function in listed.items():
            if _is_of_module(function) and {name, f".{name}"} & words and (path, name) not in known:
                yield f"{module}.{name}", Called(path, name, function.parameters)


def _is_of_module(function: Function) -> bool:
    """A function, rather than a method."""
    return "." not in function.name
