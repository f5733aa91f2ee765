"""Pip: what it is configured with, and the commands that make environments and install."""

from __future__ import annotations

import ast
import os
import re
import shutil
import ssl
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.version import Version
from unearth import PackageFinder
from unearth.fetchers import PyPIClient

from scripts.base.errors import UpstreamError
from scripts.base.process import run

if TYPE_CHECKING:
    from collections.abc import Mapping

    from unearth.fetchers import Fetcher

HINT = "Check the network and pip's configuration (pip config list)."  # of an install that failed


# What uv is told of pip's configuration: an option of its own for each value, or a variable.
_OPTIONS = {
    "index-url": "--default-index",
    "extra-index-url": "--extra-index-url",
    "find-links": "--find-links",
    "trusted-host": "--allow-insecure-host",
    "constraint": "--constraint",
}
_VARIABLES = {"cert": "SSL_CERT_FILE", "timeout": "UV_HTTP_TIMEOUT"}
# Settings that change nothing of what an install into an environment of ours gives.
_OF_NO_ACCOUNT = {
    *("disable-pip-version-check", "no-python-version-warning", "no-warn-script-location", "progress-bar"),
    *("require-virtualenv", "root-user-action", "quiet", "no-color", "no-input", "retries"),
    *("cache-dir", "no-cache-dir", "config-file"),
}
_LEAST = Version("0.9")  # uv's release that takes these options
_OWN = {"UV_CACHE_DIR", "UV_LINK_MODE"}  # of uv's variables those that change no choice of packages


def making(python: str | Path, root: Path) -> list[str | Path]:
    """The command that makes a virtual environment: by uv where it serves, and then without pip in it."""
    uv, _ = _uv()
    return [*uv, "venv", "--quiet", "--python", python, root] if uv else [python, "-m", "venv", root]


def installing(python: str | Path, *arguments: str | Path) -> list[str | Path]:
    """The command that installs for a Python: options of ``pip install``, then what to install.

    By uv where it is installed, and pip is configured with nothing that uv cannot be told: it unpacks a
    torch once for all environments.
    """
    uv, options = _uv()
    if not uv:
        return by_pip(python, *arguments)
    # As pip does, take the best version of all indexes, not of the first that has any.
    best = ("--index-strategy", "unsafe-best-match")
    return [*uv, "pip", "install", "--python", python, *best, *options, *arguments]


def by_pip(python: str | Path, *arguments: str | Path) -> list[str | Path]:
    """The same by pip alone: the running Python's, which installs for the other."""
    # Most modules of torch are never imported: to compile them all to bytecode takes 20 s.
    quick = ("--disable-pip-version-check", "--progress-bar=off", "--no-compile")
    return [sys.executable, "-m", "pip", "--python", python, "install", *quick, *arguments]


def checking(python: str | Path) -> list[str | Path]:
    """The command that looks whether an environment has what its packages require."""
    return [sys.executable, "-m", "pip", "--python", python, "check"]


def _uv() -> tuple[list[str | Path], list[str]]:
    """Uv, and as its options pip's configuration; both empty where it is not there or does not serve."""
    beside = Path(sys.executable).with_name("uv")
    program = beside if beside.exists() else shutil.which("uv")
    if program is None or not _serves(program):
        return [], []
    settings = _settings(_listing())
    if bundle := os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE"):
        settings.setdefault("cert", bundle)  # which pip takes where it is configured with none
    options = _told(settings)
    if options is None:
        return [], []
    variables = [
        word for name in os.environ if name.startswith("UV_") and name not in _OWN for word in ("-u", name)
    ]
    variables += ["UV_SYSTEM_CERTS=1"]  # as pip
    variables += [f"{name}={settings[key]}" for key, name in _VARIABLES.items() if key in settings]
    return ["env", *variables, program, "--no-config"], options


def _serves(program: str | Path) -> bool:
    """Whether a uv starts, and is not too old."""
    try:
        told = run([program, "--version"], error=UpstreamError, what="uv does not start")
    except UpstreamError:
        return False
    version = re.match(r"uv (\d+(?:\.\d+)+)", told)
    return version is not None and Version(version[1]) >= _LEAST


def _told(settings: Mapping[str, str]) -> list[str] | None:
    """Pip's configuration as options of uv's; None where one has no counterpart."""
    if not {*_OPTIONS, *_VARIABLES, *_OF_NO_ACCOUNT, "no-index"}.issuperset(settings):
        return None
    words = ["--no-index"] if _is_on(settings.get("no-index", "")) else []
    for key, option in _OPTIONS.items():
        words += [word for value in settings.get(key, "").split() for word in (option, value)]
    return words


def _listing() -> str:
    """What ``pip config list`` says."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    return run(command, error=UpstreamError, what="where to look for packages is unknown")


def _settings(listing: str, command: str = "install") -> dict[str, str]:
    """What pip is configured with for a command: files, then environment, the later over the earlier."""
    lines = [
        re.fullmatch(r"(?P<section>[^.=]+)\.(?P<key>[^=]+)=(?P<value>.*)", line)
        for line in listing.splitlines()
    ]
    return {
        match["key"].removeprefix("default-"): str(ast.literal_eval(match["value"]))
        for section in ("global", command, ":env:")
        for match in lines
        if match and match["section"] == section
    }


def _is_on(value: str) -> bool:
    return value.lower() in ("1", "true", "yes", "on", "y", "t")


@dataclass(frozen=True)
class PipConfig:
    """What pip is configured with, as far as finding a package goes."""

    no_index: bool
    index_url: str | None  # None: the library's default, as pip's
    extra_index_urls: tuple[str, ...]
    find_links: tuple[str, ...]
    trusted_hosts: tuple[str, ...]
    cert: str | None
    timeout: float

    @classmethod
    def read(cls, listing: str | None = None) -> PipConfig:
        """Parse ``pip config list``: files, then environment, the later over the earlier."""
        values = _settings(_listing() if listing is None else listing, "download")
        return cls(
            _is_on(values.get("no-index", "")),
            values.get("index-url"),
            tuple(values.get("extra-index-url", "").split()),
            tuple(values.get("find-links", "").split()),
            tuple(values.get("trusted-host", "").split()),
            values.get("cert"),
            float(values.get("timeout", 60)),
        )

    def client(self) -> PyPIClient:
        """An HTTP client with pip's certificates, trusted hosts and timeout."""
        try:
            verify = ssl.create_default_context(cafile=self.cert) if self.cert else True
        except OSError as e:
            raise UpstreamError(
                f"pip is configured with the certificates {self.cert}, which cannot be read: "
                f"{e.strerror or e}."
            ) from e
        return PyPIClient(trusted_hosts=self.trusted_hosts, timeout=self.timeout, verify=verify)

    def finder(self, session: Fetcher, distribution: str) -> PackageFinder:
        """A finder of sdists that looks where pip would."""
        if self.no_index:
            if not self.find_links:
                raise UpstreamError(
                    "pip is configured with no-index and without find-links: "
                    "there is nowhere to look for an sdist."
                )
            return PackageFinder(session, find_links=self.find_links, no_binary=[distribution])
        # Without a source of its own the finder takes the public index; the others are added after that.
        finder = PackageFinder(
            session, index_urls=[self.index_url] if self.index_url else [], no_binary=[distribution]
        )
        for url in self.extra_index_urls:
            finder.add_index_url(url)
        for url in self.find_links:
            finder.add_find_links(url)
        return finder
