"""Serve an index on this machine, to try it: by what an installer accepts, its pages are JSON or HTML."""

from __future__ import annotations

import http.server
from functools import partial
from pathlib import Path

from scripts.wheels.index.installers import JSON_TYPE


class _Handler(http.server.SimpleHTTPRequestHandler):
    """Files of a folder. The page of a folder is ``index.json`` for who accepts it."""

    def translate_path(self, path: str) -> str:
        """A folder's page by the header Accept."""
        place = super().translate_path(path)
        page = Path(place) / "index.json"
        is_page = path.partition("?")[0].endswith("/")
        return str(page) if is_page and self._wants_json() and page.is_file() else place

    def guess_type(self, path: object) -> str:
        """The type that PEP 691 names, for its pages."""
        if str(path).endswith("index.json") and self._wants_json():
            return JSON_TYPE
        return super().guess_type(str(path))

    def _wants_json(self) -> bool:
        return JSON_TYPE in self.headers.get("Accept", "")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is the library's
        """Requests are no news."""


def server(folder: Path, port: int = 0) -> http.server.ThreadingHTTPServer:
    """A server of a folder on 127.0.0.1, not yet serving; port 0: a free one."""
    return http.server.ThreadingHTTPServer(("127.0.0.1", port), partial(_Handler, directory=str(folder)))
