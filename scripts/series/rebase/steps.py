"""Move the series to another release: stop where a person must look, go on, skip, abort; lose nothing.

The state lies in ``build/rebase/state.json``, replaced whole after every patch; the repository beside it
keeps the old series under refs/series/backup. A run that was killed goes on with ``--continue``.
patches/, the pin and CHANGES.md change only at the end, when every patch has moved, is well-formed and
keeps its guard.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.base import console, files
from scripts.base.errors import ActionNeeded, SeriesError, UsageError
from scripts.base.git import Repository
from scripts.series import tree as work_tree
from scripts.series import unfinished
from scripts.series.marker import pin_key
from scripts.series.rebase import end as rebase_end
from scripts.series.rebase import help as rebase_help
from scripts.series.rebase import new_upstream as rebase_upstream
from scripts.series.rebase import remembered, resolution
from scripts.series.rebase.folder import Folder, refuse_gone
from scripts.series.rebase.state import ABORT, GO_ON, MATRIX_AND_CHANGES, SKIP, Done, Report, State, under_way
from scripts.series.upstream import landed, move

if TYPE_CHECKING:
    from scripts.series import guards, model
    from scripts.source.matrix import Matrix
    from scripts.source.matrix_tables import UpstreamTable
    from scripts.source.releases import Release
    from scripts.source.upstream import Checkout


class Rebase:
    """One rebase, in its folder."""

    def __init__(self, root: Path, folder: Path, compiler: guards.Compiler | None = None) -> None:
        self._compiler = compiler
        self.folder = Folder(root, folder)

    @property
    def under_way(self) -> bool:
        """Whether there is one."""
        return under_way(self.folder.path)

    # --- commands ---

    def start(self, matrix: Matrix, patches: model.Series, checkout: Checkout, release: Release) -> Report:
        """Begin, and go as far as nobody is needed."""
        if self.under_way:
            raise UsageError(f"a rebase is under way: {GO_ON}, {SKIP}, or {ABORT}.")
        if pin_key(release.pin) == pin_key(matrix.upstream):
            raise UsageError(f"the series stands on {release.name} already.")
        head = _committed(self.folder.root, matrix.table)
        path = self.folder.path
        shutil.rmtree(path, ignore_errors=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        work_tree.sweep(path)
        begun = Path(tempfile.mkdtemp(dir=path.parent, prefix=work_tree.temporary_prefix(path)))
        try:
            space = move.workspace(
                begun / self.folder.source.name, patches, matrix.upstream, checkout, release
            )
            state = State(
                upstream=matrix.name,
                series=matrix.table.series,
                own=matrix.table.own,
                own_files=patches.own.digests,
                old_pin=matrix.upstream,
                new_pin=release.pin,
                old_base=space.old_base,
                new_base=space.new_base,
                tip=space.tip,
                patches={p.name: p.sha256 for p in patches.patches},
                landed={
                    name: (outcome.value, evidence)
                    for name, (outcome, evidence) in landed.landed(space, patches.patches).items()
                },
                started=head,
            )
            files.write(begun / self.folder.state_path.name, state.as_text())
            begun.replace(path)
        finally:
            shutil.rmtree(begun, ignore_errors=True)
        rebase_upstream.tell(self.folder, self.folder.load())
        return self._walk(self.folder.load())

    def proceed(self) -> Report:
        """Go on, with what a person made of the patch that stopped it."""
        state = self.folder.load()
        if state.stopped or self._picking(state):
            state = self._take_resolution(state)
        elif len(state.done) < len(state.patches):
            self._clear(state)
        return self._walk(state)

    def use_remembered(self) -> Report:
        """Take the resolutions that are remembered of the patch that stopped it, and go on."""
        state = self.folder.load()
        if not state.stopped:
            raise UsageError(f"no patch stopped the rebase; {GO_ON}, or {ABORT}.")
        if left := remembered.take(self.folder.resolutions, self.folder.stop(state)):
            raise ActionNeeded(
                f"what is remembered was taken; {', '.join(left)} still has a conflict. "
                f"Edit the files in {self.folder.source}, then {GO_ON}."
            )
        return self.proceed()

    def skip(self, reason: str) -> Report:
        """Leave the patch out that stopped it; the reason goes into ``series``."""
        state = self.folder.load()
        if not state.stopped:
            raise UsageError(f"no patch stopped the rebase; {GO_ON}, or {ABORT}.")
        if not reason.strip():
            raise UsageError(f"a patch is skipped for a reason: {SKIP}.")
        if needing := rebase_help.dependents(self.folder, state):
            console.warn(f"later patches need the one that is left out: {', '.join(needing)}")
        self._clear(state)  # also of a commit that was made of it already
        name, commit = self.folder.next_patch(state)
        outcome, evidence = state.landed.get(name, ("skipped", ""))
        done = Done(
            patch=name,
            outcome=outcome,
            commit=commit,
            reason=" ".join(reason.split()),
            evidence=(evidence,) if evidence else (),
        )
        state = self.folder.save(state.with_done(done))
        _tell(state)
        return self._walk(state)

    def abort(self) -> str:
        """Drop the rebase; what it may have written by then is put back."""
        path = self.folder.path
        if not path.exists():
            raise UsageError("no rebase is under way.")
        left_alone = (path / "before").is_dir() and not rebase_end.put_back(self.folder)
        kept = path.with_name(path.name + "-aborted")
        shutil.rmtree(kept, ignore_errors=True)
        path.replace(kept)
        where = f"What was resolved stays in {kept / self.folder.source.name} until the next one is dropped."
        if left_alone:
            return (
                "The rebase is dropped. What it had begun to write has changed since, or its state is "
                f"damaged, and was left alone: look at git diff. {where}"
            )
        return f"The rebase is dropped; patches/ and wheel_matrix.toml are as they were. {where}"

    # --- steps ---

    def _take_resolution(self, state: State) -> State:
        """Record what a person made of the next patch, and remember it for other rebases."""
        stop = self.folder.stop(state)
        there = [name for name in self.folder.gone(state) if (self.folder.source / name).is_file()]
        refuse_gone(self.folder, state, there, stopped=True)
        head = resolution.take(stop)
        remembered.remember(self.folder.resolutions, stop, head)
        state = self.folder.save(state.with_done(Done(patch=stop.name, outcome="resolved", commit=head)))
        _tell(state)
        return state

    def _picking(self, state: State) -> bool:
        """Whether a kill came between a conflict and its record: a person may have worked on it since."""
        if len(state.done) == len(state.patches):
            return False
        status, head, _ = self.folder.repository.attempt(
            "rev-parse", "--verify", "--quiet", "CHERRY_PICK_HEAD"
        )
        return status == 0 and head.strip() == self.folder.next_patch(state)[1]

    def _clear(self, state: State) -> None:
        """The work tree as it was after the last patch that was recorded."""
        repository = self.folder.repository
        (self.folder.source / ".git/index.lock").unlink(missing_ok=True)
        repository.attempt("cherry-pick", "--quit")
        repository.discard(state.head)

    def _walk(self, state: State) -> Report:
        space = self.folder.space(state)
        repository = space.repository
        while len(state.done) < len(state.patches):
            name, commit = self.folder.next_patch(state)
            known = state.landed.get(name)
            step = move.pick(space, commit)
            judged = move.judge(name, step, (move.Outcome(known[0]), known[1]) if known else None)
            is_open = unfinished.is_picking(self.folder.source)
            if is_open or judged.outcome in (move.Outcome.LANDED_IDENTICAL, move.Outcome.LANDED_MODIFIED):
                if not is_open:
                    repository.run("reset", "--quiet", "--hard", state.head)
                self.folder.save(state.but(stopped=True))
                raise ActionNeeded(rebase_help.why(self.folder, state, judged))
            done = Done(
                patch=name,
                outcome=judged.outcome.value,
                commit=repository.resolve("HEAD"),
                evidence=judged.evidence,
            )
            state = self.folder.save(state.with_done(done))
            _tell(state)
        return rebase_end.finish(self.folder, state, self._compiler)


def _committed(root: Path, table: UpstreamTable) -> str:
    """The commit of this repository; empty where there is none.

    Raises:
        SeriesError: what a rebase writes is not in its history, so that git could not take the rebase back.
    """
    repository = Repository(root, SeriesError)
    if not repository.is_top_level():
        return ""
    written = (table.series, *([table.own] if table.own else []), *MATRIX_AND_CHANGES)
    if changed := repository.run("status", "--porcelain", "--", *written, writes=False).rstrip():
        raise SeriesError(
            f"{root} has changes that are not committed:\n{changed}\n"
            "Commit them first, so that git can take the rebase back."
        )
    return repository.attempt("rev-parse", "--verify", "--quiet", "HEAD")[1].strip()


def _tell(state: State) -> None:
    """The patch that was dealt with last, and how many are."""
    done = state.done[-1]
    what = "skipped" if done.reason else done.outcome
    console.note(f"{len(state.done)}/{len(state.patches)} {done.patch}: {what}")
