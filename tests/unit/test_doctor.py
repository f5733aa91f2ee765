"""What the doctor says in broken environments.

Each is real: a virtual environment of its own, with a wheel that has flash_attn's doctor and start, asked by
``python -m flash_attn.doctor``. Stand-ins are what would take gigabytes or a GPU: a torch of a few lines, and
libcuda as a library of a few functions.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from scripts.base.errors import SeriesError, UsageError
from scripts.series import own
from scripts.wheels.proof import doctor
from scripts.wheels.proof.doctor import Question
from tests.unit.conftest import ROOT, Command

OWN = own.read(ROOT / "fork/flash-attn")
HERE = f"cp{sys.version_info[0]}{sys.version_info[1]}"
UPSTREAM_INIT = 'import torch\nfrom flash_attn.interface import f\n__version__ = "2.8.3"\n'
# The first line is the patch's; the rest stands for upstream's imports.
INIT = "import flash_attn.fork_start\nimport flash_attn_2_cuda\nimport torch\nassert torch.version.cuda[:2] == '13'\n"


@dataclass(frozen=True)
class Made:
    """A wheel that says of itself what a test needs."""

    label: str = "det.2.cu13"
    cuda: str = "13.0"
    torch: str = "2.11.0"
    arch: tuple[str, ...] = ("90",)
    head_dims: tuple[int, ...] = (64, 128)
    requires: tuple[str, ...] = ("torch>=2.10", "einops")
    tag: str = "py3-none-manylinux_2_17_x86_64"
    requires_python: str = ">=3.10"
    init: str = INIT
    extension: str = "x"
    library: str = "x"  # with the kernels, which the extension calls

    @property
    def version(self) -> str:
        return f"2.8.3.post1+{self.label}"

    def write(self, folder: Path) -> Path:
        words = "_".join([*(f"hdim{d}" for d in self.head_dims), *(f"sm{a}" for a in self.arch)])
        info = f"flash_attn-{self.version}.dist-info"
        kernels = [f"{kind}_hdim{d}_fp16" for kind in ("fwd", "split", "bwd") for d in self.head_dims]
        facts = {"cuda": self.cuda, "torch": self.torch, "architectures": self.arch, "kernel_set": kernels}
        told = ["Metadata-Version: 2.4", "Name: flash_attn", f"Version: {self.version}"]
        told += [
            f"Requires-Python: {self.requires_python}",
            *(f"Requires-Dist: {line}" for line in self.requires),
        ]
        files = {
            "flash_attn/__init__.py": self.init,
            "flash_attn/fork_start.py": OWN.contents["flash_attn/fork_start.py"].decode(),
            **{f"{doctor.FOLDER}/{name}": text.decode() for name, text in doctor.program(OWN).items()},
            "flash_attn/_fork.json": json.dumps(facts),
            "flash_attn_2_cuda/__init__.py": "",
            "flash_attn_2_cuda/core.so": self.extension,
            "flash_attn/cpp/lib/libflash_attention_v2.so.1": self.library,
            f"{info}/METADATA": "\n".join(told) + "\n",
            f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {self.tag}\n",
        }
        lines = []
        for name, text in files.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
            lines.append(f"{name},sha256={digest},{len(text.encode())}\n")
        files[f"{info}/RECORD"] = "".join(lines) + f"{info}/RECORD,,\n"
        folder.mkdir(exist_ok=True, parents=True)
        path = folder / f"flash_attn-{self.version}-2_{words}-{self.tag}.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for name, text in files.items():
                archive.writestr(name, text)
        return path


TORCH = "from torch import version\n__version__ = version.__version__\n"


@dataclass
class Place:
    """A virtual environment, and how its Python is started."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def python(self) -> Path:
        return self.folder / "bin/python"

    @property
    def site(self) -> Path:
        (found,) = self.folder.glob("lib/python*/site-packages")
        return found

    def install(self, wheel: Path) -> None:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(self.site)  # what pip does for it

    def torch(self, version: str, cuda: str | None) -> None:
        """A stand-in: as much of torch as says which one it is."""
        (self.site / "torch").mkdir()
        (self.site / "torch/__init__.py").write_text(TORCH)
        text = f"__version__ = {version!r}\ncuda: object = {cuda!r}\nhip: object = None\nfor hip in (None,):\n    pass\n"
        (self.site / "torch/version.py").write_text(text)

    def package(self, name: str, version: str) -> None:
        info = self.site / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    def run(
        self, *words: str | Path, folder: Path | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.python, *words],
            check=False,
            capture_output=True,
            text=True,
            cwd=folder or self.folder,
            env={**os.environ, **self.environment, **environment},
        )

    def ask(self, *words: str, **environment: Any) -> dict[str, Any]:
        done = self.run("-m", "flash_attn.doctor", "--json", *words, **environment)
        assert done.stdout, done.stderr
        told: dict[str, Any] = json.loads(done.stdout)
        assert done.returncode == (1 if told["problems"] or (told["wheels"] and not told["fits"]) else 0)
        return told


DRIVER = """extern "C" {
int cuDriverGetVersion(int *v) { *v = %d; return 0; }
int cuInit(unsigned) { return %d; }
int cuDeviceGetCount(int *n) { *n = %d; return 0; }
int cuDeviceGet(int *d, int i) { *d = i; return 0; }
int cuDeviceGetName(char *name, int, int) { name[0] = 'G'; name[1] = 0; return 0; }
int cuDeviceGetAttribute(int *v, int a, int) { *v = a == 75 ? %d : %d; return 0; }
}
"""


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bare") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return folder


@pytest.fixture
def place(bare: Path, tmp_path: Path) -> Place:
    shutil.copytree(bare, tmp_path / "venv", symlinks=True)
    found = Place(tmp_path / "venv")
    found.environment["LD_LIBRARY_PATH"] = ""
    found.environment["PATH"] = str(tmp_path)  # no nvidia-smi
    return found


Drive = Callable[..., None]


@pytest.fixture
def drive(place: Place, tmp_path: Path) -> Drive:
    """Put a driver into the environment: a libcuda that says which CUDA it serves, and which GPUs there are."""

    def make(cuda: int = 13000, gpus: int = 1, capability: tuple[int, int] = (9, 0), status: int = 0) -> None:
        source = tmp_path / "driver.cpp"
        source.write_text(DRIVER % (cuda, status, gpus, *capability))
        library = tmp_path / "driver/libcuda.so.1"
        library.parent.mkdir(exist_ok=True)
        subprocess.run(["g++", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
        place.environment["LD_LIBRARY_PATH"] = str(library.parent)

    return make


@pytest.fixture
def wheels(tmp_path: Path) -> dict[str, Path]:
    """What a release might have: two CUDA releases, two GPUs, another head dim, a later glibc and Python."""
    folder = tmp_path / "wheels"
    made = {
        "cu13": Made(),
        "cu12": Made(label="det.2.cu12", cuda="12.8", torch="2.10.0"),
        "sm86": Made(arch=("86",)),
        "hdim96": Made(head_dims=(96,)),
    }
    return {name: wheel.write(folder) for name, wheel in made.items()}


def checks(told: dict[str, Any]) -> list[str]:
    return [problem["check"] for problem in told["problems"]]


def assert_one(told: dict[str, Any], check: str, *words: str) -> None:
    """It is the one problem, and says this."""
    assert checks(told) == [check]
    assert all(word in told["problems"][0]["what"] for word in words), told["problems"][0]["what"]


def well(place: Place, drive: Drive, made: Made | None = None, torch: str = "2.11.0+cu130") -> None:
    """An environment with nothing wrong, to break."""
    drive()
    place.package("einops", "0.8.1")
    place.torch(torch, f"{torch[-3:-1]}.{torch[-1]}" if "cu" in torch else None)
    place.install((made or Made()).write(place.folder / "made"))


@pytest.mark.parametrize(
    ("words", "module"),
    [
        (["-m", "flash_attn.doctor"], "flash_attn.doctor"),
        (["-Imflash_attn.doctor"], "flash_attn.doctor"),
        (["-W", "error", "-X", "dev", "-m", "flash_attn.doctor", "--json"], "flash_attn.doctor"),
        (["-m", "tool", "flash_attn.doctor"], "tool"),
        (["-Wm", "program.py"], ""),
        (["-m"], ""),
    ],
)
def test_what_python_was_started_with_is_what_follows_its_own_option(words: list[str], module: str) -> None:
    module_of: dict[str, Any] = {}
    exec(OWN.contents["flash_attn/fork_start.py"], module_of)  # noqa: S102 - a file of ours
    assert module_of["_module"](words) == module


def test_nothing_is_wrong_where_all_fits(place: Place, drive: Drive, wheels: dict[str, Path]) -> None:
    well(place, drive)
    told = place.ask(str(wheels["cu13"].parent), "--head-dim", "64", "--head-dim", "100")
    assert told["problems"] == []
    assert told["import"] == {"torch": "", "flash_attn": ""}
    assert told["machine"]["driver"]["gpus"] == [{"name": "G", "compute_capability": "9.0"}]
    assert told["machine"]["torch"]["cuda"] == "13.0"
    assert told["right"] == "flash_attn 2.8.3.post1+det.2.cu13 is the right wheel for this machine"
    assert told["fits"] == [str(wheels["cu13"])]


def test_torch_for_another_cuda(place: Place, drive: Drive, wheels: dict[str, Path]) -> None:
    well(place, drive, torch="2.10.0+cu128")
    told = place.ask(str(wheels["cu13"].parent), "--head-dim", "128")
    assert_one(told, "cuda-major", "it is for CUDA 13, torch 2.10.0+cu128 is built for CUDA 12.8")
    assert told["import"]["flash_attn"] == "AssertionError"
    assert told["problems"][0]["stops"] == "import"
    assert told["right"] == "flash_attn 2.8.3.post1+det.2.cu12"
    assert told["fits"] == [str(wheels["cu12"])]


def test_torch_for_the_cpu_alone(place: Place, drive: Drive, wheels: dict[str, Path]) -> None:
    well(place, drive, torch="2.11.0+cpu")
    told = place.ask(str(wheels["cu13"].parent))
    assert checks(told) == ["torch-cpu"]
    assert told["problems"][0]["remedy"].startswith("Install a torch that is built for CUDA 13;")
    assert "is the right wheel" in told["right"]
    assert told["fits"][0] in {str(wheels["cu13"]), str(wheels["hdim96"])}


def test_no_torch_at_all(place: Place, drive: Drive, wheels: dict[str, Path]) -> None:
    well(place, drive)
    shutil.rmtree(place.site / "torch")
    told = place.ask(str(wheels["cu13"].parent), "--head-dim", "64")
    assert checks(told) == ["torch-missing"]
    assert "No module named 'torch'" in told["import"]["flash_attn"]
    assert told["fits"] == [str(wheels["cu13"]), str(wheels["cu12"])]


def test_a_gpu_without_kernels(place: Place, drive: Drive, wheels: dict[str, Path]) -> None:
    well(place, drive)
    drive(capability=(8, 6))
    told = place.ask(str(wheels["cu13"].parent))
    assert_one(told, "gpu-kernels", "compute capability 8.6) has no kernels in it: it has those of 9.0")
    assert "sm86 in its name" in told["right"]
    assert "nox -s build -- --arch 86" in told["right"]
    assert told["fits"] == [str(wheels["sm86"])]


def test_machine_code_serves_later_minor_versions_alone(place: Place, drive: Drive) -> None:
    well(place, drive, Made(arch=("86",)))
    for capability, serves in (((8, 6), True), ((8, 9), True), ((8, 0), False), ((9, 6), False)):
        drive(capability=capability)
        assert checks(place.ask()) == ([] if serves else ["gpu-kernels"]), capability


def test_a_driver_too_old(place: Place, drive: Drive, wheels: dict[str, Path]) -> None:
    well(place, drive)
    drive(cuda=12040)
    told = place.ask(str(wheels["cu13"].parent))
    assert checks(told) == ["driver-old"]
    assert told["problems"][0]["what"].endswith("it serves CUDA 12.4, the wheel is for CUDA 13")
    assert "driver 580 or later, or the wheel and a torch for CUDA 12" in told["problems"][0]["remedy"]
    assert told["right"] == "flash_attn 2.8.3.post1+det.2.cu12"
    assert told["fits"] == [str(wheels["cu12"])]


def test_a_head_dim_that_is_missing(place: Place, drive: Drive, wheels: dict[str, Path]) -> None:
    well(place, drive)
    told = place.ask(str(wheels["cu13"].parent), "--head-dim", "80")
    assert_one(told, "head-dim", "no kernels of head dim 96", "(80 takes those of 96)")
    assert "--kernels hdim64,hdim96,hdim128" in told["right"]
    assert told["fits"] == [str(wheels["hdim96"])]


def test_a_second_flash_attn_in_the_way(place: Place, drive: Drive, tmp_path: Path) -> None:
    """The doctor's own folder is run, as Python finds no flash_attn.doctor in upstream's."""
    well(place, drive)
    other = tmp_path / "other"
    (other / "flash_attn").mkdir(parents=True)
    (other / "flash_attn/__init__.py").write_text(UPSTREAM_INIT)
    done = place.run(place.site / doctor.FOLDER, "--json", folder=tmp_path, PYTHONPATH=str(other))
    told = json.loads(done.stdout)
    assert_one(told, "second", f"Python takes {other / 'flash_attn'} before {place.site / 'flash_attn'}")
    assert told["problems"][0]["remedy"] == f"Take {other} out of PYTHONPATH."
    assert told["right"].endswith("is the right wheel for this machine")


@pytest.mark.parametrize(
    ("named", "remedy"),
    [("flash_attn-2.8.3.dist-info", "pip uninstall flash-attn"), ("", "Start Python in another folder")],
)
def test_a_second_one_that_pip_installed_or_in_the_current_folder(
    place: Place, drive: Drive, tmp_path: Path, named: str, remedy: str
) -> None:
    well(place, drive)
    other = tmp_path / "other"
    (other / "flash_attn_2_cuda").mkdir(parents=True)
    (other / "flash_attn_2_cuda/__init__.py").write_text("")
    if named:
        (other / named).mkdir()
    told = json.loads(place.run(place.site / doctor.FOLDER, "--json", folder=other).stdout)
    assert_one(told, "second")
    assert told["problems"][0]["remedy"].startswith(remedy)


def test_files_that_another_package_wrote_over_and_two_distributions(place: Place, drive: Drive) -> None:
    well(place, drive)
    (place.site / "flash_attn_2_cuda/core.so").write_text("upstream's")
    told = place.ask()
    assert_one(told, "files", "1 of its files", "flash_attn_2_cuda/core.so")
    place.package("flash_attn", "2.8.3")
    assert checks(place.ask()) == ["second"]


@pytest.mark.parametrize(
    ("made", "check", "words"),
    [
        (Made(tag="cp399-cp399-linux_x86_64"), "python", f"it is for cp399-cp399; here is {HERE}"),
        (Made(requires_python=">=3.99"), "python", "asks for Python >=3.99"),
        (
            Made(tag="py3-none-manylinux_2_99_x86_64"),
            "glibc",
            "it needs glibc 2.99 or later; here is glibc 2.",
        ),
        (
            Made(tag="py3-none-linux_x86_64", extension="x\0GLIBC_2.97\0GLIBC_2.5\0"),
            "glibc",
            "needs glibc 2.97",
        ),
        (
            Made(tag="py3-none-linux_x86_64", extension="\0GLIBC_2.5\0", library="x\0GLIBC_2.96\0"),
            "glibc",
            "needs glibc 2.96",
        ),
        (Made(tag="py3-none-manylinux_2_17_aarch64"), "platform", "here is Linux x86_64"),
        (
            Made(requires=("torch==2.12.*", "einops")),
            "torch-version",
            "asks for torch==2.12.*; here is 2.11.0",
        ),
        (Made(requires=("torch", "absent>=2")), "requirement", "the package absent is not installed"),
        (Made(requires=("torch", "einops>=0.9")), "requirement", "it asks for einops>=0.9; here is 0.8.1"),
        (
            Made(init=INIT + "raise ImportError('odd')\n"),
            "import",
            "importing flash_attn fails: ImportError: odd",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_what_else_an_import_may_fail_by(
    place: Place, drive: Drive, made: Made, check: str, words: str
) -> None:
    well(place, drive, made)
    told = place.ask()
    assert_one(told, check, words)
    assert told["problems"][0]["stops"] == ("import" if check == "import" else "later")


def test_without_a_driver_without_gpus_and_with_one_that_does_not_start(place: Place, drive: Drive) -> None:
    well(place, drive)
    (Path(place.environment["LD_LIBRARY_PATH"]) / "libcuda.so.1").unlink()
    assert checks(place.ask()) == ["driver-missing"]
    drive(status=100)
    told = place.ask(CUDA_VISIBLE_DEVICES="")
    assert_one(told, "gpu-missing", "CUDA_VISIBLE_DEVICES is ''")
    drive(status=803)
    assert checks(place.ask()) == ["driver-broken"]


def test_the_label_of_a_wheel_for_one_torch_is_told_too(place: Place, drive: Drive) -> None:
    made = Made(label="det.1.cu130.torch2.11", requires=("torch==2.11.*", "einops"))
    well(place, drive, made, torch="2.9.1+cu128")
    told = place.ask()
    assert checks(told) == ["cuda-major", "torch-version"]
    assert told["right"] == "flash_attn 2.8.3.post1+det.1.cu128.torch2.9"


def test_people_read_the_same(place: Place, drive: Drive, wheels: dict[str, Path]) -> None:
    well(place, drive, torch="2.10.0+cu128")
    done = place.run("-m", "flash_attn.doctor", wheels["cu13"].parent, PYTHONIOENCODING="ascii")
    assert done.returncode == 1
    assert "problem (import fails): wrong CUDA: it is for CUDA 13" in done.stdout
    assert "the wheel that fits: flash_attn 2.8.3.post1+det.2.cu12\n" in done.stdout
    assert f"of the wheels given: pip install {wheels['cu12']}\n" in done.stdout
    assert done.stderr == ""


def test_a_program_that_imports_the_package_is_not_the_doctor(place: Place, drive: Drive) -> None:
    well(place, drive)
    for words in (["-c", "import flash_attn; print('in')"], ["-m", "flash_attn.other"]):
        (place.site / "flash_attn/other.py").write_text("print('in')\n")
        done = place.run(*words, *(["flash_attn.doctor"] if words[0] == "-c" else []))
        assert (done.returncode, done.stdout) == (0, "in\n")


def test_wheels_that_are_damaged_or_another_s_are_told(place: Place, drive: Drive, tmp_path: Path) -> None:
    well(place, drive)
    damaged, other = tmp_path / "damaged.whl", tmp_path / "other.whl"
    damaged.write_text("no archive")
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("flash_attn/__init__.py", "")
    assert checks(place.ask(str(damaged), str(other))) == ["unreadable", "not-ours"]


# --- nox -s doctor ---


def test_the_command_asks_a_python_about_wheels_in_a_folder(
    command: Command, place: Place, drive: Drive, wheels: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    well(place, drive, torch="2.10.0+cu128")
    for name, value in place.environment.items():
        monkeypatch.setenv(name, value)
    done = command(
        "doctor", "--python", str(place.python), "--json", "--head-dim", "64", str(wheels["cu12"].parent)
    )
    told = json.loads(done.out)
    assert done.status == 1
    assert checks(told) == ["cuda-major"]
    assert told["machine"]["executable"] == str(place.python)
    assert told["fits"] == [str(wheels["cu12"])]


def test_the_command_s_mistakes_are_told(command: Command, tmp_path: Path) -> None:
    assert "absent.whl: no such file" in command("doctor", "absent.whl").err
    told = command("doctor", "--python", str(tmp_path / "none"), "wheel_matrix.toml")
    assert (told.status, "none: No such file" in told.err) == (UsageError.exit_code, True)


def test_the_user_s_python_is_not_the_command_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "bin"
    other.mkdir()
    (other / "python3").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.prefix) / "bin"), str(other)]))
    assert doctor.users_python() == other / "python3"
    monkeypatch.setenv("PATH", str(Path(sys.prefix) / "bin"))
    with pytest.raises(UsageError, match="no python3 is on PATH"):
        doctor.users_python()


def test_own_files_without_the_doctor_are_told(tmp_path: Path) -> None:
    with pytest.raises(SeriesError, match=r"fork/flash_attn/doctor is not there"):
        doctor.program(own.read(tmp_path / "fork"))


def test_the_question_becomes_the_doctor_s_words(tmp_path: Path) -> None:
    question = Question(Path("python"), (tmp_path,), (64, 96), importing=False, as_json=True)
    assert question.words == ["--head-dim=64", "--head-dim=96", "--no-import", "--json", str(tmp_path)]
