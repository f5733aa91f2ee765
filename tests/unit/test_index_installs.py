"""pip and uv install from an index that is served on this machine; neither builds anything in its place.

The wheels are stand-ins; ``tests/integration/test_real_python_wheel.py`` installs a real one.
"""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uv

from scripts.wheels.index import local_server, page_choices, static_index, wheel_entries
from tests.unit.index_wheels import CUDA, PYTHON, make, upstream

Serve = Callable[[Path], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serve a folder; its address."""
    servers = []

    def start(folder: Path) -> str:
        server = local_server.server(folder)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}/"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def pypi(tmp_path: Path, serve: Serve) -> str:
    """A package index that has flash-attn as source alone, newer than ours, whose build leaves a trace."""
    folder = tmp_path / "pypi/simple/flash-attn"
    folder.mkdir(parents=True)
    name = "flash_attn-2.8.9"
    backend = f"open({str(tmp_path / 'was-built')!r}, 'w')\n"  # once anything asks it for anything
    project = "[build-system]\nrequires = []\nbuild-backend = 'backend'\nbackend-path = ['.']\n"
    with tarfile.open(folder / f"{name}.tar.gz", "w:gz") as archive:
        for file, text in (("pyproject.toml", project), ("backend.py", backend)):
            entry = tarfile.TarInfo(f"{name}/{file}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    (folder / "index.html").write_text(f'<!DOCTYPE html><a href="{name}.tar.gz">{name}.tar.gz</a>')
    return f"{serve(tmp_path / 'pypi')}simple/"


@pytest.fixture
def run(tmp_path: Path, pypi: str) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a line of the page, as it is but for where it installs, and which package index is PyPI."""

    def call(line: str, *, check: bool = True, **more: str) -> subprocess.CompletedProcess[str]:
        words = shlex.split(line)
        to = ["--target", str(tmp_path / "site"), "--no-deps"]
        if words[0] == "pip":
            command = [
                sys.executable,
                "-m",
                *words[:2],
                *to,
                "--no-cache-dir",
                "--index-url",
                pypi,
                *words[2:],
            ]
        else:
            options = [*to, "--no-cache", "--python", sys.executable, "--default-index", pypi]
            command = [uv.find_uv_bin(), *words[1:3], *options, *words[3:]]
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
        clean = {**kept, "PIP_CONFIG_FILE": os.devnull, "UV_NO_CONFIG": "1", "UV_PYTHON_DOWNLOADS": "never"}
        done = subprocess.run(
            command, env={**clean, **more}, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    return call


Run = Callable[..., subprocess.CompletedProcess[str]]


def lines(
    dist: Path, out: Path, url: str, *, name: str = "flash-attn", variants: bool = False
) -> page_choices.Lines:
    """Write the index; the lines of the first wheel of a distribution."""
    entries = static_index.write(static_index.Request(dist, url=url, variants=variants), out)
    group = wheel_entries.by_distribution(entries)[name]
    return page_choices.lines(group[0], group, "13", url)


def installed(site: Path) -> dict[str, str]:
    """What is there: the version of each distribution."""
    return {
        path.name.partition("-")[0]: path.name.partition("-")[2].removesuffix(".dist-info")
        for path in site.glob("*.dist-info")
    }


def served(tmp_path: Path, serve: Serve) -> tuple[Path, str]:
    out = tmp_path / "out"
    out.mkdir()
    return out, serve(out)


@pytest.mark.parametrize("installer", ["pip", "uv"])
@pytest.mark.parametrize("form", ["json", "html"])
def test_the_line_installs_our_wheel_and_no_variant_of_it(
    tmp_path: Path, serve: Serve, run: Run, installer: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if form == "html":
        monkeypatch.setattr(local_server._Handler, "_wants_json", lambda _: False)
    make(tmp_path / "dist")
    out, url = served(tmp_path, serve)
    run(getattr(lines(tmp_path / "dist", out, url, variants=True), installer))
    assert installed(tmp_path / "site") == {"flash_attn": CUDA["version"]}
    (info,) = (tmp_path / "site").glob("*.dist-info")
    assert not (info / "variant.json").exists()


@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_nothing_is_built_where_no_wheel_fits(tmp_path: Path, serve: Serve, run: Run, installer: str) -> None:
    make(tmp_path / "dist", tag="cp39-cp39-linux_x86_64", python="==3.9.*")
    out, url = served(tmp_path, serve)
    line = getattr(lines(tmp_path / "dist", out, url), installer)
    assert run(line, check=False).returncode != 0
    # Nor where the version is left to the installer, and PyPI's is newer.
    open_ended = line.rpartition("==")[0]
    assert open_ended.endswith(" flash-attn")
    assert run(open_ended, check=False).returncode != 0
    assert not (tmp_path / "was-built").exists()


def test_without_the_option_pip_does_build(tmp_path: Path, serve: Serve, run: Run) -> None:
    """The control of the test above: the source that it offers is taken, and its build leaves a trace."""
    make(tmp_path / "dist")
    out, url = served(tmp_path, serve)
    line = lines(tmp_path / "dist", out, url).pip.replace(" --only-binary flash-attn", "").rpartition("==")[0]
    assert run(line, check=False).returncode != 0
    assert (tmp_path / "was-built").exists()


@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_an_address_chooses_among_wheels_of_one_version_and_its_hash_is_checked(
    tmp_path: Path, serve: Serve, run: Run, installer: str
) -> None:
    other = make(tmp_path / "dist", build="9_hdim64_sm80", facts={"architectures": ["80"]})
    make(tmp_path / "dist")
    out, url = served(tmp_path, serve)
    entries = static_index.write(static_index.Request(tmp_path / "dist", url=url), out)
    (entry,) = [entry for entry in entries if entry.file == other.name]
    line = getattr(page_choices.lines(entry, entries, "13", url), installer)
    run(line)
    facts = json.loads((tmp_path / "site/flash_attn/_fork.json").read_text())
    assert facts["architectures"] == ["80"]
    shutil.rmtree(tmp_path / "site")
    other_hash = line.replace(entry.wheel.sha256, "0" * 64)
    assert other_hash != line
    assert run(other_hash, check=False).returncode != 0


@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_a_yanked_wheel_is_passed_over(tmp_path: Path, serve: Serve, run: Run, installer: str) -> None:
    make(tmp_path / "dist", PYTHON)
    newer = make(tmp_path / "dist", PYTHON, version="4.0.0b37+det.1", facts=upstream("4.0.0b37"))
    listed = tmp_path / "yanked.toml"
    listed.write_text(f'format = 1\n[wheels]\n"{newer.name}" = "wrong"\n')
    out, url = served(tmp_path, serve)
    static_index.write(static_index.Request(tmp_path / "dist", url=url, yanked=listed), out)
    pre = {"pip": "pip install --pre --extra-index-url", "uv": "uv pip install --prerelease allow --index"}
    run(f"{pre[installer]} {url}simple/ flash-attn-4")
    assert installed(tmp_path / "site") == {"flash_attn_4": "4.0.0b36+det.1"}


GPUS = {"9.0": "90", "8.6": "80", "12.0": ""}  # and the machine code that serves each


@pytest.mark.parametrize("gpu", GPUS)
def test_uv_picks_a_variant_by_the_gpu_and_others_take_the_plain_wheel(
    tmp_path: Path, serve: Serve, run: Run, gpu: str
) -> None:
    dist = tmp_path / "dist"
    make(dist, build="24_hdim64_sm80", facts={"architectures": ["80"]})
    make(dist)
    out, url = served(tmp_path, serve)
    line = lines(dist, out, url, variants=True).uv_variants
    # What uv reads of the driver and the GPU, without either.
    driver = {
        "NV_VARIANT_PROVIDER_FORCE_CUDA_DRIVER_VERSION": "13.1",
        "NV_VARIANT_PROVIDER_FORCE_SM_ARCH": gpu,
    }
    run(line, **driver)
    site = tmp_path / "site"
    (info,) = site.glob("*.dist-info")
    if GPUS[gpu]:
        assert json.loads((site / "flash_attn/_fork.json").read_text())["architectures"] == [GPUS[gpu]]
        assert [*json.loads((info / "variant.json").read_text())["variants"]] == [f"cu13_sm{GPUS[gpu]}"]
    else:
        assert not (info / "variant.json").exists()


def test_a_driver_of_another_cuda_takes_no_variant_of_13(tmp_path: Path, serve: Serve, run: Run) -> None:
    make(tmp_path / "dist")
    out, url = served(tmp_path, serve)
    line = lines(tmp_path / "dist", out, url, variants=True).uv_variants
    run(line, NV_VARIANT_PROVIDER_FORCE_CUDA_DRIVER_VERSION="12.8", NV_VARIANT_PROVIDER_FORCE_SM_ARCH="9.0")
    (info,) = (tmp_path / "site").glob("*.dist-info")
    assert not (info / "variant.json").exists()
