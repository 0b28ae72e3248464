"""The page's server: serves fixed files and JSON on loopback, read-only."""

from __future__ import annotations

import json
import re
from http import HTTPStatus
from importlib import resources
from pathlib import PurePath
from typing import ClassVar, Final

from syncd.daemon.loopback import HOST, LoopbackRequest, LoopbackServer
from syncd.protocol.errors import InvalidSettingsError
from syncd.web.jobs import Jobs

#: The most connections at a time.
_MOST: Final = 64
_PAGE: Final = "page.html"
_KINDS: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_JOBS: Final = re.compile(
    r"/jobs\.json(?:\?history=([0-9]{1,6})&had=([0-9]{1,15}(?:\.[0-9]{1,9})?))?"
)
#: The host names in requests from this host or through a tunnel, with any port. The name of another
#: site that resolves to this host (DNS rebinding) is refused.
_OURS: Final = re.compile(r"(?:127\.0\.0\.1|localhost|\[::1\])(?::[0-9]{1,5})?", re.IGNORECASE)
_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Allow": "GET, HEAD",
}


class Server(LoopbackServer):
    """Serves the page that shows ``jobs`` on 127.0.0.1. ``port`` 0 means any free port.

    Raises:
        InvalidSettingsError: the port cannot be used.
    """

    def __init__(self, jobs: Jobs, port: int) -> None:
        self.jobs = jobs
        self.files = {
            "/" if file.name == _PAGE else f"/{file.name}": (file.read_bytes(), kind)
            for file in resources.files("syncd.web").iterdir()
            if (kind := _KINDS.get(PurePath(file.name).suffix))
        }
        try:
            super().__init__(port, _Request, _MOST)
        except OSError as error:
            raise InvalidSettingsError(
                f"port {port} cannot be used: {error.strerror}. Give another port with --port, or "
                "0 for a free port"
            ) from error

    @property
    def address(self) -> str:
        """The URL of the page."""
        return f"http://{HOST}:{self.server_address[1]}/"


class _Request(LoopbackRequest):
    """One request. No part of its URL ever becomes a path on disk."""

    server: Server
    _methods: ClassVar = {"GET", "HEAD"}

    def parse_request(self) -> bool:
        if not super().parse_request():
            return False
        if self.command not in self._methods:
            self.send_error(HTTPStatus.METHOD_NOT_ALLOWED, "this page is read-only")
        elif not _OURS.fullmatch(self.headers.get("Host", "")):
            self.send_error(
                HTTPStatus.FORBIDDEN, "this page is served only at 127.0.0.1 and localhost"
            )
        else:
            return True
        return False

    def answer(self) -> None:
        """Answer with a file, or with the state of the jobs."""
        path = self.path.partition("?")[0]
        if path in self.server.files:
            self.send(*self.server.files[path])
        elif found := _JOBS.fullmatch(self.path):
            told = self.server.jobs.overview(int(found[1] or -1), float(found[2] or 0))
            self.send(json.dumps(told).encode(), "application/json")
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def end_headers(self) -> None:
        """Add security headers to every answer, including errors."""
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        super().end_headers()
