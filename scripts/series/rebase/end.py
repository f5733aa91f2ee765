"""The end of a rebase: check the moved series, write it and report; or put all of it back.

Its pin and CHANGES.md are written with it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.base import files
from scripts.base.errors import ActionNeeded, GuardError, SeriesError
from scripts.base.fetch import sha256
from scripts.series import (
    affected_kernels,
    changes,
    export,
    features,
    formatting,
    ground,
    guards,
    lint,
    lint_features,
    model,
    own_tree,
    uncommitted,
    unfinished,
    whole,
)
from scripts.series import own as own_files
from scripts.series import tree as work_tree
from scripts.series.rebase import folder as rebase_folder
from scripts.series.rebase import new_upstream as rebase_upstream
from scripts.series.rebase.state import ABORT, GO_ON, MATRIX_AND_CHANGES, Report, State
from scripts.source import kernel_set, pin
from scripts.source import matrix as matrix_model

if TYPE_CHECKING:
    from collections.abc import Iterable

    from scripts.series.rebase.folder import Folder


def _digest(path: Path) -> str:
    return sha256(path) if path.is_file() else ""


def finish(folder: Folder, state: State, compiler: guards.Compiler | None) -> Report:
    """Write the moved series, when it is well-formed and its guards hold; the report.

    The rebase's folder goes.

    Raises:
        ActionNeeded: a person must amend something first; nothing was written unless the message says so.
    """
    repository = folder.repository
    operation = unfinished.in_progress(folder.source) or uncommitted.changes(repository)
    if operation:
        raise ActionNeeded(
            f"{folder.source} is not finished ({operation}); commit or finish it there, then {GO_ON}."
        )
    there = _split(folder, state)
    _gate(folder, state, there, compiler)
    _sweep(folder, state)
    _require_untouched(folder, state)
    if not state.moved:
        _keep_before(folder)
        state = state.but(gitlink=pin.gitlink(folder.root))
    submodule = _write(folder, state, there)
    report = _report(folder, folder.load(), submodule)
    reports = folder.root / "build/reports"
    reports.mkdir(parents=True, exist_ok=True)
    name = f"rebase-{report.old}-to-{report.new}.json"
    files.write(reports / name, json.dumps(report.as_json(), indent=1) + "\n")
    rebase_folder.remove(folder)
    return report


def _split(folder: Folder, state: State) -> formatting.Split:
    """The moved patches, all that were not skipped, and our own files as they are with them."""
    repository, own = folder.repository, None
    if state.own:
        rebase_folder.refuse_gone(folder, state, repository.files("HEAD"), stopped=False)
    try:
        if state.own:
            theirs = repository.files(ground.upstream_of(repository, state.new_base))
            own = own_tree.in_commit(repository, theirs, "HEAD", state.new_pin.package)
        there = formatting.split(repository, state.new_base, own)
    except SeriesError as e:
        raise ActionNeeded(
            f"{e}\n  amend it in {folder.source} (git rebase -i {state.new_base[:12]}), then {GO_ON}; "
            f"or {ABORT}"
        ) from e
    expected = [d.patch for d in state.done if not d.reason]
    if len(there.patches) != len(expected):
        raise ActionNeeded(
            f"{folder.source} holds {len(there.patches)} patches on the new base, and {len(expected)} were "
            f"moved: {', '.join(expected)}. Put them back (git reflog), then {GO_ON}. A patch is left "
            f"out by --skip, or after the rebase; or {ABORT}."
        )
    if not there.patches:
        raise SeriesError(f"no patch is left; {ABORT}.")
    return there


def _gate(folder: Folder, state: State, there: formatting.Split, compiler: guards.Compiler | None) -> None:
    """Refuse a series that is malformed, or whose guards or checks of the whole tree fail."""
    with tempfile.TemporaryDirectory(dir=folder.path, prefix="check-") as temporary:
        candidate = Path(temporary) / "patches"
        export.write_folder(candidate, there.patches)
        moved = model.read(candidate)
        problems = [str(p) for p in lint.check(candidate, state.new_pin.package)]
        if state.own:
            ours = own_files.OwnFiles(folder.root / state.own, there.own)
            problems += map(str, lint_features.check(ours, moved))
        try:
            commits = work_tree.Commits(folder.source, there.base, there.tip)
            told = features.read(folder.root / state.own) if state.own else None
            lacking = whole.faults(whole.run(told, commits))
            guards.require(guards.run(moved, commits, compiler), also=lacking)
        except (GuardError, SeriesError) as e:
            problems += str(e).splitlines()
    problems += rebase_upstream.unknown_kernels(folder, state)
    if problems:
        listed = "\n".join("    " + p.replace(f"{candidate}/", "") for p in dict.fromkeys(problems))
        raise ActionNeeded(
            f"every patch has moved, and the series is not yet good:\n{listed}\n"
            f"  what {state.new_pin.version} changed: git -C {folder.source} diff {state.old_base[:12]} "
            f"{state.new_base[:12]} -- FILE\n"
            f"  amend the commits in {folder.source} (git rebase -i {state.new_base[:12]}), then {GO_ON}; "
            f"or {ABORT}"
        )


def _require_untouched(folder: Folder, state: State) -> None:
    """Refuse to write over patches that changed since the rebase began."""
    patches = folder.root / state.series
    if model.digests(patches) not in (state.patches, state.moved or state.patches):
        back = f"git restore --source={state.started[:12] or 'COMMIT'} --staged --worktree {patches}"
        raise ActionNeeded(
            f"{patches} changed since the rebase began; put it back ({back}), then {GO_ON}; or {ABORT}."
        )
    before = state.own_files
    here = own_files.read(folder.root / state.own).digests if state.own else {}
    written = {name: state.wrote.get(f"{state.own}/{name}", "") for name in state.own_changed}
    changed = [
        name
        for name in sorted({*here, *before, *written})
        if here.get(name, "") not in (before.get(name, ""), written.get(name, before.get(name, "")))
    ]
    if changed:
        raise ActionNeeded(
            f"{state.own} changed since the rebase began: {', '.join(changed)}; put that back "
            f"(git restore {state.own}), "
            f"then {GO_ON}; or {ABORT}."
        )


def _keep_before(folder: Folder) -> None:
    """Copies of what the end of a rebase writes, for --abort."""
    copies = Path(tempfile.mkdtemp(dir=folder.path, prefix="before."))
    for name in ("patches", "fork"):
        if (folder.root / name).is_dir():
            files.copy_tree(folder.root / name, copies / name)
    for name in MATRIX_AND_CHANGES:
        if (folder.root / name).is_file():
            shutil.copyfile(folder.root / name, copies / name)
    # Of a run that was killed before it wrote anything.
    shutil.rmtree(folder.path / "before", ignore_errors=True)
    copies.replace(folder.path / "before")


def _write(folder: Folder, state: State, there: formatting.Split) -> str:
    """Write all in its place: patches, own files, pin, CHANGES.md; what became of the submodule."""
    root = folder.root
    dropped = [f"# not since {state.new_pin.version}: {d.patch}: {d.reason}" for d in state.done if d.reason]
    after = _prepared(folder, state, there, dropped)
    # Noted before it is written, so that --abort takes back this and nothing that a person wrote since.
    earlier = state.wrote  # of a run that did not end; its patches may have been amended since
    moved = {name: hashlib.sha256(content).hexdigest() for name, content in there.patches.items()}
    if state.own:
        state = state.but(own_changed=tuple(sorted({*_merged(state, there).changes, *state.own_changed})))
    wrote = {name: _digest(after / name) for name in state.beside}
    state = folder.save(state.but(moved=moved, wrote=wrote, aborting=False))
    for name in state.beside:
        known = (_digest(folder.path / "before" / name), earlier.get(name), state.wrote[name])
        if _digest(root / name) not in known:
            raise ActionNeeded(
                f"{root / name} changed since the rebase began to write; take that back, then {GO_ON}; "
                f"or {ABORT}."
            )
    try:
        export.write_folder(root / state.series, there.patches, dropped)
        _put(root, after, state.beside[1:])  # without the listing of the patches
        return pin.write_gitlink(root, matrix_model.load(root / "wheel_matrix.toml").of(state.upstream))
    except OSError as e:
        what = f"{e.filename}: {e.strerror}, while {state.written} were written"
        raise ActionNeeded(f"{what}: some are, some are not. Mend that, then {GO_ON}; or {ABORT}") from e


def _merged(state: State, there: formatting.Split) -> own_files.Merged:
    """What the rebase changed in our own files since it began."""
    made = own_files.OwnFiles(None, there.own).digests
    return own_files.merge(state.own_files, state.own_files, made)


def _put(root: Path, kept: Path, names: Iterable[str]) -> None:
    """Make files what copies of them are; where there is no copy, one goes, and before any is written.

    What is so already is not touched: it may be read-only.
    """
    others = [name for name in names if _digest(root / name) != _digest(kept / name)]
    for name in sorted(others, key=lambda name: (kept / name).is_file()):
        if not (kept / name).is_file():
            own_files.remove(root, name)
            continue
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        files.write_bytes(root / name, (kept / name).read_bytes())


def _sweep(folder: Folder, state: State) -> None:
    """Remove what a run that was killed left aside while it wrote."""
    work_tree.sweep(folder.root / state.series)
    for name in state.beside:
        if (part := folder.root / f"{name}.part").is_file():
            part.unlink()


def _prepared(folder: Folder, state: State, there: formatting.Split, dropped: list[str]) -> Path:
    """What the end of a rebase writes, in a folder like ``before``."""
    after = folder.path / "after"
    shutil.rmtree(after, ignore_errors=True)
    files.copy_tree(folder.path / "before", after)
    export.write_folder(after / state.series, there.patches, dropped)
    if state.own:
        own_files.write_back(after / state.own, there.own, _merged(state, there), state.own_files)
        if (table := features.table_of(folder.root / state.own)).is_file():  # as it is now
            shutil.copyfile(table, features.table_of(after / state.own))
    pin.write(matrix_model.load(after / "wheel_matrix.toml").of(state.upstream), state.new_pin)
    matrix = matrix_model.load(after / "wheel_matrix.toml")
    changes.write(after / "CHANGES.md", changes.render(matrix, after))
    return after


def _report(folder: Folder, state: State, submodule: str) -> Report:
    """What was done since the rebase began, in however many runs."""
    repository = folder.repository
    written = export.changed(
        export.held(folder.path / "before" / state.series), export.held(folder.root / state.series)
    )
    old, new = f"{state.old_base}..{state.tip}", f"{state.new_base}..HEAD"
    range_diff = repository.run("range-diff", "--no-color", "--creation-factor=90", old, new, writes=False)
    touched = affected_kernels.kernels(repository, state.tip, repository.resolve("HEAD"))
    return Report(
        old=state.old_pin.version,
        new=state.new_pin.version,
        done=state.done,
        range_diff=range_diff,
        kernels=tuple(k.name for k in touched),
        series=tuple(state.moved),
        kernel_words=",".join(kernel_set.spell_kernels(touched)) if touched else "",
        submodule=submodule,
        written=written.written,
        removed=written.removed,
        own=state.own_changed,
        upstream=rebase_upstream.changes(folder, state),
    )


def put_back(folder: Folder) -> bool:
    """Undo what the end of a rebase wrote, unless somebody changed it since; whether it was undone."""
    before = folder.path / "before"
    try:
        state = folder.load()
    except SeriesError:
        return False
    patches = folder.root / state.series
    kept = [name for name in state.beside if (before / name).is_file() or name in state.wrote]
    if not state.aborting:  # by a run that was interrupted
        if model.digests(patches) not in (state.patches, state.moved):
            return False
        if any(
            _digest(folder.root / name) not in (_digest(before / name), state.wrote.get(name))
            for name in kept
        ):
            return False
        folder.save(state.but(aborting=True))
    export.write_folder(
        patches, {name: (before / state.series / name).read_bytes() for name in state.patches}
    )
    _sweep(folder, state)
    _put(folder.root, before, kept)
    if pin.gitlink(folder.root) == state.new_pin.commit != state.gitlink:
        pin.stage_gitlink(folder.root, state.gitlink)
    return True
