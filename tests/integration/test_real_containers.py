"""Two CPythons' wheels through cibuildwheel, in a real container; needs the image that ``nox -s image`` makes, and takes some minutes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from scripts.base import layout
from scripts.wheels import containers, engine, linking

pytestmark = [pytest.mark.network, pytest.mark.nvcc]

PYTHONS = ("3.12", "3.13")


def image_is_there() -> bool:
    folder = layout.BUILD / "containers/podman"
    if not shutil.which("podman") or not folder.is_dir():
        return False
    return (
        engine.podman(
            engine.find_engine(containers.LOCAL_IMAGE, folder), "image", "exists", containers.LOCAL_IMAGE
        )
        == 0
    )


@pytest.mark.skipif(sys.version_info < (3, 11), reason="cibuildwheel needs Python 3.11")
@pytest.mark.skipif(
    not image_is_there(), reason="no image: nox -s image makes it (root, debootstrap, podman)"
)
def test_two_wheels_come_from_one_compile_and_carry_nothing_foreign(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts", "build", "--containers", "--image", containers.LOCAL_IMAGE]
    command += ["--python", ",".join(PYTHONS), "--kernels", "hdim32,fp16,fwd,causal", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=layout.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    # before-all compiles the kernel, or the cache answers; each wheel then compiles its binding alone.
    assert re.findall(r"(\d+) compiled in", done.stdout) == ["1", "1", "1"]
    assert re.findall(r"(\d+) of (\d+) files to compile", done.stdout) == [("1", "1"), ("1", "2"), ("1", "2")]
    made = sorted(tmp_path.glob("*.whl"))
    tags = [re.search(r"-cp(\d+)-cp\1-manylinux_\d+_\d+_x86_64\.whl", p.name) for p in made]
    assert [tag and tag[1] for tag in tags] == [p.replace(".", "") for p in PYTHONS]
    for path in made:
        assert "libtorch_cpu.so" in linking.audit(path)
        with zipfile.ZipFile(path) as archive:
            assert json.loads(archive.read("flash_attn/_fork.json"))["kernel_set"] == [
                "fwd_hdim32_fp16_causal"
            ]
            assert (
                "manylinux"
                in archive.read(next(n for n in archive.namelist() if n.endswith("/WHEEL"))).decode()
            )
