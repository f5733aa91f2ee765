"""What upstream changed between two releases, as documents keep it."""

from __future__ import annotations

from typing import Literal

from scripts.base.documents import Document

Place = tuple[str, str]  # a file and a function's name in it


def folder(package: str | None) -> str:
    """Whose files are told of: a python upstream's package, or the sources of a compiled one's kernels."""
    return package or "csrc/flash_attn"


class Listing(Document):
    """Names of one kind that came, went or changed."""

    added: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.added or self.gone or self.changed)


class Signature(Document):
    """A function that others call, whose parameters are not the same."""

    function: str  # as it is called, such as flash_attn_2_cuda.varlen_fwd
    file: str
    old: tuple[str, ...] | None  # None: there was none
    new: tuple[str, ...] | None  # None: it is gone
    patches: tuple[str, ...]  # that change the function
    own: dict[str, tuple[str, ...]]  # of these, the ones that give it parameters too, and which
    named: tuple[str, ...]  # the patches that name it in lines that they add: they may call it

    @property
    def what(self) -> str:
        """What became of it, in words."""
        if self.old is None or self.new is None:
            return "is new" if self.old is None else "is gone"
        if self.new[: len(self.old)] == self.old:
            return f"grew at its end: {', '.join(self.new[len(self.old) :])}"
        came = [name for name in self.new if name not in self.old]
        went = [name for name in self.old if name not in self.new]
        words = [f"{sign}{name}" for sign, names in (("+", came), ("−", went)) for name in names]
        return f"changed: {', '.join(words) or 'another order'}"


class Relied(Document):
    """A function that a patch relies on, and that the other release has otherwise or no more."""

    patch: str
    how: Literal["changes", "names"]  # the patch has lines in it, or names it in lines that it adds
    file: str
    function: str
    became: Literal["changed", "gone"]
    commits: tuple[str, ...] = ()  # of upstream's that changed it, newest first, where git has them

    @property
    def place(self) -> Place:
        """Of the function."""
        return self.file, self.function


class UpstreamChanges(Document):
    """All of it."""

    files: Listing  # of csrc/flash_attn, or of a python upstream's package
    sources: Listing  # that setup.py compiles
    flags: Listing  # that it compiles them with
    manifest: Listing  # lines of MANIFEST.in
    unknown_kernels: tuple[str, ...]  # kernel files that scripts/source/kernel_set.py does not know
    signatures: tuple[Signature, ...]
    relied: tuple[Relied, ...]  # functions that patches change or name, and whose text is another
