"""Guards: no patch is lost in a clean merge.

A patch declares in trailers ``Guard:`` what only a tree with it passes. Each guard is run both ways, on the
tree before the patch, which must fail it, and on the trees after the patch and after the whole series,
which must pass.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection
from pygments.lexers import CudaLexer, PythonLexer
from pygments.token import Comment, String

from scripts.base import archives, console, layout
from scripts.base.errors import GuardError, SeriesError
from scripts.base.git import Repository
from scripts.base.process import last_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from scripts.series.model import Patch, Series
    from scripts.series.tree import Commits

    Compiler = Callable[[Path, str], Path]  # a tree and a file of it; the object

KINDS = (
    "'symbol NAME in FILE', 'macro NAME in FILE', 'signature [N x] CODE in FILE' (N times or more), "
    "'compiled NAME in FILE' (of its object's symbols) or 'test tests/guards/FILE.py::NAME'"
)


@dataclass(frozen=True)
class Guard:
    """One check."""

    kind: str  # symbol, macro, signature, compiled, test
    what: str  # a name, code, or a pytest node
    path: str  # a file of the tree; of this repository for a test
    times: int = 1  # how often a signature is to be there

    def __str__(self) -> str:
        """As in the trailer."""
        if self.kind == "test":
            return f"test {self.path}::{self.what}"
        return f"{self.kind} {f'{self.times} x ' if self.times > 1 else ''}{self.what} in {self.path}"


@dataclass(frozen=True)
class Outcome:
    """What a guard said of three trees."""

    patch: str
    guard: Guard
    before: bool
    after: bool
    whole: bool
    there: bool = True  # the file that it names, in the tree with the patch
    output: str = ""  # of a test that failed with the patch, or passed without it

    @property
    def discriminates(self) -> bool:
        """Whether it fails without the patch and passes with it, also under the patches that follow."""
        return not self.before and self.after and self.whole

    @property
    def fault(self) -> str:
        """Why it does not."""
        if not self.there:
            return f"fails on the tree with the patch: that has no file {self.guard.path}"
        if not self.after:
            return "fails on the tree with the patch: the guard is wrong, or the patch lost what it guards"
        if self.before:
            return "passes on the tree without the patch: it guards nothing, or upstream has it now"
        return "" if self.whole else "fails on the whole series: a later patch undoes it"


def parse(text: str) -> Guard:
    """A trailer's text.

    >>> parse("macro FORK_MODE in csrc/flash_attn/src/fork_mode.h").kind
    'macro'

    Raises:
        ValueError: it is none of ``KINDS``.
    """
    if match := re.fullmatch(r"test (tests/guards/\w+\.py)::([\w\[\]-]+)", text):
        if not (layout.ROOT / match[1]).is_file():
            raise ValueError(f"there is no {match[1]}")
        return Guard("test", match[2], match[1])
    if match := re.fullmatch(r"(symbol|macro|compiled) (\w+) in (\S+)", text):
        guard = Guard(match[1], match[2], match[3])
    elif match := re.fullmatch(r"signature (?:(\d+) x )?(\S.*) in (\S+)", text):
        guard = Guard("signature", match[2], match[3], int(match[1] or 1))
    else:
        raise ValueError(f"it is none of {KINDS}")
    if guard.times < 1:
        raise ValueError("0 times is always there")
    path = PurePosixPath(guard.path)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{guard.path} is no path within upstream's tree")
    return guard


@functools.lru_cache(maxsize=256)
def code_of(name: str, text: str) -> str:
    r"""A source file without its comments and docstrings.

    >>> code_of("a.h", "int a; // b\n/* c */ #define D 1\n").split()
    ['int', 'a;', '#define', 'D', '1']
    """
    lexer = PythonLexer() if name.endswith(".py") else CudaLexer()
    comments = (Comment.Single, Comment.Multiline, Comment.Hashbang, String.Doc)
    kept = "".join(
        value if not any(kind in c for c in comments) else " " for kind, value in lexer.get_tokens(text)
    )
    # The lexer keeps a comment that ends a preprocessor line as a part of it.
    return re.sub(r"(?m)^(\s*#.*?)//.*$", r"\1", kept) if not name.endswith(".py") else kept


def _holds(guard: Guard, code: str) -> bool:
    if guard.kind == "symbol":
        return re.search(rf"\b{guard.what}\b", code) is not None
    if guard.kind == "macro":
        return (
            re.search(rf"(?m)^\s*#\s*(define|undef|if|ifdef|ifndef|elif)\b.*\b{guard.what}\b", code)
            is not None
        )

    def squeezed(text: str) -> str:
        return re.sub(r"\s+", "", text)

    return squeezed(code).count(squeezed(guard.what)) >= guard.times


def check_file(guard: Guard, repository: Repository, commit: str) -> bool:
    """Whether a symbol, macro or signature is in the code of its file in this commit."""
    if guard.path not in repository.files(commit, "--", guard.path):
        return False
    return _holds(guard, code_of(guard.path, repository.read(f"{commit}:{guard.path}").decode("utf-8")))


def check_compiled(guard: Guard, repository: Repository, commit: str, compiler: Compiler | None) -> bool:
    """Whether the object that a file of this commit compiles to has a symbol with this name in it.

    Raises:
        GuardError: there is no compiler here.
        CompileError: the file does not compile.
    """
    if compiler is None:
        raise GuardError(f"guard {guard} needs a compiler, and this command has none.")
    if guard.path not in repository.files(commit, "--", guard.path):
        return False
    with tempfile.TemporaryDirectory(prefix="fa2-guard-") as folder:
        tree = Path(folder) / "tree"
        _extract(repository, commit, repository.files(commit), tree)
        with compiler(tree, guard.path).open("rb") as stream:
            table = ELFFile(stream).get_section_by_name(".symtab")
            return isinstance(table, SymbolTableSection) and any(
                guard.what in symbol.name for symbol in table.iter_symbols()
            )


def _extract(repository: Repository, commit: str, names: list[str], target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="fa2-guard-") as folder:
        archive = Path(folder) / "tree.tar"
        repository.run("archive", "--format=tar", f"--output={archive}", commit, "--", *names, writes=False)
        with tarfile.open(archive) as tar:
            archives.write_all(tar, target)


def check_test(guard: Guard, repository: Repository, commit: str) -> tuple[bool, str]:
    """Whether a named test passes with ``--tree`` at a copy of this commit, and what pytest said.

    The copy has no cutlass.

    Raises:
        GuardError: pytest neither passed nor failed: there is no such test, or it cannot start.
    """
    with tempfile.TemporaryDirectory(prefix="fa2-guard-") as folder:
        _extract(
            repository,
            commit,
            [n for n in repository.files(commit) if not n.startswith("csrc/cutlass/")],
            Path(folder) / "tree",
        )
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            f"--rootdir={layout.ROOT}",
            "-c",
            os.devnull,
        ]
        command += [f"{layout.ROOT / guard.path}::{guard.what}", f"--tree={Path(folder) / 'tree'}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=layout.ROOT)
    if done.returncode not in (0, 1) or done.stderr.rstrip().endswith("No module named pytest"):
        raise GuardError(
            f"guard {guard}: pytest exited with {done.returncode}.\n{last_lines(done.stdout + done.stderr)}"
        )
    return done.returncode == 0, last_lines(done.stdout + done.stderr)


def run(
    series: Series, tree: Commits, compiler: Compiler | None = None, only: int | None = None
) -> list[Outcome]:
    """Run the guards of the series both ways, telling how far it is.

    Args:
        series: the patches.
        tree: the whole series, applied.
        compiler: compiles a file of a tree, for guards that ask for a compiled symbol.
        only: the place of the one patch whose guards are run; None: all.

    Raises:
        SeriesError: the tree is not of these patches.
        GuardError: a patch declares no guard, or one that is malformed.
    """
    repository = Repository(tree.root, SeriesError)
    commits = repository.commits(tree.base, tree.commit)
    if len(commits) != len(series.patches):
        raise SeriesError(
            f"{tree.root} has {len(commits)} commits for {len(series.patches)} patches; run nox -s apply."
        )
    checks = [
        (patch.name, guard, before, commit)
        for place, (patch, before, commit) in enumerate(
            zip(series.patches, [tree.base, *commits], commits, strict=False)
        )
        if only in (None, place)
        for guard in _guards_of(patch)
    ]
    outcomes = []
    with console.steps("guards", len(checks)) as advance:
        for name, guard, before, commit in checks:
            there = guard.kind == "test" or guard.path in repository.files(commit, "--", guard.path)
            without, with_it, whole = (
                _check(guard, repository, at, compiler) for at in (before, commit, tree.commit)
            )
            wrong = next((said for passed, said in (with_it, whole) if not passed), without[1])
            outcome = Outcome(name, guard, without[0], with_it[0], whole[0], there)
            outcomes.append(outcome if outcome.discriminates else replace(outcome, output=wrong))
            advance(name)
    return outcomes


def _guards_of(patch: Patch) -> list[Guard]:
    if not patch.guards:
        raise GuardError(f"{patch.name} declares no guard; add a trailer 'Guard: …' to its message: {KINDS}.")
    guards = []
    for text in patch.guards:
        try:
            guards.append(parse(text))
        except ValueError as e:
            raise GuardError(f"{patch.name}: Guard {text!r}: {e}.") from e
    return guards


def _check(guard: Guard, repository: Repository, commit: str, compiler: Compiler | None) -> tuple[bool, str]:
    """Whether a guard passes on a commit, and what its test said."""
    if guard.kind == "test":
        return check_test(guard, repository, commit)
    if guard.kind == "compiled":
        return check_compiled(guard, repository, commit, compiler), ""
    return check_file(guard, repository, commit), ""


def require(outcomes: list[Outcome], upstream: str | None = None, also: Sequence[str] = ()) -> None:
    """Raise a GuardError that names every guard that does not discriminate, with what its test said.

    ``upstream``: whose series it is, where a command must be told. ``also``: what else is wrong.
    """
    which = f"--upstream {upstream} " if upstream else ""
    faults = []
    for outcome in outcomes:
        if not outcome.discriminates:
            said = f"\n{outcome.output}" if outcome.output else ""
            faults.append(
                f"{outcome.patch}: guard {outcome.guard} {outcome.fault}. "
                f"Alone: nox -s guards -- {which}{outcome.patch.removesuffix('.patch')}{said}"
            )
    faults += also
    if faults:
        raise GuardError("\n".join(faults))
