"""Functions of upstream's C++ and Python files: where they lie, their parameters, and what they say."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import tree_sitter_cpp
from tree_sitter import Language, Parser

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from tree_sitter import Node

CPP = (".cu", ".h", ".cuh", ".cpp", ".hpp")
# Words of CUDA that C++ lacks: the grammar would read them as names of types.
_CUDA_WORDS = re.compile(
    rb"__(?:device|global|host|forceinline|noinline|restrict|shared|grid_constant)__"
    rb"|__launch_bounds__\([^()]*\)"
)
_COMMENTS = re.compile(r"//[^\n]*|/\*.*?\*/|\s+", re.DOTALL)
_KINDS = {
    "function_definition": "declarator",
    "struct_specifier": "name",
    "class_specifier": "name",
    "preproc_function_def": "name",
}


@dataclass(frozen=True)
class Function:
    """What has one name in a file: a function with its overloads, a macro, or the members of a struct."""

    name: str  # such as Mask.apply_mask
    spans: tuple[tuple[int, int], ...]  # first and last lines
    parameters: tuple[str, ...]  # of the first overload, in order
    meaning: str  # its text without comments and white space

    def holds(self, first: int, last: int) -> bool:
        """Whether these lines are its."""
        return any(begin <= first and last <= end for begin, end in self.spans)


@lru_cache(maxsize=1024)
def functions(path: str, content: bytes) -> Mapping[str, Function]:
    r"""The functions of a file by name; none where the file is of another language or cannot be read.

    >>> found = functions("a.h", b"struct S {\n int n;\n};\nint f(int a, int b = 1) { return a; }")
    >>> found["f"].parameters, found["f"].spans, sorted(found)
    (('a', 'b'), ((4, 4),), ['S', 'f'])
    >>> functions("a.py", b"class A:\n    def f(self, *, x=1): ...")["A.f"].parameters
    ('self', 'x')
    """
    if path.endswith(".py"):
        found = _python(content)
    elif path.endswith(CPP):
        tree = Parser(Language(tree_sitter_cpp.language())).parse(_CUDA_WORDS.sub(_blank, content))
        found = _cpp(tree.root_node, "")
    else:
        return {}
    merged: dict[str, Function] = {}
    for function in found:
        if (known := merged.get(function.name)) is not None:
            function = Function(  # noqa: PLW2901 - an overload adds to the first
                known.name,
                known.spans + function.spans,
                known.parameters or function.parameters,
                known.meaning + "\n" + function.meaning,
            )
        merged[function.name] = function
    return merged


def names_at(found: Mapping[str, Function], first: int, last: int) -> set[str]:
    r"""The functions that lines lie in; of a struct's methods the method, not the struct.

    >>> names_at(functions("a.h", b"struct S {\n int n;\n int f() {\n }\n};"), 3, 3)
    {'S.f'}
    """
    names = {name for name, function in found.items() if function.holds(first, last)}
    return {name for name in names if not any(other.startswith(name + ".") for other in names)}


def bound(content: bytes) -> dict[str, str]:
    """What a binding exports: the name that Python calls, and the C++ function.

    >>> bound(b'PYBIND11_MODULE(X, m) { m.def("fwd", &NS::mha_fwd, "Forward"); }')
    {'fwd': 'mha_fwd'}
    """
    text = content.decode("utf-8", errors="replace")
    _, _, module = text.partition("PYBIND11_MODULE")
    pairs = re.findall(r'\bdef\(\s*"(\w+)"\s*,\s*&?\s*([\w:]+)', module)
    return {name: function.rsplit("::", 1)[-1] for name, function in pairs}


def _blank(match: re.Match[bytes]) -> bytes:
    return b" " * len(match[0])


def _plain(text: str) -> str:
    return _COMMENTS.sub(lambda m: "" if m[0].strip() else " ", text).replace(" ", "")


# --- C++ ---


def _cpp(node: Node, inside: str) -> Iterator[Function]:
    for child in node.children:
        kind = _KINDS.get(child.type)
        name = _cpp_name(child, kind) if kind else ""
        if not name or (child.type.endswith("_specifier") and child.child_by_field_name("body") is None):
            yield from _cpp(child, inside)
            continue
        whole = node if node.type == "template_declaration" else child
        yield Function(
            inside + name,
            ((whole.start_point[0] + 1, whole.end_point[0] + 1),),
            _cpp_parameters(child),
            _plain(_text_without_methods(whole)),
        )
        if child.type.endswith("_specifier"):
            yield from _cpp(child, f"{inside}{name}.")


def _text(node: Node | None) -> str:
    return (node.text or b"").decode("utf-8", errors="replace") if node is not None else ""


def _text_without_methods(node: Node) -> str:
    """A struct's own members: its methods have names of their own."""
    text, start = node.text or b"", node.start_byte
    for method in reversed(_methods(node)):
        text = text[: method.start_byte - start] + text[method.end_byte - start :]
    return text.decode("utf-8", errors="replace")


def _methods(node: Node) -> list[Node]:
    bodies = [n for n in (node, *node.children) if n.type in ("struct_specifier", "class_specifier")]
    members = [m for body in bodies for m in _children(body.child_by_field_name("body"))]
    return [m for m in members if any(n.type == "function_definition" for n in (m, *m.children))]


def _children(node: Node | None) -> list[Node]:
    return node.children if node is not None else []


def _cpp_name(node: Node, field: str) -> str:
    """The name that a node declares.

    A macro that makes a function, DEFINE_KERNEL(name, …) { … }, declares its first argument.
    """
    declarator = _function_declarator(node) if field == "declarator" else None
    name = node.child_by_field_name(field)
    if declarator is not None:
        name = declarator.child_by_field_name("declarator")
    text = _text(name).rsplit("::", 1)[-1].strip()
    if declarator is not None and re.fullmatch("[A-Z0-9_]+", text):
        first = _text(declarator.child_by_field_name("parameters")).strip("()").partition(",")[0].strip()
        if re.fullmatch(r"[a-z]\w*", first):
            return first
    return text if re.fullmatch(r"~?\w+|operator.*", text) else ""


def _function_declarator(node: Node) -> Node | None:
    """The part with name and parameters, below pointers and references."""
    inner = node.child_by_field_name("declarator")
    while inner is not None and inner.type != "function_declarator":
        inner = inner.child_by_field_name("declarator") or next(
            (c for c in inner.named_children if c.type == "function_declarator"), None
        )
    return inner


def _cpp_parameters(node: Node) -> tuple[str, ...]:
    declarator = _function_declarator(node)
    if declarator is None:
        return ()
    listed = _children(declarator.child_by_field_name("parameters"))
    return tuple(_parameter(p) for p in listed if p.type.endswith("parameter_declaration"))


def _parameter(node: Node) -> str:
    """A parameter's name, or its type where it has none."""
    inner = node.child_by_field_name("declarator")
    while inner is not None and inner.type not in ("identifier", "field_identifier"):
        inner = inner.child_by_field_name("declarator") or next(iter(reversed(inner.named_children)), None)
    return _text(inner if inner is not None else node.child_by_field_name("type"))


# --- Python ---


def imported_modules(content: bytes, package: str) -> list[str]:
    """The modules that a package's ``__init__.py`` takes names from.

    >>> imported_modules(b"from flash_attn.interface import f, g; import os", "flash_attn")
    ['flash_attn.interface']
    >>> imported_modules(b"from .interface import f; from ..other import g", "flash_attn.cute")
    ['flash_attn.cute.interface']
    """
    try:
        module = ast.parse(content)
    except (SyntaxError, ValueError):
        return []
    beside = {0: "", 1: f"{package}."}  # by the dots before a module's name
    return [
        beside[node.level] + node.module
        for node in ast.walk(module)
        if isinstance(node, ast.ImportFrom) and node.module and node.level in beside
    ]


def exported(content: bytes, package: str) -> dict[str, tuple[str, str]]:
    """What a package takes from its modules for others: by name, a module and the name in it.

    >>> exported(b"from .a import f as g, h; from p.b import _x; __all__ = ['g']; import os", "p")
    {'g': ('p.a', 'f')}
    >>> exported(b"from . import a; from .a import f, _g; from q import r", "p")
    {'f': ('p.a', 'f')}
    """
    try:
        body = ast.parse(content).body
    except (SyntaxError, ValueError):
        return {}
    found: dict[str, tuple[str, str]] = {}
    for node in body:
        if isinstance(node, ast.ImportFrom) and node.module and node.level < 2:
            module = f"{package}.{node.module}" if node.level else node.module
            if module.startswith(f"{package}."):
                found |= {alias.asname or alias.name: (module, alias.name) for alias in node.names}
    names = _all(body)
    return {n: place for n, place in found.items() if (n in names if names else not n.startswith("_"))}


def _all(body: list[ast.stmt]) -> set[str]:
    """The names of ``__all__``; none where it is not there, or no list of texts."""
    for node in body:
        if isinstance(node, ast.Assign) and [ast.unparse(t) for t in node.targets] == ["__all__"]:
            values = getattr(node.value, "elts", [])
            return {str(v.value) for v in values if isinstance(v, ast.Constant)}
    return set()


def _python(content: bytes) -> Iterable[Function]:
    try:
        module = ast.parse(content)
    except (SyntaxError, ValueError):  # of a later Python, or not Python
        return []
    return list(_python_functions(module, ""))


def _python_functions(node: ast.AST, inside: str) -> Iterator[Function]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([child.lineno, *(d.lineno for d in child.decorator_list)])
            yield Function(
                inside + child.name,
                ((first, child.end_lineno or first),),
                _python_parameters(child.args),
                _python_meaning(child),
            )
        elif isinstance(child, ast.ClassDef):
            yield from _python_functions(child, f"{inside}{child.name}.")
        else:
            yield from _python_functions(child, inside)


def _python_meaning(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Without the docstring, which says nothing to a program."""
    body = function.body[1:] if ast.get_docstring(function, clean=False) is not None else function.body
    return "".join(ast.dump(part) for part in (function.args, *function.decorator_list, *body))


def _python_parameters(arguments: ast.arguments) -> tuple[str, ...]:
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    names += [f"*{arguments.vararg.arg}"] if arguments.vararg else []
    names += [a.arg for a in arguments.kwonlyargs]
    names += [f"**{arguments.kwarg.arg}"] if arguments.kwarg else []
    return tuple(names)
