"""Which flash_attn is installed, what is in its way, and whether it imports."""

import base64
import csv
import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Iterator, List, Optional, Tuple

from checks import Problem
from machine_facts import Machine
from wheel_facts import EXTENSION, Wheel, extension, of_folder, text_of


def installed(machine: Machine) -> Tuple[Optional[Wheel], List[Problem]]:
    """The wheel that ``import flash_attn`` means, and what is in its way."""
    roots = [root for root in machine.path if (root / "flash_attn/__init__.py").is_file()]
    infos = machine.distributions.get("flash-attn", [])
    ours = [root for root in roots if (root / "flash_attn/_fork.json").is_file()]
    if not ours:
        others = ", ".join(str(root / "flash_attn") for root in roots)
        if not others:
            return None, [Problem("not-installed", "flash_attn is not installed", "Install a wheel.")]
        remedy = "pip uninstall flash-attn; then install a wheel of this project."
        return None, [Problem("not-ours", f"{others} is not of this project", remedy)]
    root = ours[0]
    found = []  # type: List[Problem]
    own = [info for info in infos if info.parent == root]
    if roots[0] != root:
        found.append(_in_the_way(roots[0] / "flash_attn", root / "flash_attn", machine))
    if len(own) > 1:
        what = "two distributions lie in one folder: {}".format(", ".join(str(info) for info in own))
        found.append(
            Problem("second", what, "pip uninstall flash-attn, until none is left; then install one.")
        )
    first = next((path for path in map(extension, machine.path) if path), None)
    if first is not None and root not in first.parents:
        found.append(_in_the_way(first, root / EXTENSION, machine))
    if not own:
        what = "{} has no .dist-info beside it: pip does not know it".format(root / "flash_attn")
        found.append(Problem("not-installed", what, "Install the wheel by pip."))
        return None, found
    for info in own:
        found += _changed(root, info) if len(own) == 1 else []
    return of_folder(root, own[-1]), found


def _in_the_way(first: Path, ours: Path, machine: Machine) -> Problem:
    """Something that Python finds before the wheel's."""
    root = first.parent if first.parent in machine.path else first.parent.parent
    what = f"a second one is in the way: Python takes {first} before {ours}"
    if any(info.parent == root for info in machine.distributions.get("flash-attn", [])):
        return Problem("second", what, "pip uninstall flash-attn, of the Python or user that it belongs to.")
    if str(root) == os.getcwd():
        return Problem("second", what, "Start Python in another folder, or rename that one.")
    in_variable = str(root) in map(os.path.abspath, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    remedy = (
        "Take {} out of PYTHONPATH." if in_variable else "Remove it from {}, or that folder from sys.path."
    )
    return Problem("second", what, remedy.format(root))


def _changed(root: Path, info: Path) -> Iterator[Problem]:
    """Files of the wheel that are not as they were installed: another package wrote over them."""
    bad = []
    for row in csv.reader(text_of(info / "RECORD").splitlines()):
        if len(row) == 3 and row[1].startswith("sha256=") and row[0].startswith("flash_attn"):
            path = root / row[0]
            digest = hashlib.sha256(path.read_bytes()).digest() if path.is_file() else b""
            if base64.urlsafe_b64encode(digest).decode().rstrip("=") != row[1][len("sha256=") :]:
                bad.append(row[0])
    if bad:
        what = "{} of its files are gone or others than RECORD says, as {}; did another package write it?"
        remedy = "pip install --force-reinstall --no-deps WHEEL"
        yield Problem("files", what.format(len(bad), bad[0]), remedy)


def try_import(name: str) -> str:
    """What importing a module in another process says at its end; empty if it works."""
    command = [sys.executable, "-c", "import " + name]
    try:
        pipe = subprocess.PIPE
        done = subprocess.run(command, stdout=pipe, stderr=pipe, timeout=300, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    if done.returncode == 0:
        return ""
    return lines[-1] if lines else f"Python ended with status {done.returncode}"
