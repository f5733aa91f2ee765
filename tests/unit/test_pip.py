"""What installs packages: uv where it is there and can be told what pip is configured with, else pip."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.base import pip

CONFIGURED = """\
global.cert='/etc/certificates.pem'
global.index-url='https://index.example.org/one'
global.extra-index-url='https://index.example.org/two'
global.trusted-host='index.example.org'
global.constraint='/constraints.txt'
install.find-links='/wheels /others'
download.find-links='/never'
:env:.default-timeout='180'
:env:.disable-pip-version-check='1'
"""


def configured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, listing: str, *, uv: str = "uv 0.9.1"
) -> None:
    """A machine whose pip is configured so, with a uv beside its Python or without any."""
    python = tmp_path / "bin/python"
    python.parent.mkdir()
    if uv:
        program = python.parent / "uv"
        program.write_text(f"#!/bin/sh\necho {uv}\n")
        program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(pip, "_listing", lambda: listing)


def test_uv_installs_from_where_pip_would(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    configured(monkeypatch, tmp_path, CONFIGURED)
    for name in [name for name in os.environ if name.startswith("UV_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/etc/never.pem")  # pip is configured with another
    monkeypatch.setenv("UV_TORCH_BACKEND", "cpu")  # which would choose another torch
    uv = f"env -u UV_TORCH_BACKEND UV_SYSTEM_CERTS=1 SSL_CERT_FILE=/etc/certificates.pem UV_HTTP_TIMEOUT=180 {tmp_path}/bin/uv --no-config"
    words = map(str, pip.installing("/env/bin/python", "--no-deps", "torch==2.11.0"))
    assert " ".join(words) == (
        f"{uv} pip install --python /env/bin/python --index-strategy unsafe-best-match "
        "--default-index https://index.example.org/one --extra-index-url https://index.example.org/two "
        "--find-links /wheels --find-links /others --allow-insecure-host index.example.org "
        "--constraint /constraints.txt --no-deps torch==2.11.0"
    )
    made = map(str, pip.making("/bin/python3", Path("/env")))
    assert " ".join(made) == f"{uv} venv --quiet --python /bin/python3 /env"


@pytest.mark.parametrize(
    ("listing", "uv"),
    [
        ("", ""),
        ("", "uv 0.8.22"),
        ("", "pyenv: uv: command not found"),
        ("global.proxy='http://proxy.example.org'\n", "uv 0.9.1"),
        ("install.require-hashes='1'\n", "uv 0.9.1"),
    ],
    ids=["no uv", "an old uv", "a shim", "a proxy", "hashes"],
)
def test_pip_installs_where_uv_is_not_there_or_cannot_be_told_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, listing: str, uv: str
) -> None:
    configured(monkeypatch, tmp_path, listing, uv=uv)
    python = str(tmp_path / "bin/python")
    assert pip.installing("/other/python", "numpy")[:5] == [python, "-m", "pip", "--python", "/other/python"]
    assert pip.making("/bin/python3", tmp_path / "env") == ["/bin/python3", "-m", "venv", tmp_path / "env"]


@pytest.mark.parametrize("value", ["1", "true", "0"])
def test_an_index_is_left_out_where_pip_leaves_it_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str
) -> None:
    configured(monkeypatch, tmp_path, f"global.no-index='{value}'\n")
    assert ("--no-index" in pip.installing("python", "numpy")) == (value != "0")


@pytest.mark.parametrize("way", ["uv", "pip"])
def test_an_environment_is_made_installed_into_and_looked_at(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, way: str
) -> None:
    """By the real programs, of a wheel that lies here."""
    from tests.unit.index_wheels import CUDA, make

    wheel = make(tmp_path / "dist", CUDA)
    assert pip._uv()[0], "no uv, or a setting that it cannot be told"
    if way == "pip":
        monkeypatch.setattr(pip, "_uv", lambda: ([], []))
    root = tmp_path / "env"
    commands = [pip.making(sys.executable, root), pip.installing(root / "bin/python", "--no-deps", wheel)]
    for command in commands:
        subprocess.run(list(map(str, command)), check=True, capture_output=True)
    ask = "from importlib.metadata import version; print(version('flash-attn'))"
    done = subprocess.run([root / "bin/python", "-c", ask], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == CUDA["version"]
    told = subprocess.run(
        list(map(str, pip.checking(root / "bin/python"))), capture_output=True, text=True, check=False
    )
    assert told.returncode == 1, "what it requires is not there"
    assert "requires torch" in told.stdout
