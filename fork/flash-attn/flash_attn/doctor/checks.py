"""What keeps a wheel from working on a machine."""

import os
import re
from typing import Any, Dict, Iterator, List, Optional, Sequence

from machine_facts import FIRST_DRIVER, Machine, driver_cuda, version_of
from wheel_facts import Numbers, Wheel, fits, major, numbers, requirements

HEAD_DIMS = (32, 64, 96, 128, 192, 256)  # that there are kernels for; a call takes the next larger


class Problem:
    """One thing that is wrong, what to do, and whether another wheel would do."""

    def __init__(
        self, check: str, what: str, remedy: str, stops: str = "import", wheel: bool = False
    ) -> None:
        self.check, self.what, self.remedy, self.stops, self.wheel = check, what, remedy, stops, wheel

    def as_data(self) -> Dict[str, Any]:
        """For JSON."""
        return dict(vars(self))


def problems(wheel: Wheel, machine: Machine, head_dims: Sequence[int] = ()) -> List[Problem]:
    """What keeps a wheel from working on a machine."""
    found = []  # type: List[Problem]
    for check in (_platform, _python, _c_library, _cuda, _requirements, _gpus):
        found += check(wheel, machine)
    return found + [p for head_dim in head_dims for p in _head_dim(wheel, head_dim)]


def _platform(wheel: Wheel, machine: Machine) -> Iterator[Problem]:
    platforms = [tag.rsplit("-", 1)[-1] for tag in wheel.tags]
    here = "linux" if machine.system == "Linux" else machine.system.lower()
    if platforms and not any(p == "any" or (here in p and p.endswith(machine.processor)) for p in platforms):
        what = "it is for {}; here is {} {}".format(", ".join(platforms), machine.system, machine.processor)
        yield Problem("platform", what, "Use a machine of that kind.", wheel=True)


def _python(wheel: Wheel, machine: Machine) -> Iterator[Problem]:
    wanted = ["{}-{}".format(*tag.split("-")[:2]) for tag in wheel.tags]
    here = machine.tag if machine.implementation == "cpython" else machine.implementation
    version = numbers(machine.python)
    any_of = ["py3-none", f"{here}-{here}", "{}-none".format(here.rstrip("t"))]
    stable = [w for w in wanted if w.endswith("-abi3") and not here.endswith("t")]
    fitting = any(w in any_of for w in wanted) or any((3, int(w[3:-5])) <= version for w in stable)
    if wanted and not fitting:
        what = "it is for {}; here is {} ({} {})".format(
            ", ".join(wanted), here, machine.implementation, machine.python
        )
    elif not fits(machine.python, wheel.requires_python):
        what = f"it asks for Python {wheel.requires_python}; here is Python {machine.python}"
    else:
        return
    yield Problem("python", what, "Use such a Python, or a wheel for this one.", wheel=True)


def _c_library(wheel: Wheel, machine: Machine) -> Iterator[Problem]:
    named = [m.groups() for m in (re.search(r"-manylinux_(\d+)_(\d+)_", tag) for tag in wheel.tags) if m]
    need = min(tuple(map(int, n)) for n in named) if named else numbers(wheel.glibc)
    if need and machine.system == "Linux" and numbers(machine.glibc) < need:
        here = "glibc " + machine.glibc if machine.glibc else "another C library"
        what = "it needs glibc {} or later; here is {}".format(".".join(map(str, need)), here)
        yield Problem("glibc", what, "Use a later release of the system, or a container of one.", wheel=True)


def _cuda(wheel: Wheel, machine: Machine) -> Iterator[Problem]:
    want, served, torch = major(wheel.cuda), driver_cuda(machine), machine.torch
    if want is None:
        return
    target = want if served is None else min(want, served)
    install = f"Install a torch that is built for CUDA {target}; pytorch.org names its index."
    if torch is None:
        yield Problem("torch-missing", "torch is not installed", install)
    elif torch["cuda"] is None:
        kind = "AMD's ROCm" if torch["hip"] else "the CPU alone"
        what = "torch {} is built for {}".format(torch["version"], kind)
        yield Problem("torch-cpu", what, install)
    elif major(torch["cuda"]) != want:
        what = "wrong CUDA: it is for CUDA {}, torch {} is built for CUDA {}".format(
            want, torch["version"], torch["cuda"]
        )
        usable = served is None or (major(torch["cuda"]) or 0) <= served  # else torch has to change
        remedy = "Install the wheel for CUDA {}, or a torch for CUDA {}.".format(major(torch["cuda"]), want)
        yield Problem("cuda-major", what, remedy if usable else install, wheel=usable)
    if served is not None and served < want:
        what = "the driver{} is too old: it serves CUDA {}, the wheel is for CUDA {}".format(
            " " + machine.driver["version"] if machine.driver["version"] else "",
            machine.driver["cuda"] or served,
            want,
        )
        branch = FIRST_DRIVER.get(want)
        remedy = "Install NVIDIA's driver {}, or the wheel and a torch for CUDA {}.".format(
            f"{branch} or later" if branch else f"for CUDA {want}", served
        )
        yield Problem("driver-old", what, remedy, "calls", wheel=True)


def _requirements(wheel: Wheel, machine: Machine) -> Iterator[Problem]:
    for name, specifier in requirements(wheel):
        if name == "torch":
            version = machine.torch["version"] if machine.torch else None
        else:
            infos = machine.distributions.get(name)
            version = version_of(infos[0]) if infos else None
            if version is None:
                remedy = f"pip install '{name}{specifier}'"
                yield Problem("requirement", f"the package {name} is not installed", remedy)
        if version is not None and numbers(version) and not fits(version, specifier):
            what = f"it asks for {name}{specifier}; here is {version}"
            pinned = name == "torch" and "==" in specifier
            remedy = f"pip install '{name}{specifier}'"
            if pinned:
                remedy = "Install the wheel for torch {}.{}, or {}{}.".format(
                    *numbers(version)[:2], name, specifier
                )
            yield Problem("torch-version" if name == "torch" else "requirement", what, remedy, wheel=pinned)


def runs_on(architecture: str, capability: Numbers) -> bool:
    """Whether machine code for ``90``, ``90a`` or ``100f`` runs on a GPU: its own, later minor versions."""
    match = re.match(r"(\d+)(\d)([af]?)$", architecture)
    if not match:
        return False
    own = (int(match.group(1)), int(match.group(2)))
    return own == capability or (
        match.group(3) != "a" and own[0] == capability[0] and own[1] <= capability[1]
    )


def _gpus(wheel: Wheel, machine: Machine) -> Iterator[Problem]:
    driver = machine.driver
    if driver["error"]:
        yield Problem("driver-broken", driver["error"], "Reboot, or install the driver again.", "calls")
        return
    if driver["gpus"] is None:
        what, remedy = "there is no NVIDIA driver", "Install one."
        if driver["version"]:
            what = "the driver {} is loaded, but its library libcuda.so.1 is not found".format(
                driver["version"]
            )
            remedy = "In a container, ask for GPUs (--gpus all); else install the driver again."
        yield Problem("driver-missing", what, remedy, "calls")
    elif not driver["gpus"]:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        what = "the driver shows no GPU"
        if hidden is not None:
            what += f"; CUDA_VISIBLE_DEVICES is {hidden!r}"
        yield Problem("gpu-missing", what, "See what nvidia-smi lists.", "calls")
    portable = [
        numbers(f[:-1] + "." + f[-1])
        for flag in wheel.flags
        for f in re.findall(r"code=.*compute_(\d+)", flag)
    ]
    for number, gpu in enumerate(driver["gpus"] or []):
        capability = numbers(gpu["compute_capability"])
        if any(runs_on(a, capability) for a in wheel.architectures) or any(p <= capability for p in portable):
            continue
        if wheel.architectures:
            what = "GPU {} ({}, compute capability {}) has no kernels in it: it has those of {}".format(
                number, gpu["name"], gpu["compute_capability"], ", ".join(map(dotted, wheel.architectures))
            )
            remedy = "Install a wheel with sm{} in its name.".format(
                gpu["compute_capability"].replace(".", "")
            )
            yield Problem("gpu-kernels", what, remedy, "calls", wheel=True)


def dotted(architecture: str) -> str:
    """An architecture as a compute capability: 90a is 9.0a."""
    return re.sub(r"(\d)([af]?)$", r".\1\2", architecture)


def size_of(head_dim: int) -> Optional[int]:
    """The head dim of the kernels that a call takes."""
    return next((size for size in HEAD_DIMS if head_dim <= size), None)


def _head_dim(wheel: Wheel, head_dim: int) -> Iterator[Problem]:
    size = size_of(head_dim)
    if size is None:
        yield Problem("head-dim", f"no kernel takes head dim {head_dim}", "At most 256 works.", "calls")
        return
    words = {"fwd": "the forward pass", "split": "decode, masks and biases", "bwd": "gradients"}
    missing = [words[kind] for kind in words if size not in wheel.head_dims(kind)]
    if missing and wheel.kernels:
        has = ", ".join(map(str, wheel.head_dims())) or "none"
        what = "it has no kernels of head dim {} for {}; it has head dims {}".format(
            size, ", ".join(missing), has
        )
        if size != head_dim:
            what += f" ({head_dim} takes those of {size})"
        remedy = f"Install a wheel with hdim{size} in its name."
        yield Problem("head-dim", what, remedy, "calls", wheel=True)
