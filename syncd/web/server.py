"""The page's server: a few fixed files and two kinds of JSON, on loopback, for reading alone."""

from __future__ import annotations

import json
import re
import socketserver
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from importlib import resources
from pathlib import PurePath
from typing import Any, ClassVar, Final

from syncd.protocol.errors import InvalidSettingsError
from syncd.web.jobs import Jobs

HOST: Final = "127.0.0.1"
#: Seconds that a connection may say nothing.
_SILENCE: Final = 30.0
#: How many connections there are at a time: each has a thread and a file descriptor.
_MOST: Final = 64
_PAGE: Final = "page.html"
_FILES: Final = (
    _PAGE,
    "page.css",
    "icon.svg",
    "page.js",
    "view.js",
    "versions.js",
    "events.js",
    "charts.js",
    "parts.js",
    "words.js",
    "dom.js",
)
_KINDS: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_JSON: Final = "application/json"
_HISTORY: Final = re.compile(
    r"/jobs/([0-9]{1,6})/history\.json(?:\?had=([0-9]{1,15}(?:\.[0-9]{1,9})?))?"
)
#: What this page is called by who sits on this host, or came through a tunnel; the tunnel's port is
#: its own. A name of another site that leads here (DNS rebinding) is none of these.
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


class Server(socketserver.ThreadingTCPServer):
    """Serves the page of some jobs, a thread a connection; of too many at a time some are closed.

    Args:
        jobs: what is shown.
        port: on 127.0.0.1; 0 for one that is free.

    Raises:
        InvalidSettingsError: the port cannot be had.
    """

    allow_reuse_address = True
    request_queue_size = _MOST
    daemon_threads = True  # one that waits for storage does not keep the process

    def __init__(self, jobs: Jobs, port: int) -> None:
        self.jobs = jobs
        self._room = threading.BoundedSemaphore(_MOST)
        page = resources.files("syncd.web")
        self.files = {
            "/" if name == _PAGE else f"/{name}": (
                page.joinpath(name).read_bytes(),
                _KINDS[PurePath(name).suffix],
            )
            for name in _FILES
        }
        try:
            super().__init__((HOST, port), _Request)
        except OSError as error:
            raise InvalidSettingsError(
                f"port {port} cannot be used: {error.strerror}. Give another by --port, or 0 for "
                "one that is free"
            ) from error

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, unless there are too many that wait or say nothing."""
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread is to be had
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, in that thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    @property
    def address(self) -> str:
        """Where the page is."""
        return f"http://{HOST}:{self.server_address[1]}/"


class _Request(BaseHTTPRequestHandler):
    """One request. Nothing of its path ever becomes one of a file."""

    server: Server
    timeout = _SILENCE
    error_content_type = "text/plain; charset=utf-8"
    error_message_format = "%(code)d %(message)s\n"
    _methods: ClassVar = {"GET", "HEAD"}

    def parse_request(self) -> bool:
        """Read the request, and refuse what does not belong here."""
        if not super().parse_request():
            return False
        if self.command not in self._methods:
            self.send_error(HTTPStatus.METHOD_NOT_ALLOWED, "this page is for reading alone")
        elif not _OURS.fullmatch(self.headers.get("Host", "")):
            self.send_error(HTTPStatus.FORBIDDEN, "this page is at 127.0.0.1 or localhost alone")
        else:
            return True
        return False

    def do_GET(self) -> None:
        """Answer with a file, or with what is known of the jobs."""
        path = self.path.partition("?")[0]
        if path in self.server.files:
            self._send(*self.server.files[path])
        elif path == "/jobs.json":
            self._send_json(self.server.jobs.overview())
        elif (found := _HISTORY.fullmatch(self.path)) and (
            history := self.server.jobs.history(int(found[1]), float(found[2] or "nan"))
        ):
            self._send_json(history)
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def do_HEAD(self) -> None:
        """The same, without the content."""
        self.do_GET()

    def _send_json(self, told: dict[str, Any]) -> None:
        self._send(json.dumps(told).encode(), _JSON)

    def _send(self, content: bytes, kind: str) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def end_headers(self) -> None:
        """Every answer, a refusal too, says what a browser may do with it."""
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def handle(self) -> None:
        """Answer; who went away meanwhile needs no answer."""
        try:
            super().handle()
        except ConnectionError:
            self.close_connection = True

    def version_string(self) -> str:
        """Who answers: not which Python that is."""
        return "syncd"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 # the base's name
        """Say nothing: a page that updates itself asks all the time."""
