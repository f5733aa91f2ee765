"""The one way to git, over GitPython, with the user's configuration shut out.

No system, global or ambient setting reaches a command: no am.threeWay, hooks, signing, autocrlf, diff
drivers or GIT_* variables. Before the first command that writes, the repository's top level is checked:
git would otherwise walk up into somebody else's, or go where its configuration points.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

os.environ["GIT_PYTHON_REFRESH"] = "quiet"  # a missing git is an error of the first command, in our words

import git as gitpython

from scripts.base.errors import SeriesError
from scripts.base.process import last_lines, quoted

if TYPE_CHECKING:
    from scripts.base.errors import BuildError

# Variables such as GIT_DIR would send a command elsewhere; GitPython can set variables but not unset them.
for _name in [
    name
    for name in os.environ
    if name.startswith("GIT_")
    and name not in ("GIT_SSL_CAINFO", "GIT_PYTHON_GIT_EXECUTABLE", "GIT_PYTHON_REFRESH")
]:
    del os.environ[_name]

IDENTITY = "flash-attention-deterministic <patches@flash-attention-deterministic.invalid>"
EPOCH = "2025-01-01T00:00:00+0000"
_NAME, _EMAIL = IDENTITY.rstrip(">").split(" <")

BRANCH = "series"  # which a new repository begins with

_CONFIG = {
    "core.autocrlf": "false",
    "core.eol": "lf",
    "core.safecrlf": "false",
    "core.filemode": "true",
    "core.abbrev": "12",
    "core.bigFileThreshold": "512m",
    "core.attributesFile": os.devnull,
    "core.excludesFile": os.devnull,
    "core.hooksPath": os.devnull,
    "core.fsmonitor": "false",
    "commit.gpgSign": "false",
    "gc.auto": "0",
    "am.threeWay": "false",
    "apply.whitespace": "nowarn",
    "diff.algorithm": "histogram",
    "diff.renames": "false",
    "diff.noprefix": "false",
    "diff.mnemonicPrefix": "false",
    "diff.context": "3",
    "diff.interHunkContext": "0",
    "diff.suppressBlankEmpty": "false",
    "format.signOff": "false",
    "format.useAutoBase": "false",
    "init.defaultBranch": BRANCH,
    "merge.conflictStyle": "diff3",
    "merge.directoryRenames": "conflict",
    "merge.renames": "true",
    "rerere.enabled": "false",
    "advice.detachedHead": "false",
    # The repositories here are ours whoever owns their folder (containers mount them as another user).
    "safe.directory": "*",
}


def _environment() -> dict[str, str]:
    environment = {
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_SYSTEM": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_AUTHOR_NAME": _NAME,
        "GIT_AUTHOR_EMAIL": _EMAIL,
        "GIT_AUTHOR_DATE": EPOCH,
        "GIT_COMMITTER_NAME": _NAME,
        "GIT_COMMITTER_EMAIL": _EMAIL,
        "GIT_COMMITTER_DATE": EPOCH,
        "GIT_EDITOR": "false",
        "GIT_CONFIG_COUNT": str(len(_CONFIG)),
        "LC_ALL": "C",
        "TZ": "UTC",
    }
    for i, (key, value) in enumerate(_CONFIG.items()):
        environment |= {f"GIT_CONFIG_KEY_{i}": key, f"GIT_CONFIG_VALUE_{i}": value}
    return environment


def flaw(patch: Path) -> str:
    """What git finds wrong in a patch's diff, as ``corrupt patch at line 39``; empty if it can read it."""
    status, _, err = Repository(patch.parent, SeriesError)._execute(
        "apply", "--numstat", str(patch.resolve())
    )
    return "" if status == 0 else err.strip().removeprefix("error: ")


class Repository:
    """One work tree. Every command runs at its top level."""

    def __init__(self, root: Path, error: type[BuildError]) -> None:
        self.root = root.resolve()
        self._error = error
        self._is_own = False  # not known yet
        self._git = gitpython.Git(str(self.root))
        self._git.update_environment(**_environment(), GIT_CEILING_DIRECTORIES=str(self.root.parent))

    @classmethod
    def create(cls, root: Path, error: type[BuildError]) -> Repository:
        """Make a folder a repository of its own."""
        repository = cls(root, error)
        repository.run("init", "--quiet", "--template=", writes=False)
        return repository

    def shared_copy(self, root: Path) -> Repository:
        """Make a repository that reads this one's objects and has its tags; nothing is checked out.

        ``git clone --shared`` would do, but for a shallow one, of which it copies what branches have.
        """
        root.mkdir(parents=True)
        copy = Repository.create(root, self._error)
        paths = ("--git-path", "objects", "--git-path", "shallow")
        objects, shallow = (
            self.root / name for name in self.run("rev-parse", *paths, writes=False).splitlines()
        )
        alternates = copy.root / ".git/objects/info/alternates"
        alternates.write_text(f"{objects}\n", encoding="utf-8")
        if shallow.is_file():
            (copy.root / ".git/shallow").write_bytes(shallow.read_bytes())
        copy.run("fetch", "--quiet", str(self.root), "+refs/tags/*:refs/tags/*")
        return copy

    def is_top_level(self) -> bool:
        """Whether this folder is there and a repository itself, rather than a folder inside one."""
        if not self.root.is_dir():
            return False
        status, out, _ = self._execute("rev-parse", "--show-toplevel")
        return status == 0 and Path(out).resolve() == self.root

    def _require_own(self, command: str) -> None:
        """Refuse to write where no repository is, or another's. Git is asked once, before the first write."""
        self._is_own = (self._is_own and (self.root / ".git").exists()) or self.is_top_level()
        if not self._is_own:
            raise self._error(
                f"{self.root} is not the top level of a git repository: git {command} would act on "
                "another one."
            )

    def run(self, *arguments: str, writes: bool = True, stdin: Path | None = None) -> str:
        """Run git and return its standard output; raise the repository's error with both streams."""
        if writes:
            self._require_own(arguments[0])
        with stdin.open("rb") if stdin else nullcontext() as stream:
            status, out, err = self._execute(*arguments, stdin=stream)
        if status != 0:
            raise self._error(
                f"{quoted(['git', '-C', str(self.root), *arguments])} exited with "
                f"{status}.\n{last_lines(err or out)}"
            )
        return str(out)

    def raw(self, *arguments: str, stdin: Path | None = None) -> bytes:
        """The bytes that a git command that writes nothing prints."""
        with stdin.open("rb") if stdin else nullcontext() as stream:
            status, out, err = self._execute(*arguments, raw=True, stdin=stream)
        if status != 0:
            raise self._error(
                f"{quoted(['git', '-C', str(self.root), *arguments])} exited with "
                f"{status}.\n{last_lines(err)}"
            )
        return bytes(out)

    def read(self, name: str) -> bytes:
        """The bytes of a blob, such as ``HEAD:setup.py``."""
        return self.raw("cat-file", "blob", name)

    def find(self, name: str) -> bytes | None:
        """The bytes of a blob, or None where there is none; many are read by one process."""
        try:
            return bytes(self._git.get_object_data(name)[3])
        except ValueError:
            return None

    def files(self, tree: str, *paths: str) -> list[str]:
        """The files of a commit or tree."""
        return [
            name
            for name in self.run("ls-tree", "-r", "-z", "--name-only", tree, *paths, writes=False).split("\0")
            if name
        ]

    def resolve(self, name: str) -> str:
        """The object id of a name, such as ``HEAD`` or ``HEAD:csrc``."""
        return self.run("rev-parse", "--verify", "--quiet", name, writes=False).strip()

    def commits(self, base: str, tip: str = "HEAD") -> list[str]:
        """The commits after ``base`` up to ``tip``, oldest first."""
        return self.run("rev-list", "--reverse", "--topo-order", f"{base}..{tip}", writes=False).split()

    def discard(self, commit: str = "HEAD") -> None:
        """Make the work tree this commit's, whatever lies in it."""
        self.run("reset", "--quiet", "--hard", commit)
        self.run("clean", "--quiet", "--force", "-d", "-x")

    def diff_of(self, commit: str) -> bytes:
        """A commit's diff alone, with renamed files as one gone and one new."""
        return self.raw("show", "--format=", "--no-renames", "--no-ext-diff", commit)

    def attempt(self, *arguments: str) -> tuple[int, str, str]:
        """Run git and return status, standard output and standard error, whatever they are."""
        self._require_own(arguments[0])
        return self._execute(*arguments)

    def _execute(
        self, *arguments: str, raw: bool = False, stdin: BinaryIO | None = None
    ) -> tuple[int, Any, str]:
        if not self.root.is_dir():
            raise self._error(f"{self.root} is no folder: git {arguments[0]} cannot run there.")
        try:
            status, out, err = self._git.execute(
                ["git", *arguments],
                with_extended_output=True,
                with_exceptions=False,
                stdout_as_string=not raw,
                strip_newline_in_stdout=not raw,
                istream=stdin,
            )
        except gitpython.GitCommandNotFound as e:
            raise self._error(
                "git is not installed, or not on PATH (Debian, Ubuntu: apt install git)."
            ) from e
        return int(status), out, str(err)
