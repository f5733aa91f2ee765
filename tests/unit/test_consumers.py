"""What docs/consumers.md says of consumers' checks, against the versions that wheels have; and --base-version."""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from scripts.base.errors import UsageError
from scripts.series import model
from scripts.source import matrix, upstream
from scripts.wheels.building import build, containers
from scripts.wheels.building.build import BuildOptions, Place
from scripts.wheels.building.jobs import Choice, chosen
from scripts.wheels.packing import metadata, python_wheel
from tests.unit.conftest import ROOT, TWO, Command, Make, plan, toolchain

MATRIX = matrix.load(ROOT / "wheel_matrix.toml")
TEXT = (ROOT / "docs/consumers.md").read_text(encoding="utf-8")
COMPARED = {">=": operator.ge, "<=": operator.le, "<": operator.lt, "==": operator.eq}


@dataclass(frozen=True)
class Consumer:
    """A row of the table."""

    name: str
    reads: str
    how: str
    check: tuple[str, ...]
    takes: str

    def accepts(self, version: str) -> bool:
        """Whether the check passes, as the consumer does it."""
        if self.how == "requirement":
            return SpecifierSet(", ".join(self.check)).contains(version)
        parts = [part.split(" ", 1) for part in self.check]
        return all(COMPARED[sign](Version(version), Version(limit)) for sign, limit in parts)

    def seen(self, loaded: matrix.Matrix) -> list[str]:
        """The version that it reads of each wheel; __version__ is that of upstream's files."""
        if self.reads == "__version__":
            return [loaded.upstream.version.partition("+")[0]]
        return [loaded.version(target) for target in loaded.targets]


def rows() -> list[Consumer]:
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in TEXT.splitlines() if line[:1] == "|"]
    return [
        Consumer(name, reads.strip("`"), how, tuple(re.findall(r"`([^`]+)`", check)), takes.strip("`"))
        for name, _, reads, how, check, takes in cells[2:]
    ]


def test_the_table_is_read_whole() -> None:
    assert len(rows()) == 10
    assert {row.how for row in rows()} == {"order", "requirement"}
    assert {row.reads for row in rows()} == {"distribution", "__version__"}


@pytest.mark.parametrize("consumer", rows(), ids=lambda row: row.name)
def test_a_consumer_takes_our_wheels_as_the_table_says(consumer: Consumer) -> None:
    accepted = {consumer.accepts(version) for version in consumer.seen(MATRIX)}
    if consumer.takes == "yes":
        assert accepted == {True}
        return
    assert accepted == {False}
    option, version = consumer.takes.split(" ")
    assert option == "--base-version"
    others = MATRIX.passing_for(version)
    assert {consumer.accepts(seen) for seen in consumer.seen(others)} == {True}


def test_no_later_release_than_the_one_that_is_told_would_do() -> None:
    """The table names the nearest: TransformerEngine's comparison counts the label, which 2.8.3 fails by."""
    for consumer in rows():
        if consumer.takes == "yes":
            continue
        told = consumer.takes.split(" ")[1]
        later = [v for v in MATRIX.releases if Version(told) < Version(v) < Version(MATRIX.upstream.version)]
        for version in later:
            assert not any(consumer.accepts(seen) for seen in consumer.seen(MATRIX.passing_for(version)))


def test_a_base_version_comes_with_a_label_of_what_the_wheel_is() -> None:
    target, revision = MATRIX.default(), MATRIX.table.revision
    version = MATRIX.passing_for("2.8.3").version(target)
    assert version == f"2.8.3+det.{revision}.of.2.8.3.post1.{target.label}"
    assert str(Version(version)) == version
    assert Version("2.8.3") < Version(version) < Version("2.8.3.post1")


def test_a_commit_that_is_no_release_stays_in_the_label(tmp_path: Path) -> None:
    path = tmp_path / "wheel_matrix.toml"
    text = (ROOT / "wheel_matrix.toml").read_text(encoding="utf-8")
    path.write_text(text.replace('version = "2.8.3.post1"', 'version = "2.8.4.dev0+g0251105a"', 1))
    loaded = matrix.load(path)
    version = loaded.passing_for("2.8.3").version(loaded.default())
    assert f".of.2.8.4.dev0.g0251105a.{loaded.default().label}" in version
    assert str(Version(version)) == version


@pytest.mark.parametrize(
    "version", ["2.8.3.post1", "2.8.3.post2", "2.7.4.post1", "2.9.0", "2.8", "2.8.3+x", "x", ""]
)
def test_a_base_version_is_an_earlier_release_of_the_same_line(command: Command, version: str) -> None:
    with pytest.raises(UsageError, match=r"earlier release of 2\.8 .* lists: .*2\.8\.2, 2\.8\.3\."):
        MATRIX.passing_for(version)
    assert command("build", "--dry-run", "--base-version", version).status == UsageError.exit_code


def test_a_build_tells_the_version_that_its_wheel_will_have(command: Command) -> None:
    version = MATRIX.passing_for("2.8.3").version(MATRIX.default())
    assert version in command("build", "--dry-run", "--base-version", "2.8.3").out
    for option in ("--stock", "--kernels-only"):
        told = command("build", "--dry-run", "--base-version", "2.8.3", option)
        assert (told.status, "--base-version is for wheels" in told.err) == (UsageError.exit_code, True)


def test_a_python_upstream_s_wheel_may_pass_for_another_release(
    command: Command, make_series: Make, tmp_path: Path
) -> None:
    told = command("build", "--upstream", "flash-attn-4", "--list", "--base-version", "4.0.0b35")
    loaded = MATRIX.of("flash-attn-4").passing_for("4.0.0b35")
    assert f"flash_attn_4-4.0.0b35+det.{loaded.table.revision}.of.4.0.0b36-py3" in told.out
    applied = plan(tmp_path, toolchain(tmp_path, "")).tree
    facts = python_wheel.provenance(loaded, model.read(make_series(*TWO)), applied)
    assert (facts["base_version"], facts["upstream"]["version"]) == ("4.0.0b35", "4.0.0b36")


def test_the_provenance_says_so_and_that_of_other_wheels_has_no_such_key(
    tmp_path: Path, make_series: Make
) -> None:
    series, planned = model.read(make_series(*TWO)), plan(tmp_path, toolchain(tmp_path, ""))
    plain, other = (
        metadata.provenance(loaded, MATRIX.default(), series, planned)
        for loaded in (MATRIX, MATRIX.passing_for("2.8.3"))
    )
    assert "base_version" not in plain
    assert other == {**plain, "base_version": "2.8.3"}


def test_a_container_is_asked_for_the_same_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []

    def note(request: containers.Request, *_: object) -> list[Path]:
        asked.append(request.options)
        return []

    monkeypatch.setattr(containers, "build", note)
    loaded = MATRIX.passing_for("2.8.3")
    how, place = BuildOptions(upstream.Source.SDIST), Place(tmp_path, tmp_path, True)
    build.in_containers(loaded, chosen(loaded, Choice()), how, place, "image")
    build.in_containers(MATRIX, chosen(MATRIX, Choice()), how, place, "image")
    assert [" ".join(words).count("--base-version 2.8.3") for words in asked] == [1, 0]
