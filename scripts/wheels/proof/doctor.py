"""Run flash_attn's doctor on a Python of the user's: the program that wheels carry, for wheels in a folder.

It is among our own files. No tree is needed, and no network.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.base import files
from scripts.base.errors import SeriesError, UsageError

if TYPE_CHECKING:
    from scripts.series.own import OwnFiles

FOLDER = "flash_attn/doctor"


@dataclass(frozen=True)
class Question:
    """What a user asks the doctor."""

    python: Path
    wheels: tuple[Path, ...]  # files, or folders of them
    head_dims: tuple[int, ...] = ()
    importing: bool = True
    as_json: bool = False

    @property
    def words(self) -> list[str]:
        """The doctor's own command line."""
        return [
            *(f"--head-dim={size}" for size in self.head_dims),
            *([] if self.importing else ["--no-import"]),
            *(["--json"] if self.as_json else []),
            *(str(path.resolve()) for path in self.wheels),
        ]


def program(own: OwnFiles) -> dict[str, bytes]:
    """The doctor's files, by their names.

    Raises:
        SeriesError: there is none.
    """
    found = {Path(name).name: text for name, text in own.contents.items() if str(Path(name).parent) == FOLDER}
    if not found:
        raise SeriesError(f"{own.place(FOLDER)} is not there, which nox -s doctor runs.")
    return found


def users_python() -> Path:
    """The first python3 on PATH that is not of this program's own environment, which has no torch.

    Raises:
        UsageError: there is none.
    """
    own = Path(sys.prefix) / "bin"
    folders = [p for p in os.environ.get("PATH", "").split(os.pathsep) if Path(p) != own]
    found = shutil.which("python3", path=os.pathsep.join(folders))
    if found is None:
        raise UsageError("no python3 is on PATH; name the Python that is to import flash_attn with --python.")
    return Path(found)


def ask(own: OwnFiles, question: Question, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the doctor; what people read goes to the terminal, JSON into the result.

    Args:
        own: our own files, which have the program.
        question: what to ask.
        folder: where the program's files are put.

    Raises:
        UsageError: the Python does not start.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in program(own).items():
        files.write_bytes(folder / name, content)
    command = [str(question.python), "-B", str(folder), *question.words]
    try:
        return subprocess.run(
            command, text=True, stdout=subprocess.PIPE if question.as_json else None, check=False
        )
    except OSError as e:
        raise UsageError(f"--python {question.python}: {e.strerror}.") from e
