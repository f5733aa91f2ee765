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
    extras: Mapping[str, str] = field(default_factory=dict)  # by the option that needs the extra
    requirements: tuple[str, ...] = ()  # beside the build system's own
    module: str = ""  # of scripts.commands; empty: the command's name

    @property
    def module_name(self) -> str:
        """The module with its parser, such as ``scripts.commands.build``."""
        return f"scripts.commands.{self.module or self.name}"

    def extra_for(self, arguments: Sequence[str]) -> str:
        """The extra that these arguments need; empty for none.

        >>> command("bench").extra_for(["--picture=times.svg"])
        'bench'
        >>> command("bench").extra_for(["build"])
        ''
        """
        words = {argument.partition("=")[0] for argument in arguments}
        return next((extra for option, extra in self.extras.items() if option in words), "")


_PYTEST = ("pytest>=8.4",)  # guards may be tests

COMMANDS = (
    Command("build", "Build wheels into dist/", Group.WHEELS, {"--containers": "containers"}),
    Command("matrix", "List the targets, or render the workflow that builds them", Group.WHEELS),
    Command("archs", "Check which compute capabilities may share PTX", Group.LAB),
    Command("compare", "Say what a patch does to kernels' machine code", Group.LAB),
    Command(
        "bench",
        "Measure the kernels on this machine's GPU, or the build (bench -- build), beside upstream's",
        Group.LAB,
        {"--picture": "bench"},
    ),
    Command("image", "Make a container image where no registry can be reached", Group.WHEELS),
    Command("audit", "Check that wheels need no library that users lack", Group.WHEELS),
    Command("verify", "Prove the wheels in dist/ on this machine's GPU", Group.WHEELS),
    Command("emulate", "Run the kernels without a GPU, interpreted; finds faults, proves nothing", Group.LAB),
    Command("apply", "Apply the patch series to upstream, in build/source", Group.SERIES),
    Command("export", "Write the commits of build/source back to patches/", Group.SERIES),
    Command("patches", "List the patches: purpose, files, guards, and which needs which", Group.SERIES),
    Command(
        "guards", "Run each patch's guard without and with the patch", Group.SERIES, requirements=_PYTEST
    ),
    Command("forecast", "Say what becomes of the patches on other releases of upstream", Group.SERIES),
    Command("rebase", "Move the series to another release of upstream", Group.SERIES, requirements=_PYTEST),
    Command("each", "Run a command after every patch", Group.SERIES, module="prefixes"),
    Command("bisect", "Find the first patch with which a command fails", Group.SERIES, module="prefixes"),
    Command("timings", "Time the series' commands beside git am and quilt", Group.LAB),
    Command("changes", "Render CHANGES.md from the patches", Group.SERIES),
    Command("lint", "Check the form of the patches", Group.SERIES),
)


def command(name: str) -> Command:
    """The command of this name."""
    return next(entry for entry in COMMANDS if entry.name == name)
