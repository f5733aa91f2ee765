"""pip and uv install the real wheel of flash-attn-4 from an index that is served here, on every Python here."""

from __future__ import annotations

import os
import shlex
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uv

from scripts.base.errors import ToolchainError
from scripts.source.matrix_tables import PYTHONS
from scripts.wheels.index import local_server, page_choices, static_index
from scripts.wheels.packing import python_wheel
from scripts.wheels.toolchain.compilers import find_python
from tests.integration.wheels import MATRIX as UPSTREAMS
from tests.integration.wheels import applied_apart

pytestmark = pytest.mark.network

MATRIX = UPSTREAMS.of("flash-attn-4")


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[page_choices.Lines]:
    """The lines of the index's page, which is served meanwhile."""
    folder = tmp_path_factory.mktemp("index")
    python_wheel.pack(MATRIX, *applied_apart("flash-attn-4", folder), folder / "dist")
    (folder / "out").mkdir()
    server = local_server.server(folder / "out")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/"
    entries = static_index.write(
        static_index.Request(folder / "dist", url=url, torch_cuda=MATRIX.torch_cuda), folder / "out"
    )
    yield page_choices.lines(entries[0], entries, "13", url)
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("version", PYTHONS)
def test_pip_and_uv_install_it(lines: page_choices.Lines, tmp_path: Path, version: str) -> None:
    """Each with the pip that its Python brings; the wheel's requirements, some gigabytes, are left out."""
    try:
        python = find_python(version)
    except ToolchainError:
        pytest.skip(f"no Python {version} here")
    for installer in ("pip", "uv"):
        environment = tmp_path / installer
        options = ["--without-pip"] if installer == "uv" else []
        subprocess.run([python, "-m", "venv", *options, environment], check=True)
        own = environment / "bin/python"
        words = [*shlex.split(getattr(lines, installer)), "--no-deps"]
        if installer == "pip":
            command = [own, "-m", *words, "--no-cache-dir"]
        else:
            command = [uv.find_uv_bin(), *words[1:], "--no-cache", "--python", own]
        done = subprocess.run(
            list(map(str, command)),
            capture_output=True,
            text=True,
            env={**os.environ, "UV_NO_CONFIG": "1"},
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        ask = "from importlib.metadata import version; print(version('flash-attn-4'))"
        told = subprocess.run([own, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()
        assert told == MATRIX.version()
