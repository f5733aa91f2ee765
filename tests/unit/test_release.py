"""``nox -s release``: its steps are done once, in order; what a number and notes must say."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import __main__
from scripts.base import layout
from scripts.base.errors import BuildError, NotVerified, UsageError
from scripts.base.fetch import sha256
from scripts.base.git import Repository
from scripts.commands import release as command_of_release
from scripts.source import matrix
from scripts.wheels.proof import machine_gpus
from scripts.wheels.releasing import release_notes, release_steps
from scripts.wheels.releasing.release_steps import ReleaseError, Step
from scripts.wheels.trust import companions, evidence
from tests.unit.conftest import ROOT, Command, user, whole_wheel
from tests.unit.test_trust import prove
from tests.unit.test_verify import commit_state

TAG = release_notes.tag_of(matrix.load(layout.MATRIX))
FOUR = "flash_attn_4-4.0.0b36+det.1-py3-none-any.whl"


class Steps:
    """Three steps, of which each adds its name to ``ran`` and writes a file; the second takes the first's."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.ran = folder, list[str]()
        self.fails: dict[str, BaseException] = {}

    def run(
        self, *, commit: str = "a" * 40, rehearsal: bool = False, options: tuple[str, ...] = ()
    ) -> list[str]:
        """The steps that ran."""
        self.ran = []
        steps = [
            Step("one", "first", self.making("one"), options=options),
            Step("two", "second", self.making("two"), takes=lambda: (self.folder / "one",)),
            Step("three", "third", self.making("three")),
        ]
        release_steps.run(steps, commit, self.folder / "state", rehearsal=rehearsal)
        return self.ran

    def making(self, name: str) -> Callable[[], tuple[Path, ...]]:
        def make() -> tuple[Path, ...]:
            self.ran.append(name)
            if name in self.fails:
                raise self.fails[name]
            (self.folder / name).write_text(name)
            return (self.folder / name,)

        return make


def test_steps_are_done_once_for_a_commit_its_options_and_files(tmp_path: Path) -> None:
    steps = Steps(tmp_path)
    assert steps.run() == ["one", "two", "three"]
    assert steps.run() == []
    assert steps.run(options=("other",)) == ["one"]
    (tmp_path / "three").unlink()
    assert steps.run(options=("other",)) == ["three"], "what it made is gone"
    (tmp_path / "one").write_text("changed")
    assert steps.run(options=("other",)) == ["one"], "made anew, it is what the second took"
    assert steps.run(commit="b" * 40) == ["one", "two", "three"]


def test_what_a_step_takes_is_part_of_what_it_was_asked_for(tmp_path: Path) -> None:
    steps = Steps(tmp_path)
    steps.run()
    state = tmp_path / "state" / release_steps.STATE
    told = json.loads(state.read_text())
    (tmp_path / "one").write_text("changed")
    told["steps"]["one"]["made"] = {str(tmp_path / "one"): sha256(tmp_path / "one")}
    state.write_text(json.dumps(told))
    assert steps.run() == ["two"]


def test_a_failed_step_stops_and_the_next_run_goes_on_from_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = Steps(tmp_path)
    errors: tuple[BaseException, ...] = (ReleaseError("broken"), KeyboardInterrupt(), NotVerified("no GPU"))
    for error in errors:
        steps.fails = {"two": error}
        with pytest.raises(type(error)):
            steps.run()
        assert steps.ran[-1] == "two"
    assert "two failed. The same command goes on from there." in capsys.readouterr().err
    steps.fails = {}
    assert steps.run() == ["two", "three"]


def test_a_rehearsal_goes_on_without_a_proof_and_asks_for_it_again(tmp_path: Path) -> None:
    steps = Steps(tmp_path)
    steps.fails = {"two": NotVerified("no GPU")}
    assert steps.run(rehearsal=True) == ["one", "two", "three"]
    assert steps.run(rehearsal=True) == ["two"]
    steps.fails = {"two": ReleaseError("broken")}
    with pytest.raises(ReleaseError):
        steps.run(rehearsal=True)


def test_a_damaged_state_is_refused(tmp_path: Path) -> None:
    (tmp_path / release_steps.STATE).write_text('{"format": 2}')
    with pytest.raises(UsageError, match=r"another version of this program; delete it; the steps begin anew"):
        release_steps.read(tmp_path)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with this one's matrix and short series, and a release of it, tagged."""
    root = tmp_path / "repository"
    for series in ("flash-attn", "flash-attn-4"):
        (root / "patches" / series).mkdir(parents=True)
        (root / "patches" / series / "One.patch").write_text("one\n")
    shutil.copyfile(layout.MATRIX, root / "wheel_matrix.toml")
    (root / "CHANGES.md").write_text(changes(One="First.\n\nMore.", Two="Second."))
    user(root, "init", "--quiet")
    commit_state(root)
    return root


def changes(version: str = "2.8.3.post1", **patches: str) -> str:
    told = "".join(f"\n### {subject}\n\n{body}\n" for subject, body in patches.items())
    return f"# Changes\n\n## flash-attn {version}\n\nWhere.\n{told}\n## flash-attn-4 4.0.0b36\n\n### Four\n\nIt.\n"


def tag(root: Path, name: str) -> None:
    user(root, "tag", "-a", name, "-m", name)


def of(root: Path) -> tuple[Repository, matrix.Matrix]:
    return Repository(root, UsageError), matrix.load(root / "wheel_matrix.toml")


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ("patches/flash-attn-4/One.patch", "patches/flash-attn-4 is another series"),
        ("fork/flash-attn-4/flash_attn/cute/fork_more.py", "fork/flash-attn-4 has other files"),
    ],
)
def test_a_number_is_of_one_series(repository: Path, changed: str, told: str) -> None:
    release_notes.check_revision(*of(repository))
    tag(repository, "v2.8.3.post1+det.0")
    release_notes.check_revision(*of(repository))
    (repository / changed).parent.mkdir(parents=True, exist_ok=True)
    (repository / changed).write_text("other\n")
    commit_state(repository)
    with pytest.raises(
        UsageError, match=rf"flash-attn-4 has revision 1, as v2\.8\.3\.post1\+det\.0 has, and {told}"
    ):
        release_notes.check_revision(*of(repository))
    text = (repository / "wheel_matrix.toml").read_text()
    (repository / "wheel_matrix.toml").write_text(text.replace("revision = 1\n", "revision = 2\n"))
    commit_state(repository)
    release_notes.check_revision(*of(repository))


def test_a_tag_is_not_moved(repository: Path) -> None:
    tag(repository, TAG)
    release_notes.check_revision(*of(repository))
    (repository / "README.md").write_text("more\n")
    commit_state(repository)
    with pytest.raises(UsageError, match=r"det\.2 is another commit \(.{12}\)\. A tag is not moved: raise"):
        release_notes.check_revision(*of(repository))


def test_notes_tell_what_is_new_since_the_tag_before(repository: Path) -> None:
    first = release_notes.notes(*of(repository))
    assert first.startswith(
        "The first release.\n\n## flash-attn 2.8.3.post1+det.2\n\nOn upstream's 2.8.3.post1: 2 pa"
    )
    assert "\n- One\n- Two\n" in first
    tag(repository, "v2.8.9+det.1")
    (repository / "CHANGES.md").write_text(
        changes("2.8.3.post2", Two="Second\nanew.", Three="Third\nthing.\n\nMore.")
    )
    commit_state(repository)
    tag(repository, TAG)
    told = release_notes.notes(*of(repository))
    assert told.startswith("Since v2.8.9+det.1.\n")
    assert "On upstream's 2.8.3.post2 (was 2.8.3.post1): 2 patches." in told
    assert (
        "### New\n\n- **Three**: Third thing.\n\n### Said anew\n\n- **Two**: Second anew.\n\n### Gone\n\n- **One**\n"
        in told
    )
    assert (
        "## flash-attn-4 4.0.0b36+det.1\n\nOn upstream's 4.0.0b36 (as before): 1 patch.\n\nEach wheel" in told
    )


def test_a_release_is_of_a_commit(repository: Path) -> None:
    assert release_steps.commit_of(repository) == user(repository, "rev-parse", "HEAD").strip()
    (repository / "new").touch()
    with pytest.raises(UsageError, match=r"the work tree has changes: \?\? new\. Commit them"):
        release_steps.commit_of(repository)
    with pytest.raises(UsageError, match="is no clone"):
        release_steps.commit_of(repository / "patches")


@pytest.fixture
def wheels(dist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the release's wheels; the steps before proofs take them as they are."""
    for wheel in dist.glob("*.whl"):
        evidence.attest_build(wheel)
    monkeypatch.setattr(command_of_release, "FOLDER", tmp_path / "release")
    monkeypatch.setattr(release_steps, "commit_of", lambda _: "a" * 40)
    monkeypatch.setattr(release_steps, "gates", lambda _: ())
    for step in ("_forecast", "_build", "_archives", "_reproduce", "_revision"):
        monkeypatch.setattr(command_of_release, step, lambda *_: ())
    monkeypatch.setattr(machine_gpus, "found", tuple)
    return dist


def test_a_rehearsal_makes_all_but_the_proofs_and_a_release_waits_for_them(
    wheels: Path, command: Command
) -> None:
    words = ("release", "--wheels", str(wheels), "--url", "https://a.example/")
    done = command(*words, "--dry-run")
    assert done.status == NotVerified.exit_code
    assert (
        "cannot be released yet: without a proof: flash_attn-2.8.3.post1+det.2.cu13-24_hdim64_sm90-"
        in done.err
    )
    out = wheels.parent / "release"
    assert json.loads((out / "index/about.json").read_text())["url"] == "https://a.example/"
    assert (out / f"sboms/{FOUR.removesuffix('.whl')}.cdx.json").is_file()
    assert (out / "notes.md").read_text().startswith("The first release.")
    assert command(*words).status == NotVerified.exit_code
    for wheel in wheels.glob("*.whl"):
        prove(wheel)
    done = command(*words)
    assert done.status == 0, done.err
    assert "9/10 index: " in done.out
    assert "is the index of" in done.out
    assert "index was done before" not in done.out, "the proofs are in it now"
    assert companions.proof(wheels / FOUR).name in {path.name for path in (out / "index/files").iterdir()}
    assert f"git tag -a '{TAG}' -m 'FlashAttention 2.8.3.post1, series release 2' aaaaaaaaaaaa" in done.out
    assert "index was done before" in command(*words).out


def test_a_changed_wheel_stops_a_release(wheels: Path, command: Command) -> None:
    statement = companions.provenance(wheels / FOUR)
    statement.write_text("{}")
    done = command("release", "--dry-run", "--wheels", str(wheels))
    assert done.status not in (0, NotVerified.exit_code)
    assert f"{statement} was changed" in done.err


def test_a_wheel_of_another_release_stops_a_release(wheels: Path, command: Command) -> None:
    other = whole_wheel(wheels, "flash_attn-2.8.3.post1+det.1.cu13-py3-none-manylinux_2_28_x86_64.whl")
    assert f"{other.name} is of another release" in command("release", "--wheels", str(wheels)).err


def test_a_command_that_fails_fails_the_step(tmp_path: Path) -> None:
    with pytest.raises(BuildError):
        command_of_release._call("inspect", str(tmp_path / "none.whl"))
    two = [str(tmp_path / name) for name in ("none.whl", "neither.whl")]
    with pytest.raises(ReleaseError, match="nox -s inspect failed with status 2; why is told above"):
        command_of_release._call("inspect", *two)


@pytest.mark.parametrize(
    ("target", "expected"), [(None, ["cu13", "cu13-full"]), ("cu13", ["cu13"]), ("cu12*", [])]
)
def test_archives_are_of_the_targets_whose_toolkit_has_a_static_runtime(
    target: str | None, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []

    def build(*words: str) -> None:
        assert words[:3] == ("build", "--cpp", "--target")
        built.append(words[3])
        (tmp_path / f"flash_attention_v2-1-{words[3]}-linux-x86_64.tar.gz").write_text("")

    monkeypatch.setattr(command_of_release, "_call", build)
    loaded = matrix.load(layout.MATRIX)
    made = command_of_release._archives(command_of_release._Release(loaded, tmp_path, target, None))
    assert built == expected
    assert {path.name.split("-")[2] for path in made} == {name.split("-")[0] for name in expected}


def test_gates_are_what_ci_runs(tmp_path: Path) -> None:
    script = tmp_path / ".ci/run"
    script.parent.mkdir()
    script.write_text("#!/bin/sh\nexit 3\n")
    script.chmod(0o755)
    with pytest.raises(ReleaseError, match=r"\.ci/run ended with 3"):
        release_steps.gates(tmp_path)
    script.write_text('#!/bin/sh\n[ "$1" = --every-turn ] && touch ran\n')
    release_steps.gates(tmp_path)
    assert (tmp_path / "ran").exists()


def test_the_page_has_every_step_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    __main__.main_inner(["release", "--list"])
    listed = [line.split()[1].rstrip(":") for line in capsys.readouterr().out.splitlines()]
    page = (ROOT / "docs/releasing.md").read_text(encoding="utf-8")
    table = page.split("| step |", 1)[1].split("\n\n", 1)[0]
    assert [line.split("`")[1] for line in table.splitlines() if line.startswith("| `")] == listed
