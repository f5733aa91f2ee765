from __future__ import annotations

from pathlib import Path

import pytest

from scripts.base.errors import SeriesError, UpstreamError
from scripts.series import model
from scripts.series.upstream import forecast, landed, move
from scripts.series.upstream.move import Outcome
from scripts.source.releases import Release
from tests.unit.conftest import BASE, GONE, PIN, Make, checkout_of, commit_each

NEW = PIN.model_copy(update={"version": "9.9.9"})
LIB = "flash_attn/lib.py"
# Two functions with one body, as CUDA kernels have many.
BLOCK = "".join(f"    same_{i}()\n" for i in range(8))
TWINS = f"# head\n{BLOCK}    compute()\n{BLOCK}# middle\n{BLOCK}    compute()\n{BLOCK}# tail\n"
FILES = BASE | {LIB: "".join(f"value_{i} = {i}\n" for i in range(30)), "csrc/flash_attn/src/twins.h": TWINS}
EDIT = ("Change the tenth value", {LIB: FILES[LIB].replace("value_10 = 10\n", "value_10 = compute_ten()\n")})
HEADER = (
    "Add a header",
    {"csrc/flash_attn/src/fork.h": "#pragma once\ninline int fork_answer() { return 42; }\n"},
)


def forecast_of(
    make_series: Make, tmp_path: Path, new: dict[str, str], *edits: tuple[str, dict[str, str]]
) -> list[move.Move]:
    whole = model.read(make_series(*edits, base=FILES))
    files = {name: text for name, text in (FILES | new).items() if text != GONE}
    release = Release(NEW, checkout_of(files), "a fixture")
    return forecast.run_forecast(tmp_path / "build", whole, PIN, checkout_of(FILES), release).moves


def outcome(
    make_series: Make, tmp_path: Path, new: dict[str, str], *edits: tuple[str, dict[str, str]]
) -> tuple[Outcome, str]:
    (found,) = forecast_of(make_series, tmp_path, new, *edits)
    assert not list((tmp_path / "build").iterdir())
    return found.outcome, "\n".join(found.evidence)


@pytest.mark.parametrize(
    ("new", "expected", "told"),
    [
        ({"setup.py": "other\n"}, Outcome.CLEAN, ""),
        ({LIB: "one\ntwo\n" + FILES[LIB]}, Outcome.OFFSET, f"{LIB}:10: hunk 1 moved by 2 lines"),
        (
            {LIB: FILES[LIB].replace("value_8 = 8", "value_8 = 88")},
            Outcome.OFFSET,
            f"{LIB}:8: the lines around a change are others; merged",
        ),
        (
            {LIB: FILES[LIB].replace("value_10 = 10", "value_10 = 11")},
            Outcome.CONFLICT,
            f"{LIB}:11: conflict; 9.9.9 has 'value_10 = 11'",
        ),
        (
            {LIB: "# new\n" + EDIT[1][LIB]},
            Outcome.LANDED_IDENTICAL,
            "the whole patch reverse-applies to 9.9.9",
        ),
        (
            {LIB: GONE, "flash_attn/other.py": FILES[LIB]},
            Outcome.SOURCE_RENAMED,
            f"{LIB} is flash_attn/other.py in 9.9.9 (100 % the same)",
        ),
        ({LIB: GONE}, Outcome.SOURCE_DELETED, f"{LIB} is not in 9.9.9\n{LIB}: conflict"),
    ],
    ids=["elsewhere", "above", "around", "the same line", "landed", "renamed", "deleted"],
)
def test_what_becomes_of_a_patch_follows_from_what_upstream_changed(
    make_series: Make, tmp_path: Path, new: dict[str, str], expected: Outcome, told: str
) -> None:
    found, evidence = outcome(make_series, tmp_path, new, EDIT)
    assert found is expected
    assert evidence == told


def test_a_hunk_for_the_first_of_two_identical_blocks_does_not_end_in_the_second(
    make_series: Make, tmp_path: Path
) -> None:
    """``git am -3`` puts it there and returns 0."""
    twins = "csrc/flash_attn/src/twins.h"
    head, _, rest = TWINS.partition("    compute()\n")
    edit = ("Compute twice", {twins: f"{head}    compute_twice()\n{rest}"})
    without_first = f"# head\n# middle\n{BLOCK}    compute()\n{BLOCK}# tail\n"
    found, evidence = outcome(make_series, tmp_path, {twins: without_first}, edit)
    assert found is Outcome.CONFLICT
    assert evidence.startswith(twins)
    # That the fixture is such a case: what mail merging makes of it.
    release = Release(NEW, checkout_of(FILES | {twins: without_first}), "a fixture")
    space = move.workspace(
        tmp_path / "work", model.read(tmp_path / "patches"), PIN, checkout_of(FILES), release
    )
    assert space.repository.attempt("am", "-3", str(tmp_path / "patches/Compute-twice.patch"))[0] == 0
    assert "compute_twice" in (space.repository.root / twins).read_text()


def test_stacked_patches_that_upstream_took_both_have_landed(make_series: Make, tmp_path: Path) -> None:
    """The second hides the first: only from the last to the first do both reverse-apply."""
    second = ("Change it again", {LIB: EDIT[1][LIB].replace("compute_ten()", "compute_ten(again=True)")})
    moves = forecast_of(make_series, tmp_path, second[1], EDIT, second)
    assert [m.outcome for m in moves] == [Outcome.LANDED_IDENTICAL] * 2


def test_a_patch_of_which_upstream_took_most_has_landed_modified(make_series: Make, tmp_path: Path) -> None:
    def changed(*places: int) -> str:
        return "".join(
            f"value_{i} = compute_value({i})\n" if i in places else f"value_{i} = {i}\n" for i in range(30)
        )

    taken = changed(2, 14).replace("value_26 = 26", "value_26 = elsewhere")
    found, evidence = outcome(
        make_series, tmp_path, {LIB: taken}, ("Change three", {LIB: changed(2, 14, 26)})
    )
    assert found is Outcome.LANDED_MODIFIED
    assert evidence.startswith("2 of its 3 hunks reverse-apply to 9.9.9")


def test_a_merge_that_leaves_nothing_is_empty_and_is_not_called_landed(
    make_series: Make, tmp_path: Path
) -> None:
    """Both removed the line: no text of the patch is left that would show where it went."""
    without = {LIB: FILES[LIB].replace("value_10 = 10\n", "")}
    found, evidence = outcome(make_series, tmp_path, without, ("Drop the tenth value", without))
    assert found is Outcome.EMPTY
    assert "leaves nothing" in evidence


def test_a_pick_that_git_could_not_begin_is_an_error_and_not_empty(tmp_path: Path) -> None:
    """A full disk or a lock leaves a clean tree too, and --skip was offered then."""
    repository = commit_each(tmp_path / "source", [("base", {"f": "1\n"}), ("patch", {"f": "2\n"})])
    base, tip = (repository.resolve(name) for name in ("HEAD~1", "HEAD"))
    repository.run("checkout", "--quiet", "--detach", "HEAD~1")
    (repository.root / ".git/index.lock").touch()
    with pytest.raises(SeriesError, match=r"(?s)cherry-pick .* exited with 128:.*index\.lock"):
        move.pick(move.Workspace(repository, base, tip, base, "new"), tip)


def test_a_forecast_goes_on_past_a_conflict_for_patches_that_do_not_need_it(
    make_series: Make, tmp_path: Path
) -> None:
    needing = ("Use the tenth value", {LIB: EDIT[1][LIB].replace("value_11 = 11", "value_11 = value_10")})
    moves = forecast_of(
        make_series,
        tmp_path,
        {LIB: FILES[LIB].replace("value_10 = 10", "value_10 = 11")},
        EDIT,
        HEADER,
        needing,
    )
    assert [m.outcome for m in moves] == [Outcome.CONFLICT, Outcome.CLEAN, Outcome.NOT_TRIED]
    assert moves[2].evidence == ("it needs Change-the-tenth-value",)


def test_a_forecast_changes_nothing_here(make_series: Make, tmp_path: Path) -> None:
    patches = make_series(EDIT, base=FILES)
    before = {p.name: p.read_bytes() for p in patches.iterdir()}
    release = Release(NEW, checkout_of(BASE | {LIB: "gone\n"}), "a fixture")
    forecast.run_forecast(tmp_path / "build", model.read(patches), PIN, checkout_of(FILES), release)
    assert {p.name: p.read_bytes() for p in patches.iterdir()} == before


def test_what_a_patch_needs_is_what_it_changes_stands_beside_or_includes(
    make_series: Make, tmp_path: Path
) -> None:
    using = ("Use the header", {"csrc/flash_attn/src/twins.h": '#include "fork.h"\n' + TWINS})
    beside = ("Change the eleventh value", {LIB: EDIT[1][LIB].replace("value_11 = 11", "value_11 = 12")})
    apart = ("Change the last value", {LIB: beside[1][LIB].replace("value_29 = 29", "value_29 = 30")})
    whole = model.read(make_series(EDIT, HEADER, using, beside, apart, base=FILES))
    space = move.workspace(
        tmp_path / "work", whole, PIN, checkout_of(FILES), Release(NEW, checkout_of(FILES), "a fixture")
    )
    graph = landed.needs(space.repository, space.commits)
    places = {commit: place for place, commit in enumerate(space.commits, 1)}
    assert {places[c]: sorted(places[n] for n in needed) for c, needed in graph.items()} == {
        1: [],
        2: [],
        3: [2],
        4: [1],
        5: [],
    }


def test_the_same_patch_id_in_upstream_s_history_is_evidence(make_series: Make, tmp_path: Path) -> None:
    steps = [("release", FILES), ("Take the patch", EDIT[1]), ("Change it more", {LIB: "other\n"})]
    repository = commit_each(tmp_path / "upstream", steps, UpstreamError)
    commits = repository.run("rev-list", "--reverse", "HEAD").split()
    whole = model.read(make_series(EDIT, base=FILES))
    pins = [PIN.model_copy(update={"commit": commits[0]}), NEW.model_copy(update={"commit": commits[2]})]
    release = Release(pins[1], checkout_of(FILES | {LIB: "other\n"}), "a fixture")
    (found,) = forecast.run_forecast(
        tmp_path / "build", whole, pins[0], checkout_of(FILES), release, repository
    ).moves
    assert found.outcome is Outcome.LANDED_IDENTICAL
    assert found.evidence[0].endswith("Take the patch has the same patch-id")


def test_a_hostile_configuration_changes_no_forecast(
    make_series: Make, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    new = {LIB: "one\n" + FILES[LIB].replace("value_20 = 20", "value_20 = 21")}
    plain = forecast_of(make_series, tmp_path, new, EDIT, HEADER)
    request.getfixturevalue("hostile_git")
    assert forecast_of(make_series, tmp_path, new, EDIT, HEADER) == plain
