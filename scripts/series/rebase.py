"""Move the series to another release: stop where a person must look, go on, skip, abort; lose nothing.

The state lies in ``build/rebase/state.json``, written aside and renamed after every patch; the repository
beside it keeps the old series under refs/series/backup. A run that was killed goes on with ``--continue``.
patches/, the pin and CHANGES.md change only at the end, when every patch has moved, is well-formed and
keeps its guard.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.base import console, files
from scripts.base.errors import ActionNeeded, GuardError, SeriesError, UsageError
from scripts.base.fetch import sha256
from scripts.base.git import Repository
from scripts.series import changes, export, guards, lint, model, move, reach
from scripts.series import tree as work_tree
from scripts.series.rebase_state import FORMAT, STATE, Done, Report, State, under_way
from scripts.source import kernel_set, pin
from scripts.source import matrix as matrix_model
from scripts.source.matrix import Upstream

if TYPE_CHECKING:
    from scripts.source.matrix import Matrix
    from scripts.source.releases import Release
    from scripts.source.upstream import Checkout

_GO_ON = "nox -s rebase -- --continue"
_SKIP = "nox -s rebase -- --skip --reason 'WHY'"
_ABORT = "nox -s rebase -- --abort"
_WRITTEN = ("patches", "wheel_matrix.toml", "CHANGES.md")
_BESIDE = (f"patches/{model.LISTING}", *_WRITTEN[1:])  # of those, what is no patch


def _digest(path: Path) -> str:
    return sha256(path) if path.is_file() else ""


class Rebase:
    """One rebase, in its folder."""

    def __init__(self, root: Path, folder: Path, compiler: guards.Compiler | None = None) -> None:
        self._compiler = compiler
        self.root = root
        self.folder = folder
        self._path = folder / STATE
        self.source = folder / "source"

    @property
    def under_way(self) -> bool:
        """Whether there is one."""
        return under_way(self.folder)

    # --- state ---

    def _save(self, state: State) -> State:
        files.write(self._path, state.as_text())
        return state

    def load(self) -> State:
        """The state, checked against the repository beside it."""
        if not self.under_way:
            raise UsageError("no rebase is under way; nox -s rebase -- VERSION starts one.")
        try:
            raw = json.loads(self._path.read_text(encoding="utf-8"))
            if raw.pop("format") != FORMAT:
                raise SeriesError(
                    f"{self._path} is of another version of this program; {_ABORT} drops it, patches/ is untouched."
                )
            raw["done"] = tuple(Done(**{**d, "evidence": tuple(d["evidence"])}) for d in raw["done"])
            raw["landed"] = {name: (outcome, evidence) for name, (outcome, evidence) in raw["landed"].items()}
            state = State(**raw)
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise SeriesError(
                f"{self._path} is damaged ({e}); {_ABORT} drops the rebase, patches/ is untouched."
            ) from e
        repository = Repository(self.source, SeriesError)
        if not repository.is_top_level():
            raise SeriesError(f"{self.source} is gone; {_ABORT} drops the rebase, patches/ is untouched.")
        for what, commit in (
            ("the old base", state.old_base),
            ("the new base", state.new_base),
            ("the old series", state.tip),
        ):
            if repository.attempt("cat-file", "-e", f"{commit}^{{commit}}")[0] != 0:
                raise SeriesError(
                    f"{self.source} has lost {what}, {commit}; {_ABORT} drops the rebase, patches/ is untouched."
                )
        if repository.resolve("refs/series/backup") != state.tip:
            raise SeriesError(
                f"{self.source}: refs/series/backup is not the series that was to be moved; {_ABORT} drops the rebase."
            )
        return state

    def _space(self, state: State) -> move.Workspace:
        repository = Repository(self.source, SeriesError)
        return move.Workspace(
            repository,
            state.old_base,
            state.tip,
            state.new_base,
            state.old_pin["version"],
            state.new_pin["version"],
        )

    def _require_committed(self) -> None:
        """What a rebase writes is to be in this repository's history first, so that git can take it back."""
        repository = Repository(self.root, SeriesError)
        if not repository.is_top_level():
            return
        if changed := repository.run("status", "--porcelain", "--", *_WRITTEN, writes=False).rstrip():
            raise SeriesError(
                f"{self.root} has changes that are not committed:\n{changed}\nCommit them first, so that git can take the rebase back."
            )

    def _here(self) -> str:
        repository = Repository(self.root, SeriesError)
        return (
            repository.attempt("rev-parse", "--verify", "--quiet", "HEAD")[1].strip()
            if repository.is_top_level()
            else ""
        )

    # --- commands ---

    def start(self, matrix: Matrix, patches: model.Series, checkout: Checkout, release: Release) -> Report:
        """Begin, and go as far as nobody is needed."""
        if self.under_way:
            raise UsageError(f"a rebase is under way: {_GO_ON}, {_SKIP}, or {_ABORT}.")
        if work_tree.pin_key(release.pin) == work_tree.pin_key(matrix.upstream):
            raise UsageError(f"the series stands on {release.name} already.")
        self._require_committed()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        work_tree.sweep(self.folder)
        aside = Path(tempfile.mkdtemp(dir=self.folder.parent, prefix=work_tree.aside_prefix(self.folder)))
        try:
            space = move.workspace(aside / "source", patches, matrix.upstream, checkout, release)
            there = {
                name: (outcome.value, evidence)
                for name, (outcome, evidence) in move.landed(space, patches.patches).items()
            }
            state = State(
                matrix.upstream.model_dump(by_alias=True),
                release.pin.model_dump(by_alias=True),
                space.old_base,
                space.new_base,
                space.tip,
                {p.name: p.sha256 for p in patches.patches},
                there,
                started=self._here(),
            )
            files.write(aside / self._path.name, state.as_text())
            aside.replace(self.folder)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        return self._walk(self.load())

    def proceed(self) -> Report:
        """Go on, with what a person made of the patch that stopped it."""
        state = self.load()
        if state.stopped or self._picking(state):
            state = self._take(state)
        elif len(state.done) < len(state.patches):
            self._clear(state)
        return self._walk(state)

    def _picking(self, state: State) -> bool:
        """Whether a kill came between a conflict and its record: a person may have worked on it since."""
        if len(state.done) == len(state.patches):
            return False
        repository = Repository(self.source, SeriesError)
        status, head, _ = repository.attempt("rev-parse", "--verify", "--quiet", "CHERRY_PICK_HEAD")
        return status == 0 and head.strip() == self._next(state, self._space(state))[1]

    def skip(self, reason: str) -> Report:
        """Leave the patch out that stopped it; the reason goes into ``patches/series``."""
        state = self.load()
        if not state.stopped:
            raise UsageError(f"no patch stopped the rebase; {_GO_ON}, or {_ABORT}.")
        if not reason.strip():
            raise UsageError(f"a patch is skipped for a reason: {_SKIP}.")
        space = self._space(state)
        move.abandon(space)
        name, commit = self._next(state, space)
        outcome, evidence = state.landed.get(name, ("skipped", ""))
        done = Done(name, outcome, commit, " ".join(reason.split()), (evidence,) if evidence else ())
        return self._walk(self._save(replace(state, done=(*state.done, done), stopped=False)))

    def abort(self) -> str:
        """Drop the rebase; what it may have written by then is put back."""
        if not self.folder.exists():
            raise UsageError("no rebase is under way.")
        left_alone = (self.folder / "before").is_dir() and not self._put_back()
        kept = self.folder.with_name(self.folder.name + "-aborted")
        shutil.rmtree(kept, ignore_errors=True)
        self.folder.replace(kept)
        where = f"What was resolved stays in {kept / self.source.name} until the next one is dropped."
        if left_alone:
            return (
                "The rebase is dropped. What it had begun to write has changed since, or its state is damaged, and was left alone: look at git diff. "
                + where
            )
        return f"The rebase is dropped; patches/ and wheel_matrix.toml are as they were. {where}"

    def _put_back(self) -> bool:
        """Undo what the end of a rebase wrote, unless somebody changed it since."""
        before, folder = self.folder / "before", self.root / "patches"
        try:
            state = self.load()
        except SeriesError:
            return False
        kept = [name for name in _BESIDE if (before / name).is_file()]
        if not state.aborting:  # by a run that was interrupted
            if model.digests(folder) not in (state.patches, state.moved):
                return False
            if any(
                _digest(self.root / name) not in (_digest(before / name), state.wrote.get(name))
                for name in kept
            ):
                return False
            self._save(replace(state, aborting=True))
        export.write_folder(
            folder, {name: (before / "patches" / name).read_bytes() for name in state.patches}
        )
        for name in kept:
            files.write(self.root / name, (before / name).read_text(encoding="utf-8"))
        if pin.gitlink(self.root) == state.new_pin["commit"] != state.gitlink:
            pin.stage_gitlink(self.root, state.gitlink)
        return True

    def _remove(self) -> None:
        """The folder goes in one step, so that a kill leaves a rebase or none."""
        aside = Path(tempfile.mkdtemp(dir=self.folder.parent, prefix=work_tree.aside_prefix(self.folder)))
        self.folder.replace(aside / "gone")
        shutil.rmtree(aside)

    # --- steps ---

    def _next(self, state: State, space: move.Workspace) -> tuple[str, str]:
        place = len(state.done)
        return list(state.patches)[place], space.commits[place]

    def _head(self, state: State) -> str:
        """The last patch's commit on the new base."""
        return next((d.commit for d in reversed(state.done) if not d.reason), state.new_base)

    def _clear(self, state: State) -> None:
        """After a kill: the work tree as it was after the last patch that was recorded."""
        repository = Repository(self.source, SeriesError)
        (self.source / ".git/index.lock").unlink(missing_ok=True)
        repository.attempt("cherry-pick", "--quit")
        repository.discard(self._head(state))

    def _take(self, state: State) -> State:
        """Record what a person made of the next patch."""
        space = self._space(state)
        repository = space.repository
        name, _ = self._next(state, space)
        head = repository.resolve("HEAD")
        if work_tree.in_progress(self.source):
            self._stage(repository, name)
            repository.run("-c", "core.editor=true", "cherry-pick", "--continue")
            head = repository.resolve("HEAD")
        elif repository.run("status", "--porcelain").strip():
            raise ActionNeeded(
                f"{self.source} has uncommitted changes; commit them as {name}, then {_GO_ON}."
            )
        before = self._head(state)
        if head == before:
            raise ActionNeeded(
                f"{name} has no commit in {self.source}. Commit it there (git cherry-pick {self._next(state, space)[1][:12]} begins it again), "
                f"or say why it is left out: {_SKIP}."
            )
        parents = repository.run("log", "-1", "--format=%P", head, writes=False).split()
        if parents != [before]:
            raise ActionNeeded(
                f"{self.source}: HEAD is to be one commit, {name}, on {before[:12]}. Put it there (git rebase -i), then {_GO_ON}."
            )
        if not repository.run("diff", "--name-only", before, head, writes=False):
            raise ActionNeeded(
                f"{name}: the commit in {self.source} changes nothing. If that is right, say why: {_SKIP}."
            )
        self._refuse_markers(repository, name, before, head)
        return self._save(replace(state, done=(*state.done, Done(name, "resolved", head)), stopped=False))

    def _stage(self, repository: Repository, name: str) -> None:
        """Add what a person resolved; refuse leftovers."""
        self._refuse_markers(
            repository, name
        )  # before anything is staged: git forgets what a conflict was then
        repository.run("add", "--update")
        loose = [
            line[3:]
            for line in repository.run("status", "--porcelain", "--untracked-files=all").splitlines()
            if line.startswith("??")
        ]
        if loose:
            raise ActionNeeded(
                f"{self.source} has files that git does not know: {', '.join(loose)}. Delete them, or git add them to {name}, then {_GO_ON}."
            )
        self._refuse_markers(repository, name, "--cached", "HEAD")
        if not repository.run("diff", "--cached", "--name-only", writes=False):
            raise ActionNeeded(f"{name} would leave nothing. If that is right, say why: {_SKIP}.")

    def _refuse_markers(self, repository: Repository, name: str, *between: str) -> None:
        _, report, _ = repository.attempt("diff", "--check", *between)
        if places := re.findall(r"^(.+:\d+): leftover conflict marker", report, re.MULTILINE):
            raise ActionNeeded(
                f"{self.source}/{places[0]}: a conflict of {name} is not resolved. Edit the file, then {_GO_ON}."
            )

    def _walk(self, state: State) -> Report:
        space = self._space(state)
        repository, total = space.repository, len(state.patches)
        while len(state.done) < total:
            name, commit = self._next(state, space)
            there = state.landed.get(name)
            step = move.pick(space, commit)
            judged = move.judge(name, step, (move.Outcome(there[0]), there[1]) if there else None)
            unfinished = work_tree.in_progress(self.source) is not None
            if unfinished or judged.outcome in (move.Outcome.LANDED_IDENTICAL, move.Outcome.LANDED_MODIFIED):
                if not unfinished:
                    repository.run("reset", "--quiet", "--hard", self._head(state))
                self._save(replace(state, stopped=True))
                raise ActionNeeded(self._why(state, judged, total))
            done = Done(name, judged.outcome.value, repository.resolve("HEAD"), evidence=judged.evidence)
            state = self._save(replace(state, done=(*state.done, done)))
            console.note(f"{len(state.done)}/{total} {name}: {judged.outcome.value}")
        return self._finish(state)

    def _why(self, state: State, judged: move.Move, total: int) -> str:
        old, new = state.old_pin["version"], state.new_pin["version"]
        lines = [f"patch {len(state.done) + 1} of {total}, {judged.patch}: {judged.outcome.value} on {new}."]
        lines += ["    " + line for line in judged.evidence]
        lines += self._history(state, judged)
        whole = judged.outcome in (move.Outcome.LANDED_IDENTICAL, move.Outcome.EMPTY)
        if whole or judged.outcome is move.Outcome.LANDED_MODIFIED:
            lines.append(f"  left out, if upstream has all of it: {_SKIP}")
        lines += [
            f"  what {new} changed there: git -C {self.source} diff {state.old_base[:12]} {state.new_base[:12]} -- FILE",
            f"  the patch as it was:      git -C {self.source} show {self._next(state, self._space(state))[1][:12]}   (against {old})",
        ]
        if whole:
            lines.append(f"  or: {_ABORT}")
        else:
            lines += [
                f"  to resolve it:            edit the files in {self.source}, then {_GO_ON}",
                f"  or: {_SKIP}   or: {_ABORT}",
            ]
        return "\n".join(lines)

    def _history(self, state: State, judged: move.Move) -> list[str]:
        """Upstream's commits between the two releases on the files in question, where git has both."""
        upstream = Repository(self.root / "upstream", SeriesError)
        old, new = state.old_pin["commit"], state.new_pin["commit"]
        if not upstream.is_top_level() or any(upstream.attempt("cat-file", "-e", c)[0] for c in (old, new)):
            return []
        touched = sorted(
            {line.split(":")[0].split(" ")[0] for line in judged.evidence if "/" in line.split(":")[0]}
        )
        log = (
            upstream.run("log", "--oneline", "--no-decorate", f"{old}..{new}", "--", *touched, writes=False)
            if touched
            else ""
        )
        return (
            ["  upstream's commits on these files:"] + ["    " + line for line in log.splitlines()]
            if log
            else []
        )

    # --- the end ---

    def _finish(self, state: State) -> Report:
        space = self._space(state)
        repository, folder = space.repository, self.root / "patches"
        new_pin = Upstream.model_validate(state.new_pin)
        if operation := work_tree.in_progress(self.source) or repository.run("status", "--porcelain").strip():
            raise ActionNeeded(
                f"{self.source} is not finished ({operation}); commit or finish it there, then {_GO_ON}."
            )
        patches = self._exported(state, repository)
        self._gate(state, repository, patches)
        moved = {name: hashlib.sha256(content).hexdigest() for name, content in patches.items()}
        if model.digests(folder) not in (state.patches, state.moved or state.patches):
            back = f"git restore --source={state.started[:12] or 'COMMIT'} --staged --worktree {folder}"
            raise ActionNeeded(
                f"{folder} changed since the rebase began; put it back ({back}), then {_GO_ON}; or {_ABORT}."
            )
        if not state.moved:
            self._keep_before()
            state = replace(state, gitlink=pin.gitlink(self.root))
        dropped = [f"# not since {new_pin.version}: {d.patch}: {d.reason}" for d in state.done if d.reason]
        try:
            after = self._prepared(new_pin, patches, dropped)
            # Noted before it is written, so that --abort takes back this and nothing that a person wrote since.
            earlier = state.wrote  # of a run that did not end; its patches may have been amended since
            state = self._save(
                replace(state, moved=moved, wrote={name: _digest(after / name) for name in _BESIDE})
            )
            for name in _BESIDE:
                if _digest(self.root / name) not in (
                    _digest(self.folder / "before" / name),
                    earlier.get(name),
                    state.wrote[name],
                ):
                    raise ActionNeeded(
                        f"{self.root / name} changed since the rebase began to write; take that back, then {_GO_ON}; or {_ABORT}."
                    )
            export.write_folder(folder, patches, dropped)
            for name in _WRITTEN[1:]:
                if _digest(self.root / name) != state.wrote[name]:
                    files.write(self.root / name, (after / name).read_text(encoding="utf-8"))
            linked = pin.write_gitlink(self.root, new_pin)
        except OSError as e:
            what = f"{e.filename}: {e.strerror}" if e.filename else str(e)
            raise ActionNeeded(
                f"{what}, while {', '.join(_WRITTEN)} were written: some are, some are not. Mend that, then {_GO_ON}; or {_ABORT}"
            ) from e
        # Since the rebase began, in however many runs.
        written = export.changed(export.held(self.folder / "before/patches"), export.held(folder))
        range_diff = repository.run(
            "range-diff",
            "--no-color",
            "--creation-factor=90",
            f"{state.old_base}..{state.tip}",
            f"{state.new_base}..HEAD",
            writes=False,
        )
        touched = reach.kernels(repository, state.tip, repository.resolve("HEAD"))
        report = Report(
            state.old_pin["version"],
            new_pin.version,
            state.done,
            range_diff,
            tuple(k.name for k in touched),
            ",".join(kernel_set.spell_kernels(touched)) if touched else "",
            linked,
            written.written,
            written.removed,
        )
        reports = self.root / "build/reports"
        reports.mkdir(parents=True, exist_ok=True)
        name = f"rebase-{report.old}-to-{report.new}.json"
        files.write(reports / name, json.dumps(report.as_json(), indent=1) + "\n")
        self._remove()
        return report

    def _exported(self, state: State, repository: Repository) -> dict[str, bytes]:
        """The moved patches; every one that was not skipped is among them."""
        try:
            patches = export.exported_patches(repository, state.new_base)
        except SeriesError as e:
            raise ActionNeeded(
                f"{e}\n  amend it in {self.source} (git rebase -i {state.new_base[:12]}), then {_GO_ON}; or {_ABORT}"
            ) from e
        expected = [d.patch for d in state.done if not d.reason]
        if len(patches) != len(expected):
            raise ActionNeeded(
                f"{self.source} holds {len(patches)} commits on the new base, and {len(expected)} patches were moved: {', '.join(expected)}. "
                f"Put them back (git reflog), then {_GO_ON}. A patch is left out by --skip, or after the rebase; or {_ABORT}."
            )
        if not patches:
            raise SeriesError(f"no patch is left; {_ABORT}.")
        return patches

    def _prepared(self, new_pin: Upstream, patches: dict[str, bytes], dropped: list[str]) -> Path:
        """What the end of a rebase writes, aside: a folder like ``before``."""
        after = self.folder / "after"
        shutil.rmtree(after, ignore_errors=True)
        shutil.copytree(self.folder / "before", after)
        export.write_folder(after / "patches", patches, dropped)
        pin.write(matrix_model.load(after / "wheel_matrix.toml"), new_pin)
        matrix = matrix_model.load(after / "wheel_matrix.toml")
        changes.write(after / "CHANGES.md", changes.render(matrix, model.read(after / "patches")))
        return after

    def _keep_before(self) -> None:
        """Copies of what the end of a rebase writes, for --abort."""
        aside = Path(tempfile.mkdtemp(dir=self.folder, prefix="before."))
        shutil.copytree(self.root / "patches", aside / "patches")
        for name in _WRITTEN[1:]:
            if (self.root / name).is_file():
                shutil.copyfile(self.root / name, aside / name)
        shutil.rmtree(
            self.folder / "before", ignore_errors=True
        )  # of a run that was killed before it wrote anything
        aside.replace(self.folder / "before")

    def _gate(self, state: State, repository: Repository, patches: dict[str, bytes]) -> None:
        """Refuse a series that is malformed or whose guards do not discriminate."""
        with tempfile.TemporaryDirectory(dir=self.folder, prefix="check-") as temporary:
            candidate = Path(temporary) / "patches"
            export.write_folder(candidate, patches)
            moved = model.read(candidate)
            problems = [str(p).replace(f"{candidate}/", "") for p in lint.check(candidate)]
            try:
                head = repository.resolve("HEAD")
                guards.require(
                    guards.run(moved, work_tree.Commits(self.source, state.new_base, head), self._compiler)
                )
            except GuardError as e:
                problems += str(e).splitlines()
        if problems:
            listed = "\n".join("    " + p for p in problems)
            raise ActionNeeded(
                f"every patch has moved, and the series is not yet good:\n{listed}\n"
                f"  amend the commits in {self.source} (git rebase -i {state.new_base[:12]}), then {_GO_ON}; or {_ABORT}"
            )
