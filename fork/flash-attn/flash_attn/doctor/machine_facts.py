"""What a wheel has to fit: Python, the C library, torch, the driver and its GPUs."""

import ast
import csv
import ctypes
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

from wheel_facts import major, normal, numbers, text_of

FIRST_DRIVER = {11: 450, 12: 525, 13: 580}  # NVIDIA's branch that serves a CUDA release


class Machine:
    """What a wheel has to fit."""

    def __init__(self) -> None:
        self.python = platform.python_version()
        self.tag = "cp{}{}{}".format(*sys.version_info[:2], getattr(sys, "abiflags", ""))
        self.implementation = sys.implementation.name
        self.executable = sys.executable
        self.system, self.processor = platform.system(), platform.machine()
        self.glibc = _here_glibc()
        self.path = search_path()
        self.distributions = _distributions(self.path)
        self.torch = _torch(self.path)
        self.driver = _driver()

    def as_data(self) -> Dict[str, Any]:
        """For JSON."""
        keys = (
            "python",
            "tag",
            "implementation",
            "executable",
            "system",
            "processor",
            "glibc",
            "torch",
            "driver",
        )
        return {key: getattr(self, key) for key in keys}


def search_path() -> List[Path]:
    """The folders that a program of this Python looks for modules in; the current one comes first."""
    first = [] if getattr(sys.flags, "safe_path", False) or sys.flags.isolated else [os.getcwd()]
    own = os.path.dirname(os.path.abspath(__file__))
    rest = [entry for entry in sys.path if entry and os.path.abspath(entry) != own]
    return [Path(p) for p in dict.fromkeys(map(os.path.abspath, first + rest)) if os.path.isdir(p)]


def _here_glibc() -> str:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").replace("glibc", "").strip()
    except (AttributeError, ValueError, OSError):  # another C library, or another system
        return ""


def _distributions(path: Sequence[Path]) -> Dict[str, List[Path]]:
    """The .dist-info folders of each distribution, in the order of the search."""
    found = {}  # type: Dict[str, List[Path]]
    for folder in path:
        for info in sorted(folder.glob("*.dist-info")):
            found.setdefault(normal(info.name.split("-", 1)[0]), []).append(info)
    return found


def version_of(info: Path) -> str:
    """The version that a .dist-info folder is named after."""
    return info.name[: -len(".dist-info")].partition("-")[2]


def _torch(path: Sequence[Path]) -> Optional[Dict[str, Any]]:
    """Version and CUDA of the torch that would be imported, read from its version.py."""
    for folder in path:
        if not (folder / "torch/__init__.py").is_file():
            continue
        values = {"__version__": "unknown", "cuda": None, "hip": None}  # type: Dict[str, Any]
        try:
            body = ast.parse(text_of(folder / "torch/version.py")).body
        except SyntaxError:
            body = []
        for node in body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            value = getattr(node, "value", None)  # of an assignment
            for target in targets:
                if isinstance(target, ast.Name) and target.id in values and isinstance(value, ast.AST):
                    try:
                        values[target.id] = ast.literal_eval(value)
                    except (ValueError, TypeError, AttributeError):
                        continue
        told = {"version": values["__version__"], "cuda": values["cuda"], "hip": values["hip"]}
        return {**told, "place": str(folder / "torch")}
    return None


# The driver: each way fills in what those before it did not tell ------------------------------------------


def _driver() -> Dict[str, Any]:
    found = {"version": None, "cuda": None, "gpus": None, "error": None}  # type: Dict[str, Any]
    for ask in (_by_cuda, _by_nvml, _by_smi, _by_kernel):
        try:
            told = ask()
        except (OSError, AttributeError, ValueError, subprocess.SubprocessError):
            continue
        for key, value in told.items():
            if found[key] is None:
                found[key] = value
        if None not in (found["version"], found["cuda"], found["gpus"]):
            break
    return found


def _by_cuda() -> Dict[str, Any]:
    """Ask CUDA's driver API, as torch will."""
    cuda = ctypes.CDLL("libcuda.so.1")
    number = ctypes.c_int()
    told = {}  # type: Dict[str, Any]
    if cuda.cuDriverGetVersion(ctypes.byref(number)) == 0:
        told["cuda"] = f"{number.value // 1000}.{number.value % 1000 // 10}"
    status = cuda.cuInit(0)
    if status not in (0, 100):  # 100: there is no GPU
        return {**told, "error": f"CUDA's driver does not start: cuInit gives {status}"}
    gpus = []
    count = number.value if status == 0 and cuda.cuDeviceGetCount(ctypes.byref(number)) == 0 else 0
    for index in range(count):
        device, name, capability = ctypes.c_int(), ctypes.create_string_buffer(128), []
        cuda.cuDeviceGet(ctypes.byref(device), index)
        cuda.cuDeviceGetName(name, 128, device)
        for attribute in (75, 76):  # major, minor
            cuda.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
            capability.append(str(number.value))
        gpus.append({"name": name.value.decode(errors="replace"), "compute_capability": ".".join(capability)})
    return {**told, "gpus": gpus}


def _by_nvml() -> Dict[str, Any]:
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    text, number = ctypes.create_string_buffer(96), ctypes.c_int()
    if nvml.nvmlInit_v2() != 0:
        return {}
    told = {}
    if nvml.nvmlSystemGetDriverVersion(text, 96) == 0:
        told["version"] = text.value.decode()
    if nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(number)) == 0:
        told["cuda"] = f"{number.value // 1000}.{number.value % 1000 // 10}"
    nvml.nvmlShutdown()
    return told


def _by_smi() -> Dict[str, Any]:
    fields = "--query-gpu=name,compute_cap,driver_version"
    told = subprocess.run(
        ["nvidia-smi", fields, "--format=csv,noheader"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    rows = [[c.strip() for c in row] for row in csv.reader(told.stdout.decode(errors="replace").splitlines())]
    rows = [row for row in rows if len(row) == 3 and numbers(row[1])]
    if told.returncode != 0 or not rows:
        return {}
    gpus = [{"name": name, "compute_capability": capability} for name, capability, _ in rows]
    return {"version": rows[0][2], "gpus": gpus}


def _by_kernel() -> Dict[str, Any]:
    """What the kernel's module says, where no library is installed beside it, as in a container."""
    match = re.search(r"  (\d+\.\d+[\d.]*)  ", Path("/proc/driver/nvidia/version").read_text())
    return {"version": match.group(1)} if match else {}


def driver_cuda(machine: Machine) -> Optional[int]:
    """The latest CUDA that the driver serves; None where there is no driver, or it does not say."""
    told = major(machine.driver["cuda"])  # type: Optional[int]
    if told is not None:
        return told
    branch = major(machine.driver["version"])
    served = [cuda for cuda, first in FIRST_DRIVER.items() if branch is not None and branch >= first]
    return max(served) if served else None
