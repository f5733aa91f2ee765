"""Every command: its name, what it does in a line, its group, and what its nox session installs.

``noxfile.py`` reads this in nox's own environment, so it imports the standard library alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Group(str, Enum):
    """What a command works on."""

    WHEELS = "wheels"
    SERIES = "series"
    LAB = "lab"


@dataclass(frozen=True)
class Command:
    """One command, and one session of nox."""

    name: str
    line: str  # of nox -l and of --help: an imperative, without a full stop
    group: Group
    dependencies: str = ""  # the dependency group of pyproject.toml that it needs
    option_dependencies: Mapping[str, str] = field(default_factory=dict)  # and one of its options
    module: str = ""  # of scripts.commands; empty: the command's name

    @property
    def module_name(self) -> str:
        """The module with its parser, such as ``scripts.commands.build``."""
        return f"scripts.commands.{self.module or self.name}"

    def dependency_groups(self, arguments: Sequence[str]) -> list[str]:
        """The groups of pyproject.toml that these arguments need.

        >>> command("bench").dependency_groups(["--picture=times.svg"])
        ['pictures']
        >>> command("bench").dependency_groups(["build"])
        []
        >>> command("guards").dependency_groups([])
        ['guards']
        """
        words = {argument.partition("=")[0] for argument in arguments}
        always = [self.dependencies] if self.dependencies else []
        return always + [group for option, group in self.option_dependencies.items() if option in words]


COMMANDS = (
    Command(
        "build",
        "Build wheels into dist/",
        Group.WHEELS,
        option_dependencies={"--containers": "containers", "--sign": "signing", "--scheduler": "cluster"},
    ),
    Command("matrix", "List the targets, or render the workflow that builds them", Group.WHEELS),
    Command("archs", "Check which compute capabilities may share PTX", Group.LAB),
    Command(
        "compare",
        "Say what a patch does to kernels' machine code, or in which kernels two wheels differ",
        Group.LAB,
        option_dependencies={"--wheels": "comparing"},
    ),
    Command(
        "bench",
        "Measure the kernels on this machine's GPU, or the build (bench -- build), beside upstream's",
        Group.LAB,
        option_dependencies={"--picture": "pictures"},
    ),
    Command("image", "Make a container image where no registry can be reached", Group.WHEELS),
    Command("audit", "Check that wheels need no library that users lack", Group.WHEELS),
    Command(
        "index",
        "Write a static index of dist/ that pip and uv install from",
        Group.WHEELS,
        dependencies="index",
    ),
    Command(
        "release",
        "Do what comes before a release, in order, and go on where it stopped",
        Group.WHEELS,
        dependencies="releasing",
    ),
    Command("doctor", "Say which wheel fits a machine, and why an installed one fails", Group.WHEELS),
    Command(
        "verify",
        "Prove the wheels in dist/ on this machine's GPU",
        Group.WHEELS,
        dependencies="signing",
        option_dependencies={"--scheduler": "cluster"},
    ),
    Command(
        "inspect",
        "Say what a wheel is made of, and check every hash; or build it again",
        Group.WHEELS,
        dependencies="inspecting",
        module="inspection",
    ),
    Command(
        "cluster",
        "Run a Dask scheduler, or a worker that compiles and proves",
        Group.WHEELS,
        dependencies="cluster",
    ),
    Command(
        "emulate",
        "Run the kernels without a GPU, interpreted; finds faults, proves nothing",
        Group.LAB,
        option_dependencies={"--cpp": "cpp"},
    ),
    Command("apply", "Apply the patch series to upstream, in build/source", Group.SERIES),
    Command("edit", "Stop build/source at a patch, to change it", Group.SERIES),
    Command(
        "refresh",
        "Take the changes into the patch being edited, and replay the later ones",
        Group.SERIES,
        module="edit",
    ),
    Command("export", "Write the commits of build/source back to patches/, or make a branch", Group.SERIES),
    Command("patches", "List the patches: purpose, files, and which needs which", Group.SERIES),
    Command(
        "guards", "Run each patch's guard without and with the patch", Group.SERIES, dependencies="guards"
    ),
    Command("forecast", "Say what becomes of the patches on other releases of upstream", Group.SERIES),
    Command("rebase", "Move the series to another release of upstream", Group.SERIES, dependencies="guards"),
    Command(
        "each", "Run a command after every patch, or compile kernel files", Group.SERIES, module="prefixes"
    ),
    Command("bisect", "Find the first patch with which a command fails", Group.SERIES, module="prefixes"),
    Command("timings", "Time the series' commands beside git am", Group.LAB),
    Command("changes", "Render CHANGES.md from the patches", Group.SERIES),
    Command("lint", "Check the form of the patches", Group.SERIES),
)


def command(name: str) -> Command:
    """The command of this name."""
    return next(entry for entry in COMMANDS if entry.name == name)
