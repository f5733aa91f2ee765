"""What a container is asked for; the whole way runs in tests/integration/test_real_containers.py where there is an engine."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from scripts.base import layout
from scripts.base.errors import ToolchainError, WheelError
from scripts.source import matrix
from scripts.wheels.building import containers, engine
from scripts.wheels.trust import binaries, companions

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
TARGET = matrix.load(ROOT / "wheel_matrix.toml").default()
REQUEST = containers.Request(TARGET, ("--target", TARGET.name, "--kernels", "hdim64,fwd"), "an/image:1")


def test_the_container_gets_the_repository_s_files_and_a_package_that_runs_our_build(tmp_path: Path) -> None:
    package = containers.stage(ROOT, tmp_path / "project")
    there = {
        p.relative_to(tmp_path / "project").as_posix()
        for p in (tmp_path / "project").rglob("*")
        if p.is_file()
    }
    assert {
        "wheel_matrix.toml",
        "patches/flash-attn/series",
        "scripts/wheels/building/build.py",
        "package/pyproject.toml",
        "package/backend.py",
    } <= there
    assert not [name for name in there if name.startswith(("build/", "dist/", ".git/", "upstream/"))]
    described = tomllib.loads((package / "pyproject.toml").read_text())
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert described["build-system"]["requires"] == ours
    assert described["project"]["requires-python"] == ">=3.10"


def test_the_settings_are_cibuildwheel_s_own_words(tmp_path: Path) -> None:
    """Read by cibuildwheel itself, which refuses what it does not know."""
    options = pytest.importorskip("cibuildwheel.options", reason="cibuildwheel needs Python 3.11")
    from cibuildwheel.architecture import Architecture
    from cibuildwheel.options import CommandLineArguments

    config = tmp_path / "cibuildwheel.toml"
    config.write_text(
        containers.configuration(REQUEST, engine.Engine("podman", {}, ()), ["rich>=14"], "/usr/bin/python3")
    )
    package = containers.stage(ROOT, tmp_path / "project")
    arguments = CommandLineArguments.defaults()
    arguments.platform, arguments.config_file, arguments.package_dir = "linux", str(config), package
    read = options.Options(platform="linux", command_line_arguments=arguments, env={})
    assert [
        i
        for i in (f"cp3{minor}-manylinux_x86_64" for minor in range(9, 15))
        if read.globals.build_selector(i)
    ] == ["cp310-manylinux_x86_64", "cp312-manylinux_x86_64", "cp314-manylinux_x86_64"]
    assert read.globals.architectures == {Architecture.x86_64}
    built = read.build_options("cp312-manylinux_x86_64")
    assert built.container_engine.name == "podman"
    assert built.container_engine.disable_host_mount
    assert built.container_engine.create_args == (f"--volume={layout.cache('containers')}:/root/.cache",)
    assert built.manylinux_images["x86_64"] == "an/image:1"
    assert (
        built.environment.as_dictionary({}, executor=None)["FORK_BUILD"]
        == f"--target {TARGET.name} --kernels hdim64,fwd"
    )
    assert "--kernels-only --target" in built.before_all
    assert "--exclude libtvm_ffi.so" in built.repair_command
    assert built.audit_command == ["/usr/bin/python3 -m scripts audit {wheel}"]


def test_the_backend_hands_over_the_one_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real interface of a build frontend and a stand-in for our build."""
    from scripts.wheels.building import pep517

    for folder in ("project/scripts", "project/package", "out"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "project/scripts/__main__.py").write_text(
        "import pathlib, sys\npathlib.Path(sys.argv[sys.argv.index('--out') + 1], 'a-1.whl').write_text(' '.join(sys.argv[1:]))\n"
    )
    monkeypatch.chdir(tmp_path / "project/package")
    monkeypatch.setenv("FORK_BUILD", "--target 'a target' --kernels hdim64")
    assert pep517.build_wheel(str(tmp_path / "out")) == "a-1.whl"
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["a-1.whl"]
    asked = (tmp_path / "out/a-1.whl").read_text()
    assert asked.startswith("build --out ")
    assert asked.endswith("--target a target --kernels hdim64")
    (tmp_path / "project/scripts/__main__.py").write_text("raise SystemExit(8)\n")
    with pytest.raises(subprocess.CalledProcessError, match="exit status 8"):
        pep517.build_wheel(str(tmp_path / "out"))


def test_a_wheel_of_a_container_does_not_keep_the_proof_of_other_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for cibuildwheel and its engine."""
    name, out = "flash_attn-1-cp312-cp312-manylinux_2_34_x86_64.whl", tmp_path / "dist"
    out.mkdir()
    (out / name).write_text("old")
    companions.proof(out / name).write_text("{}")

    def show(command: list[str], *_: object) -> int:
        made = Path(command[command.index("--output-dir") + 1])
        made.mkdir(parents=True)
        (made / name).write_text("new")
        return 0

    monkeypatch.setattr(importlib.util, "find_spec", lambda _: True)
    monkeypatch.setattr(containers, "find_engine", lambda *_: engine.Engine("docker", {}, ()))
    monkeypatch.setattr(containers, "_show", show)
    assert containers.build(REQUEST, ROOT, tmp_path / "containers", out) == [out / name]
    assert (out / name).read_text() == "new"
    assert not companions.proof(out / name).exists()


def test_an_image_that_is_not_there_says_how_to_make_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ToolchainError, match=r"no container engine: .*podman is not installed"):
        engine.find_engine("an/image:1", tmp_path)


@pytest.mark.parametrize(
    ("needs", "name", "problem"),
    [
        ("", "a.so", None),
        ("foreign", "a.so", "needs libforeign.so"),
        ("", "flash_attn.libs/a.so", "contains flash_attn.libs/a.so"),
        ("", "flash_attn/cpp/lib/libflash_attention_v2.so.1", None),
        ("", "flash_attn/cpp/lib/libcudart.so.13", "contains flash_attn/cpp/lib/libcudart.so.13"),
        ("flash_attention_v2", "flash_attn_2_cuda/core.so", "needs libflash_attention_v2.so"),
        ("", "a.py", "has no extension"),
        ("", "no.whl", "is damaged, or no wheel"),
    ],
)
def test_a_wheel_may_need_only_what_its_users_have(
    tmp_path: Path, needs: str, name: str, problem: str | None
) -> None:
    (tmp_path / "a.c").write_text('#include <stdio.h>\nint f(void) { return puts("f"); }\n')
    libraries = []
    if needs:
        subprocess.run(["gcc", "-shared", "-o", tmp_path / f"lib{needs}.so", tmp_path / "a.c"], check=True)
        libraries = [f"-L{tmp_path}", "-Wl,--no-as-needed", f"-l{needs}"]
    subprocess.run(["gcc", "-shared", "-o", tmp_path / "extension", tmp_path / "a.c", *libraries], check=True)
    path = tmp_path / "a.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(tmp_path / "extension", name)
    if name == "no.whl":
        path.write_text("no zip")
    if problem is None:
        assert binaries.audit(path) == ("libc.so.6",)
    else:
        with pytest.raises(WheelError, match=problem):
            binaries.audit(path)
