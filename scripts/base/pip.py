"""Pip: what it is configured with, and the command that installs."""

from __future__ import annotations

import ast
import re
import ssl
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unearth import PackageFinder
from unearth.fetchers import PyPIClient

from scripts.base.errors import UpstreamError
from scripts.base.process import run

if TYPE_CHECKING:
    from pathlib import Path

    from unearth.fetchers import Fetcher

HINT = "Check the network and pip's configuration (pip config list)."  # of an install that failed


def installing(python: str | Path, *arguments: str | Path) -> list[str | Path]:
    """The command that installs for a Python: options of ``pip install``, then what to install."""
    # Most modules of torch are never imported: to compile them all to bytecode takes 20 s.
    quick = ("--disable-pip-version-check", "--progress-bar=off", "--no-compile")
    return [python, "-m", "pip", "install", *quick, *arguments]


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
        if listing is None:
            command = [sys.executable, "-m", "pip", "config", "list"]
            listing = run(command, error=UpstreamError, what="where to look for packages is unknown")
        values: dict[str, str] = {}
        lines = [
            re.fullmatch(r"(?P<section>[^.=]+)\.(?P<key>[^=]+)=(?P<value>.*)", line)
            for line in listing.splitlines()
        ]
        for section in ("global", "download", ":env:"):
            for match in lines:
                if match and match["section"] == section:
                    values[match["key"].removeprefix("default-")] = str(ast.literal_eval(match["value"]))
        return cls(
            values.get("no-index", "").lower() in ("1", "true", "yes", "on"),
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
