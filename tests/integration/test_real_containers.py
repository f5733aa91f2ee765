"""A wheel through cibuildwheel, imported by several CPythons, in a real container; needs the image that ``nox -s image`` makes, and takes some minutes."""

from __future__ import annotations

import json
import re
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

from scripts.base import layout
from scripts.wheels.building import containers, engine
from scripts.wheels.trust import binaries
from tests.integration.wheels import KERNELS, said

pytestmark = [pytest.mark.network, pytest.mark.nvcc]


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
def test_a_wheel_is_imported_by_several_pythons_and_carries_nothing_foreign(tmp_path: Path) -> None:
    image = ("--containers", "--image", containers.LOCAL_IMAGE)
    told = said("build", *image, "--kernels", KERNELS, "--out", tmp_path)
    # before-all compiles the kernel, or the cache answers; the wheel then compiles the core alone.
    (kernel, core) = re.findall(r"(\d+) of (\d+) files to compile", told)
    assert kernel == ("1", "1")
    assert int(core[0]) == int(core[1]) - 1
    made = sorted(tmp_path.glob("*.whl"))
    assert [re.search(r"-py3-none-manylinux_\d+_\d+_x86_64\.whl", p.name) is not None for p in made] == [True]
    for path in made:
        assert "libtvm_ffi.so" in binaries.audit(path)
        with zipfile.ZipFile(path) as archive:
            assert json.loads(archive.read("flash_attn/_fork.json"))["kernel_set"] == [
                "fwd_hdim32_fp16_causal"
            ]
            assert (
                "manylinux"
                in archive.read(next(n for n in archive.namelist() if n.endswith("/WHEEL"))).decode()
            )
