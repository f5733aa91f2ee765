"""Say why ``import flash_attn`` or a call fails on this machine, and which wheel fits it.

    python -m flash_attn.doctor                    # the installed wheel
    python -m flash_attn.doctor --head-dim 96      # would calls of this head dim find kernels?
    python -m flash_attn.doctor WHEEL_OR_FOLDER …  # which of these wheels fit

Nothing but Python's standard library is needed: neither torch nor the extension is imported here. What a
wheel is, its own METADATA, WHEEL, RECORD and _fork.json say. This folder also runs alone, as a script.

Exit status: 0 nothing is wrong, 1 something is.
"""

import argparse
import json
import os
import re
import sys
import zipfile
from pathlib import Path
from typing import Any, Dict, Iterator, List, Sequence

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # for what lies beside it

from checks import Problem, dotted, problems, size_of
from copies import installed, try_import
from machine_facts import Machine, driver_cuda
from wheel_facts import Wheel, major, numbers, of_file


def right_version(wheel: Wheel, machine: Machine) -> str:
    """The version of the wheel that fits, by the parts of this one's label that name CUDA and torch."""
    served, torch = driver_cuda(machine), machine.torch
    cuda = torch["cuda"] if torch and torch["cuda"] else None
    if cuda is None or (served is not None and (major(cuda) or 0) > served):
        # torch has to be installed anyway
        cuda, torch = wheel.cuda, None
        if served is not None and served < (major(cuda) or 0):
            cuda = machine.driver["cuda"] or str(served)
    renamed = {"cu" + str(major(wheel.cuda)): "cu" + str(major(cuda))}
    if wheel.cuda:
        renamed["cu" + wheel.cuda.replace(".", "")] = "cu" + str(cuda).replace(".", "")
    if torch and numbers(wheel.torch):
        names = [
            "torch{}.{}".format(*numbers(v)[:2]) for v in (wheel.torch, torch["version"]) if numbers(v)[1:]
        ]
        renamed.update(dict([names]) if len(names) == 2 else {})
    version = str(wheel.version)
    public, _, label = version.partition("+")
    # A label is split at points, and torch2.11 has one.
    parts = re.findall(r"torch\d+\.\d+|[^.]+", label)
    return public + ("+" if label else "") + ".".join(renamed.get(part, part) for part in parts)


def advice(wheel: Wheel, found: Sequence[Problem], machine: Machine, head_dims: Sequence[int]) -> str:
    """The wheel that fits, in words."""
    checks = {problem.check for problem in found if problem.wheel}
    if not checks:
        return f"{wheel.name} {wheel.version} is the right wheel for this machine"
    more, options = [], []
    if "python" in checks:
        more.append("for Python {} ({})".format(".".join(map(str, numbers(machine.python)[:2])), machine.tag))
    if "glibc" in checks:
        more.append(f"for glibc {machine.glibc}" if machine.glibc else "for another C library")
    if "platform" in checks:
        more.append(f"for {machine.system} {machine.processor}")
    if "gpu-kernels" in checks:
        here = sorted({gpu["compute_capability"] for gpu in machine.driver["gpus"]})
        names = [capability.replace(".", "") for capability in here]
        more.append(
            "with sm{} in its name (compute capability {})".format(", sm".join(names), ", ".join(here))
        )
        options.append("--arch " + ",".join(sorted({*names})))
    if "head-dim" in checks:
        sizes = sorted({size for size in map(size_of, head_dims) if size})
        more.append("with {} in its name".format(", ".join(f"hdim{s}" for s in sizes)))
        options.append("--kernels " + ",".join(f"hdim{s}" for s in sorted({*sizes, *wheel.head_dims()})))
    version = right_version(wheel, machine)
    words = "{} {}{}".format(wheel.name, version, " " + ", ".join(more) if more else "")
    if options:
        words += "; if there is none, nox -s build -- {} makes it".format(" ".join(options))
    return words


def candidates(places: Sequence[str]) -> List[Path]:
    """The files that were given, and the wheels in folders that were."""
    found = []  # type: List[Path]
    for place in map(Path, places):
        found += sorted(place.glob("*.whl")) if place.is_dir() else [place]
    return found


def examine(places: Sequence[str], head_dims: Sequence[int], importing: bool) -> Dict[str, Any]:
    """All that there is to say, as a JSON document."""
    machine = Machine()
    wheel, found = installed(machine)
    if wheel is not None:
        found += problems(wheel, machine, head_dims)
    wheels, fitting = [], []
    for path in candidates(places):
        try:
            candidate = of_file(path)
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            found.append(Problem("unreadable", f"{path} cannot be read: {error}", "Fetch it again."))
            continue
        if candidate is None:
            if str(path) in places:
                found.append(Problem("not-ours", f"{path} is no wheel of this project", "Leave it out."))
            continue
        against = problems(candidate, machine, head_dims)
        wheels.append({**candidate.as_data(), "problems": [p.as_data() for p in against]})
        if not any(problem.wheel for problem in against):
            label = [int(number) for number in re.findall(r"\d+", candidate.version)]
            fitting.append((major(candidate.cuda) or 0, label, -len(against), str(path)))
    right = None if wheel is None else advice(wheel, found, machine, head_dims)
    errors = {
        name: try_import(name) for name in ("torch", "flash_attn") if importing and (wheel or name == "torch")
    }
    failed = errors.get("flash_attn")
    if failed and wheel is not None and not any(problem.stops == "import" for problem in found):
        remedy = "Report it, with this program's --json."
        found.append(Problem("import", "importing flash_attn fails: " + failed, remedy))
    for problem in found if failed == "" else ():
        if problem.stops == "import":  # it does not stop it, and may stop a module of it
            problem.stops = "later"
    return {
        "format": 1,
        "machine": machine.as_data(),
        "wheel": wheel and wheel.as_data(),
        "problems": [problem.as_data() for problem in found],
        "import": errors,
        "right": right,
        "wheels": wheels,
        "fits": [best[-1] for best in sorted(fitting, reverse=True)],
    }


def tell(told: Dict[str, Any]) -> Iterator[str]:
    """Lines for people, of what ``examine`` says."""
    machine, torch, driver, wheel = (
        told["machine"],
        told["machine"]["torch"],
        told["machine"]["driver"],
        told["wheel"],
    )
    yield "this machine: Python {python} ({tag}), {system} {processor}, glibc {glibc}; {executable}".format(
        **machine
    )
    yield "  torch: " + ("{version}, CUDA {cuda}, in {place}".format(**torch) if torch else "none")
    gpus = ["{name} ({compute_capability})".format(**gpu) for gpu in driver["gpus"] or []]
    known = [driver["version"] or "", "CUDA " + driver["cuda"] if driver["cuda"] else "", *gpus]
    yield "  driver: " + (", ".join(word for word in known if word) or "none")
    if wheel:
        yield "installed: {name} {version}, in {place}".format(**wheel)
        yield "  " + _wheel_line(wheel)
    for name, error in told["import"].items():
        yield "import {}: {}".format(name, error or "works")
    for problem in told["problems"]:
        yield from _problem_lines(problem, "")
    for one in told["wheels"]:
        yield "{}: {}".format(
            Path(one["place"]).name, "fits" if one["place"] in told["fits"] else "does not fit"
        )
        yield "  " + _wheel_line(one)
        best = one["place"] in told["fits"][:1] and not wheel  # what else it needs is told once
        for problem in one["problems"]:
            if problem["wheel"] or best:
                yield from _problem_lines(problem, "  ")
    if told["right"]:
        yield "the wheel that fits: " + told["right"]
    if told["fits"] and (not wheel or any(problem["wheel"] for problem in told["problems"])):
        yield "of the wheels given: pip install " + told["fits"][0]
    elif told["wheels"] and not told["fits"]:
        yield "of the wheels given, none fits"


def _wheel_line(wheel: Dict[str, Any]) -> str:
    return "for CUDA {}, compute capability {}, head dims {}; {}; Python {}; {}".format(
        wheel["cuda"],
        ", ".join(map(dotted, wheel["architectures"])),
        ", ".join(map(str, wheel["head_dims"])),
        ", ".join(wheel["requires"]),
        wheel["requires_python"] or "any",
        ", ".join(wheel["tags"]),
    )


def _problem_lines(problem: Dict[str, Any], indent: str) -> Iterator[str]:
    when = {"import": "import fails", "calls": "a call fails", "later": "import works, but"}[problem["stops"]]
    yield "{}problem ({}): {}".format(indent, when, problem["what"])
    yield "{}  {}".format(indent, problem["remedy"])


def main(arguments: Sequence[str]) -> int:
    """Print what is wrong; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m flash_attn.doctor", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "wheels", nargs="*", metavar="WHEEL", help="wheels to choose from, or folders of them"
    )
    parser.add_argument(
        "--head-dim", type=int, action="append", default=[], metavar="N", help="that calls will have"
    )
    parser.add_argument(
        "--no-import", action="store_true", help="do not try the imports, in processes of their own"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(list(arguments))
    for place in options.wheels:
        if not os.path.exists(place):
            parser.error(f"{place}: no such file or folder")
    told = examine(options.wheels, options.head_dim, not options.no_import)
    if options.json:
        print(json.dumps(told, indent=1))
    else:
        for line in tell(told):
            print(
                line.encode(sys.stdout.encoding or "ascii", "replace").decode(sys.stdout.encoding or "ascii")
            )
    return 1 if told["problems"] or (told["wheels"] and not told["fits"]) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
