"""Edit one patch in the work tree: stop there, take the changes into its commit, replay the later patches.

The branch stays on the old series until the end, and every step is noted before the next, so that a kill
loses nothing and ``--abort`` goes back to exactly what was.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from scripts.base import console
from scripts.base.errors import ActionNeeded, SeriesError, UsageError
from scripts.base.git import Repository
from scripts.series import (
    edit_state,
    export,
    formatting,
    kept_commits,
    marker,
    model,
    uncommitted,
    unfinished,
)
from scripts.series.edit_state import Edit, Words
from scripts.series.places import command
from scripts.series.rebase import help as rebase_help
from scripts.series.rebase import remembered, resolution
from scripts.series.upstream import move

_BEFORE = "refs/series/before-edit"  # HEAD of the last edit's beginning


def usable(root: Path, patches: Path) -> bool:
    """Whether a tree with commits that are in no patch yet can be edited on, as after another edit."""
    applied = marker.read_marker(root) if root.is_dir() else None
    if applied is None or not applied.pin or unfinished.in_words(root):
        return False
    repository = Repository(root, SeriesError)
    return (
        repository.resolve("HEAD") != applied.commit
        and len(applied.patches) == applied.of
        and model.digests(patches) == applied.patches
        and repository.attempt("merge-base", "--is-ancestor", applied.base, "HEAD")[0] == 0
        and len(repository.commits(applied.base)) >= len(applied.patches)
        and not uncommitted.changes(repository)
    )


class Editing:
    """The edit of a tree."""

    def __init__(self, root: Path, resolutions: Path) -> None:
        self.root = root
        self.repository = Repository(root, SeriesError)
        self.words = Words(root)
        self._resolutions = resolutions

    # --- commands ---

    def begin(self, text: str) -> Edit:
        """Stop the tree, which holds the series and nothing uncommitted, at the patch that ``text`` names."""
        if edit_state.under_way(self.root):
            name = edit_state.load(self.root).name
            raise UsageError(f"{name} is being edited: {self.words.refresh}, or {self.words.abort}.")
        applied = marker.read_marker(self.root)
        if applied is None:
            raise SeriesError(f"{self.root} is nothing that {command('apply', self.root)} made.")
        formatting.refuse_own_commits(self.repository, applied)
        commits = self.repository.commits(applied.base)
        series = _as_series(self.repository, applied.base)
        tip = self.repository.resolve("HEAD")
        edit = Edit(
            branch=self.repository.attempt("symbolic-ref", "--quiet", "HEAD")[1].strip(),
            tip=tip,
            patches=tuple((p.name, commit) for p, commit in zip(series.patches, commits, strict=True)),
            place=series.named(text),
        )
        self.repository.run("update-ref", _BEFORE, tip)
        return self._arrive(edit_state.save(self.root, edit))

    def refresh(self) -> str:
        """Take what was changed into the patch, or what was resolved, and replay the rest; what was done.

        Raises:
            ActionNeeded: a person must do something first; nothing is lost.
        """
        edit = edit_state.load(self.root)
        if not edit.arrived:
            self._keep_loose(edit)
            return f"{self._arrive(edit).name} is ready to be edited; a run was interrupted before it was."
        if not edit.done:
            edit = edit_state.save(self.root, edit.but(done=(self._fold(edit),)))
        elif edit.next < len(edit.patches) and (edit.stopped or self._picking(edit)):
            stop = self._stop(edit)
            head = resolution.take(stop)
            remembered.remember(self._resolutions, stop, head)
            edit = self._note(edit, head, "resolved")
        elif edit.next < len(edit.patches):
            self._clear(edit.head)
        return self._replay(edit)

    def use_remembered(self) -> str:
        """Take the resolutions that are remembered of the patch that stopped the replay, and go on."""
        stop = self._stop(self._stopped())
        if left := remembered.take(self._resolutions, stop):
            raise ActionNeeded(
                f"what is remembered was taken; {', '.join(left)} still has a conflict. "
                f"Edit the files in {self.root}, then {self.words.refresh}."
            )
        return self.refresh()

    def skip(self) -> str:
        """Leave the patch out that stopped the replay."""
        edit = self._stopped()
        self.repository.attempt("cherry-pick", "--abort")
        self.repository.discard(edit.head)
        return self._replay(self._note(edit, "", "left out"))

    def abort(self) -> str:
        """Go back to exactly what was; what was changed since is kept as a commit."""
        edit = edit_state.load(self.root)
        (self.root / ".git/index.lock").unlink(missing_ok=True)
        self.repository.attempt("cherry-pick", "--quit")
        kept = self._keep_loose(edit)
        if edit.branch and (moved := self.repository.resolve(edit.branch)) != edit.tip:
            self.repository.run("update-ref", kept_commits.place("series/moved"), moved)
            self.repository.run("update-ref", edit.branch, edit.tip)
        self.repository.run("update-ref", "--no-deref", "HEAD", edit.tip)
        self._clear(edit.tip)
        if edit.branch:
            self.repository.run("symbolic-ref", "HEAD", edit.branch)
        edit_state.remove(self.root)
        where = f" What was changed is kept: git -C {self.root} show {kept}" if kept else ""
        return f"The edit of {edit.name} is dropped; {self.root} is as it was.{where}"

    # --- steps ---

    def _arrive(self, edit: Edit) -> Edit:
        """Put the patch's files into the work tree, on no branch."""
        (self.root / ".git/index.lock").unlink(missing_ok=True)
        self.repository.run("update-ref", "--no-deref", "HEAD", edit.tip)
        self.repository.run("checkout", "--quiet", "--force", "--detach", edit.commit)
        self._clear(edit.commit)
        return edit_state.save(self.root, edit.but(arrived=True))

    def _keep_loose(self, edit: Edit) -> str:
        """Keep what is in the tree and not in the series as a commit; empty where there is nothing."""
        head = self.repository.resolve("HEAD")
        loose = kept_commits.loose_commit(self.repository)
        if loose is None and head in {edit.tip, *(commit for _, commit in edit.patches)}:
            return ""
        place = kept_commits.place("series/aborted")
        self.repository.run("update-ref", place, loose or head)
        return place

    def _fold(self, edit: Edit) -> str:
        """The commit of the edited patch with what was changed."""
        repository, name, refresh = self.repository, edit.name, self.words.refresh
        if operation := unfinished.in_progress(self.root):
            raise ActionNeeded(f"{self.root} is in the middle of a {operation}; finish it, then {refresh}.")
        head = repository.resolve("HEAD")
        parent = repository.resolve(f"{edit.commit}^")
        if head != edit.commit and repository.attempt("rev-parse", f"{head}^@")[1].split() != [parent]:
            raise ActionNeeded(
                f"{self.root}: HEAD is to be {name}, as it was or amended; it is another commit. "
                f"To fold commits of yours into it: git -C {self.root} reset --soft {edit.commit[:12]}; "
                f"then {refresh}. Or {self.words.abort}"
            )
        resolution.refuse_unknown(repository, name, refresh)
        repository.run("add", "--update")
        if hidden := uncommitted.differences(repository, repository.run("write-tree").strip()):
            listed = "\n".join(hidden)
            raise ActionNeeded(
                f"{self.root} has changes that would not get into {name}:\n{listed}\n"
                f"{uncommitted.HOW_TO_SHOW}."
            )
        if repository.attempt("diff", "--cached", "--quiet", parent)[0] == 0:
            raise ActionNeeded(
                f"{name} would change no file. To drop it: {self.words.abort}, then git -C {self.root} "
                "rebase -i base, and delete its line."
            )
        if repository.attempt("diff", "--cached", "--quiet", "HEAD")[0] != 0:
            repository.run("commit", "--quiet", "--amend", "--no-edit")
        head = repository.resolve("HEAD")
        try:
            formatting.exported_patches(repository, parent, head)
        except SeriesError as e:
            raise ActionNeeded(f"{e}\n  Amend it (git -C {self.root} commit --amend), then {refresh}.") from e
        return head

    def _replay(self, edit: Edit) -> str:
        """Put the later patches on the edited one; what was done."""
        while edit.next < len(edit.patches):
            commit = edit.patches[edit.next][1]
            if self.repository.resolve(f"{commit}^") == edit.head:
                self.repository.run("checkout", "--quiet", "--detach", commit)
                edit = self._note(edit, commit, "")
                continue
            step = move.pick(self._space(edit), commit)
            if self._picking(edit):
                edit_state.save(self.root, edit.but(stopped=True))
                raise ActionNeeded(self._why(edit, step))
            edit = self._note(edit, self.repository.resolve("HEAD"), step.outcome.value)
        return self._finish(edit)

    def _finish(self, edit: Edit) -> str:
        if edit.branch:
            now = self.repository.resolve(edit.branch)
            if now not in (edit.tip, edit.head):
                raise ActionNeeded(
                    f"{self.root}: {edit.branch} moved since the edit began. Put it back (git branch --force "
                    f"{edit.branch.removeprefix('refs/heads/')} {edit.tip[:12]}), then {self.words.refresh}."
                )
            self.repository.run("update-ref", "-m", f"edit: {edit.name}", edit.branch, edit.head)
            self.repository.run("symbolic-ref", "HEAD", edit.branch)
        edit_state.remove(self.root)
        if edit.head == edit.tip:
            return f"Nothing was changed in {edit.name}; {self.root} is as it was."
        console.note(f"to take it back: git -C {self.root} reset --hard {_BEFORE}")
        after = [command(name, self.root) for name in ("export", "lint", "guards", "changes")]
        count = len(edit.done) - 1
        return f"{edit.name} is changed, and {count} later patches stand on it. Next: {', '.join(after)}."

    def _stopped(self) -> Edit:
        edit = edit_state.load(self.root)
        if not (edit.done and edit.next < len(edit.patches) and (edit.stopped or self._picking(edit))):
            raise UsageError(f"no patch stopped the replay; {self.words.refresh}, or {self.words.abort}.")
        return edit

    def _picking(self, edit: Edit) -> bool:
        """Whether the next patch lies in the work tree unfinished."""
        status, head, _ = self.repository.attempt("rev-parse", "--verify", "--quiet", "CHERRY_PICK_HEAD")
        return status == 0 and head.strip() == edit.patches[edit.next][1]

    def _note(self, edit: Edit, commit: str, outcome: str) -> Edit:
        if outcome:
            name = edit.patches[edit.next][0]
            console.note(f"{edit.next + 1}/{len(edit.patches)} {name}: {outcome}")
        return edit_state.save(self.root, edit.but(done=(*edit.done, commit), stopped=False))

    def _clear(self, commit: str) -> None:
        (self.root / ".git/index.lock").unlink(missing_ok=True)
        self.repository.attempt("cherry-pick", "--quit")
        self.repository.run("read-tree", commit)  # without the flags that hide changes
        self.repository.discard(commit)

    def _space(self, edit: Edit) -> move.Workspace:
        base = self.repository.resolve(f"{edit.patches[0][1]}^")
        return move.Workspace(self.repository, base, edit.tip, base, "the changed series")

    def _stop(self, edit: Edit) -> resolution.Stop:
        name, commit = edit.patches[edit.next]
        return resolution.Stop(self.repository, name, commit, edit.head, self.words.refresh, self.words.skip)

    # --- words ---

    def _why(self, edit: Edit, step: move.Step) -> str:
        """Why the replay stops, and what a person may do."""
        stop, git = self._stop(edit), f"git -C {self.root}"
        place = f"patch {edit.next + 1} of {len(edit.patches)}, {stop.name}"
        lines = [f"{place}: {step.outcome.value} with the changed {edit.name}."]
        lines += ["    " + line for line in step.evidence]
        lines += rebase_help.remembered_lines(remembered.offers(self._resolutions, stop), self.words.use)
        return "\n".join(
            (
                *lines,
                f"  what changed below it: {git} diff {stop.commit[:12]}^ {stop.before[:12]} -- FILE",
                f"  the patch as it was:   {git} show {stop.commit[:12]}",
                f"  to resolve it:         edit the files in {self.root}, then {self.words.refresh}",
                f"  or: {self.words.skip}, which leaves it out   or: {self.words.abort}",
            )
        )

    def standing(self) -> list[str]:
        """Where the edit stands, in lines."""
        edit = edit_state.load(self.root)
        lines = [f"{edit.name} ({edit.place + 1}/{len(edit.patches)}) is being edited in {self.root}"]
        if edit.done and edit.next < len(edit.patches):
            lines.append(f"patch ({edit.next + 1}/{len(edit.patches)}) {edit.patches[edit.next][0]} is next")
            lines += [f"    {name}: conflict" for name in self._stop(edit).open_files]
        lines += [f"    {line}" for line in uncommitted.changes(self.repository).splitlines()]
        return [*lines, f"next: {self.words.refresh}, or {self.words.abort}"]


def _as_series(repository: Repository, base: str) -> model.Series:
    """The commits of a tree as patches, whatever patches/ holds."""
    with tempfile.TemporaryDirectory(prefix="fa2-edit-") as temporary:
        folder = Path(temporary) / "patches"
        export.write_folder(folder, formatting.exported_patches(repository, base))
        return model.read(folder)
