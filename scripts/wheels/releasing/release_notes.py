"""What a release says of itself: its tag, the release before, and notes from CHANGES.md of both."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import tomlkit
from tomlkit.exceptions import TOMLKitError

from scripts.base.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from scripts.base.git import Repository
    from scripts.source.matrix import Matrix
    from scripts.source.matrix_tables import UpstreamTable

CHANGES = "CHANGES.md"
_END = (
    "Each wheel's proof, and how it was built, lie beside it. `docs/installing.md` says how to install one, "
    "`docs/trust.md` how to check one, and `CHANGES.md` what differs from upstream."
)


@dataclass(frozen=True)
class Part:
    """What CHANGES.md says of one upstream."""

    version: str
    patches: dict[str, str]  # the text of each, by its subject


def tag_of(matrix: Matrix) -> str:
    """The tag of a release: the version of the first upstream's wheels, without CUDA."""
    return f"v{matrix.of(None).version()}"


def previous(repository: Repository, tag: str) -> str | None:
    """The newest tag up to this commit that is not this release's; None: there is none."""
    listed = repository.run("tag", "--list", "v*", "--merged", "HEAD", "--sort=-creatordate", writes=False)
    return next((name for name in listed.split() if name != tag), None)


def check_revision(repository: Repository, matrix: Matrix) -> None:
    """A release's number says which series it has.

    Raises:
        UsageError: the tag is another commit's, or the release before has this number and another series.
    """
    tag = tag_of(matrix)
    status, tagged, _ = repository.attempt("rev-parse", "--verify", "--quiet", f"refs/tags/{tag}^{{commit}}")
    if status == 0 and tagged.strip() != repository.resolve("HEAD"):
        raise UsageError(
            f"{tag} is another commit ({tagged.strip()[:12]}). A tag is not moved: raise revision in "
            f"{matrix.path.name}."
        )
    before = previous(repository, tag)
    if before is None:
        return
    said = parts(_text(repository, before))
    for loaded in matrix.each():
        told = said.get(loaded.upstream.distribution)
        other = " and ".join(_others(repository, before, loaded.table))
        if told is None or told.version != loaded.upstream.version or not other:
            continue
        if _revision(repository, before, loaded.name) == loaded.table.revision:
            raise UsageError(
                f"{matrix.path.name}: {loaded.name} has revision {loaded.table.revision}, as {before} has, "
                f"and {other}. Raise it."
            )


def _others(repository: Repository, before: str, table: UpstreamTable) -> Iterator[str]:
    """What of an upstream is not as it was in another commit: its patches, its own files."""
    for folder, what in ((table.series, "is another series"), (table.own, "has other files")):
        here, there = (_trees(repository, name, folder) if folder else "" for name in ("HEAD", before))
        if here != there:
            yield f"{folder} {what}"


def _trees(repository: Repository, commit: str, folder: str) -> str:
    return repository.run("ls-tree", "-r", commit, "--", folder, writes=False)


def _revision(repository: Repository, commit: str, upstream: str) -> int | None:
    """The number of an upstream's series in another commit; None where its matrix has none of that name."""
    try:
        told = tomlkit.parse(repository.find(f"{commit}:wheel_matrix.toml") or b"").unwrap()
        return int(told["upstreams"][upstream]["revision"])
    except (TOMLKitError, KeyError):
        return None


def _text(repository: Repository, commit: str) -> str:
    return (repository.find(f"{commit}:{CHANGES}") or b"").decode("utf-8")


def parts(text: str) -> dict[str, Part]:
    r"""What a CHANGES.md says, by distribution. A patch is told below its feature; once it stood alone.

    >>> parts("# Changes\n\n## a 1.0\n\nWhere.\n\n### One\n\nWhy.\n")
    {'a': Part(version='1.0', patches={'One': 'Why.'})}
    >>> parts("## a 1.0\n\n### feature\n\nIt.\n\n#### One\n\nWhy.\n\n### other\n")["a"].patches
    {'One': 'Why.'}
    """
    found = {}
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        level = "####" if "\n#### " in section else "###"
        head, *patches = re.split(rf"^{level} ", section, flags=re.MULTILINE)
        name, _, version = head.partition("\n")[0].partition(" ")
        told = (patch.partition("\n### ")[0].partition("\n") for patch in patches)
        found[name] = Part(version, {subject: body.strip() for subject, _, body in told})
    return found


def notes(repository: Repository, matrix: Matrix) -> str:
    """The notes of the release of this commit, in Markdown."""
    tag = tag_of(matrix)
    before = previous(repository, tag)
    old, new = (parts(_text(repository, name)) if name else {} for name in (before, "HEAD"))
    lines = [f"Since {before}." if before else "The first release.", ""]
    for loaded in matrix.each():
        name = loaded.upstream.distribution
        now, then = new.get(name, Part("", {})), old.get(name)
        lines += [f"## {name} {loaded.version()}", "", *_of(now, then), ""]
    return "\n".join([*lines, _END]) + "\n"


def _of(now: Part, then: Part | None) -> Iterator[str]:
    """What is new of one upstream."""
    if then is None:
        yield f"On upstream's {now.version}: {_count(now)}."
        yield ""
        yield from (f"- {subject}" for subject in now.patches)
        return
    moved = "as before" if now.version == then.version else f"was {then.version}"
    yield f"On upstream's {now.version} ({moved}): {_count(now)}."
    groups = {
        "New": [s for s in now.patches if s not in then.patches],
        "Said anew": [s for s in now.patches if s in then.patches and now.patches[s] != then.patches[s]],
        "Gone": [s for s in then.patches if s not in now.patches],
    }
    for title, subjects in groups.items():
        if subjects:
            yield from ("", f"### {title}", "")
            yield from (_told(subject, now.patches.get(subject, "")) for subject in subjects)


def _count(part: Part) -> str:
    return f"{len(part.patches)} patch{'' if len(part.patches) == 1 else 'es'}"


def _told(subject: str, body: str) -> str:
    """A patch in a list: its subject, and its message's first paragraph."""
    first = " ".join(body.partition("\n\n")[0].split())
    return f"- **{subject}**" + (f": {first}" if first else "")
