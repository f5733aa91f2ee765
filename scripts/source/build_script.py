"""What upstream's setup.py compiles, and with which flags: read, never run."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

BINDING = "csrc/flash_attn/flash_api.cpp"


@dataclass(frozen=True)
class BuildScript:
    """The extension that wheels have."""

    sources: tuple[str, ...]
    flags: tuple[str, ...]  # sorted; those that only some CUDA gets too


def read(content: bytes) -> BuildScript:
    """The extension with ``flash_api.cpp``; nothing where the script has none, or is not Python.

    Flags are the words of its branch of the script and of the functions that the branch calls, however
    the script puts them together.

    >>> read(b'''
    ... def more(): return ["-gencode", "arch=compute_90"]
    ... if CUDA:
    ...     CUDAExtension(sources=["csrc/flash_attn/flash_api.cpp"], extra_compile_args=more() + ["-O3"])
    ... else:
    ...     CUDAExtension(sources=["other.cu"], extra_compile_args=["-O2"])
    ... ''')
    BuildScript(sources=('csrc/flash_attn/flash_api.cpp',), flags=('-O3', '-gencode', 'arch=compute_90'))
    """
    try:
        module = ast.parse(content)
    except (SyntaxError, ValueError):
        return BuildScript((), ())
    for branch in _branches(module.body):
        for call in (node for part in branch for node in ast.walk(part) if isinstance(node, ast.Call)):
            sources = [value for k in call.keywords if k.arg == "sources" for value in _texts([k.value])]
            if BINDING in sources:
                reached = [*branch, *_called(module, branch)]
                flags = {value for value in _texts(reached) if re.match(r"-\w|--\w|arch=", value)}
                return BuildScript(tuple(sources), tuple(sorted(flags)))
    return BuildScript((), ())


def _branches(body: list[ast.stmt]) -> Iterator[list[ast.stmt]]:
    """The bodies of the script's own ``if`` and ``else``, then the script as a whole."""
    for statement in body:
        if isinstance(statement, ast.If):
            yield from _branches(statement.body)
            yield from _branches(statement.orelse)
    yield body


def _texts(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            yield ast.unparse(node)[2:-1]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        else:
            yield from _texts(ast.iter_child_nodes(node))


def _called(module: ast.Module, branch: list[ast.stmt]) -> list[ast.stmt]:
    """The script's functions that a branch calls, and those that these call."""
    by_name = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
    found: dict[str, ast.stmt] = {}
    waiting: list[ast.stmt] = list(branch)
    while waiting:
        names = {node.id for node in ast.walk(waiting.pop()) if isinstance(node, ast.Name)}
        for name in names & set(by_name) - set(found):
            found[name] = by_name[name]
            waiting.append(by_name[name])
    return list(found.values())


def _keyword(content: bytes, function: str, name: str) -> ast.expr | None:
    """The value of a keyword in the script's call of a function."""
    for node in ast.walk(ast.parse(content)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == function:
            return next((k.value for k in node.keywords if k.arg == name), None)
    return None


def excluded_packages(content: bytes) -> tuple[str, ...] | None:
    """The packages that ``find_packages`` leaves out; None where the script does not call it.

    >>> excluded_packages(b'setup(packages=find_packages(exclude=("tests", "a.b.*")))')
    ('tests', 'a.b.*')
    """
    value = _keyword(content, "find_packages", "exclude")
    return tuple(_texts([value])) if value is not None else None


def requirements(content: bytes) -> tuple[str, ...]:
    """What ``setup`` requires.

    >>> requirements(b'setup(install_requires=["torch", "einops"])')
    ('torch', 'einops')
    """
    value = _keyword(content, "setup", "install_requires")
    return tuple(_texts([value])) if value is not None else ()
