"""Back ends of sccache's that several machines reach: what one compiled answers another.

WebDAV always runs. Redis runs where ``redis-server`` is installed, S3 where moto is: the group ``remote-caches``
of ``pyproject.toml``. Otherwise their cases are skipped, as not run.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from scripts.base.errors import CompileError
from scripts.wheels.compiling import compile_cache
from scripts.wheels.toolchain.compilers import Toolchain
from tests.unit.conftest import toolchain

# The servers, with words for their port and a folder; the settings that docs/machines.md has for each.
SERVERS = {
    "redis": ["redis-server", "--bind", "127.0.0.1", "--port", "{port}", "--save", "", "--dir", "{folder}"],
    "webdav": ["wsgidav", "--host=127.0.0.1", "--port={port}", "--root={folder}", "--auth=anonymous"],
    "s3": ["moto_server", "-H", "127.0.0.1", "-p", "{port}"],
}
SETTINGS = {
    "redis": {"SCCACHE_REDIS_ENDPOINT": "redis://127.0.0.1:{port}"},
    "webdav": {"SCCACHE_WEBDAV_ENDPOINT": "http://127.0.0.1:{port}"},
    "s3": {
        "SCCACHE_BUCKET": "objects",
        "SCCACHE_REGION": "auto",
        "SCCACHE_ENDPOINT": "http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
    },
}


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@contextmanager
def serving(kind: str, folder: Path) -> Iterator[dict[str, str]]:
    """Run a server; the settings of sccache for it."""
    program, *words = SERVERS[kind]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    found = shutil.which(program, path=path)
    if found is None:
        pytest.skip(f"not run: {program} is missing")
    port = free_port()
    command = [found, *(word.format(port=port, folder=folder) for word in words)]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            wait_for(port, server)
            if kind == "s3":
                bucket = f"http://127.0.0.1:{port}/{SETTINGS['s3']['SCCACHE_BUCKET']}"
                urllib.request.urlopen(urllib.request.Request(bucket, method="PUT")).close()
            yield {name: value.format(port=port) for name, value in SETTINGS[kind].items()}
        finally:
            server.terminate()
            server.wait()


def wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and server.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    pytest.fail("the server did not start")


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toolchain:
    """The machine's C++ compiler behind sccache, without settings of the person who runs this."""
    for name in [n for n in os.environ if n.startswith(("SCCACHE_", "AWS_"))]:
        monkeypatch.delenv(name)
    compiler = shutil.which("g++")
    assert compiler
    return dataclasses.replace(toolchain(tmp_path, "", cache=True), cxx=Path(compiler))


def compiled(tools: Toolchain, machine: Path, monkeypatch: pytest.MonkeyPatch) -> compile_cache.Stats:
    """Compile a file on a machine of its own: a clone and a cache folder that nobody else has."""
    machine.mkdir()
    (machine / "one.cpp").write_text("int one() { return 1; }\n")
    monkeypatch.setenv("SCCACHE_DIR", str(machine / "cache"))
    with compile_cache.server(tools, machine, machine / "log") as env:
        command = [tools.sccache or "", tools.cxx, "-c", "one.cpp", "-o", "one.o"]
        subprocess.run(list(map(str, command)), cwd=machine, env={**os.environ, **env}, check=True)
        return compile_cache.stats(tools, env)


@pytest.mark.parametrize("kind", SERVERS)
def test_one_machine_s_compiles_answer_another_s(
    tmp_path: Path, tools: Toolchain, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "served").mkdir()
    with serving(kind, tmp_path / "served") as settings:
        told = []
        for machine, has_it in (("one", True), ("other", True), ("alone", False)):
            for name, value in settings.items():
                monkeypatch.setenv(name, value) if has_it else monkeypatch.delenv(name)
            told.append(compiled(tools, tmp_path / machine, monkeypatch))
    assert [(stats.hits, stats.misses) for stats in told] == [(0, 1), (1, 0), (0, 1)]
    assert kind in told[0].location.lower()
    objects = [(tmp_path / machine / "one.o").read_bytes() for machine in ("one", "other")]
    assert objects[0] == objects[1]


@pytest.mark.parametrize("kind", ["webdav", "s3"])
def test_a_back_end_that_does_not_answer_is_told(
    tmp_path: Path, tools: Toolchain, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SETTINGS[kind].items():
        monkeypatch.setenv(name, value.format(port=free_port()))
    with pytest.raises(CompileError, match=r"the compile cache did not start:\n[\s\S]*--no-cache"):
        compiled(tools, tmp_path / "one", monkeypatch)
