"""Run flash_attn's doctor on a Python of the user's: the program that wheels carry, for wheels in a folder.

A patch adds it to upstream's package, so its text is in the series. No tree is needed, and no network.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from unidiff.patch import PatchSet

from scripts.base import files
from scripts.base.errors import SeriesError, UsageError

if TYPE_CHECKING:
    from scripts.series.model import Series

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


def program(series: Series) -> dict[str, str]:
    """The texts of the doctor's files, by their names.

    Raises:
        SeriesError: not one patch alone has it.
    """
    having = [p for p in series.patches if any(Path(c.path).parent == Path(FOLDER) for c in p.files)]
    if len(having) != 1:
        names = ", ".join(p.name for p in having) or "none"
        raise SeriesError(
            f"one patch of {series.folder} must add {FOLDER} whole, which nox -s doctor runs; these touch "
            f"it: {names}."
        )
    text = having[0].content.decode("utf-8")
    changed = PatchSet(text[text.index("\ndiff --git ") + 1 :])
    return {
        Path(f.path).name: "".join(line.value for hunk in f for line in hunk)
        for f in changed
        if Path(f.path).parent == Path(FOLDER)
    }


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


def ask(series: Series, question: Question, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the doctor; what people read goes to the terminal, JSON into the result.

    Args:
        series: whose patch has the program.
        question: what to ask.
        folder: where the program's files are put.

    Raises:
        UsageError: the Python does not start.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in program(series).items():
        files.write(folder / name, text)
    command = [str(question.python), "-B", str(folder), *question.words]
    try:
        return subprocess.run(
            command, text=True, stdout=subprocess.PIPE if question.as_json else None, check=False
        )
    except OSError as e:
        raise UsageError(f"--python {question.python}: {e.strerror}.") from e
