"""A read-only HTTP server on loopback that no client can block; it serves metrics and a page."""

from __future__ import annotations

import io
import logging
import socket
import socketserver
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any, Final

from syncd.protocol.events import Event

log = logging.getLogger(__name__)

HOST: Final = "127.0.0.1"
#: The most seconds to wait for the end of a connection that was closed to make room.
_PATIENCE: Final = 1.0
#: The most bytes of a request that are read.
_HEAD: Final = 16 * 1024


class LoopbackServer(socketserver.ThreadingTCPServer):
    """Answers requests on 127.0.0.1, with one thread and one descriptor for each connection.

    Every user of the host can connect, so two things are bounded. A connection ends after
    ``longest`` seconds, even if its client reads slowly. At most ``most`` connections are open. For
    a further connection the server closes the oldest connection without a complete request, because
    real requests are complete within milliseconds. If there is none, it closes the oldest one.

    Raises:
        OSError: the port cannot be used. Port 0 means any free port.
    """

    allow_reuse_address = True
    request_queue_size = 1024  # if the queue is full, a client waits for seconds
    daemon_threads = True  # threads that wait for storage do not delay the exit
    #: Seconds from the beginning of a connection to its end.
    longest = 30.0

    def __init__(self, port: int, request: type[LoopbackRequest], most: int) -> None:
        self._room = threading.BoundedSemaphore(most)
        self._changing = threading.Lock()
        #: Connection → whether its request has come, and when the connection began.
        self._open: dict[socket.socket, tuple[bool, float]] = {}
        super().__init__((HOST, port), request)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a new thread; if too many connections are open, close one connection first."""
        if not self._room.acquire(blocking=False):
            with self._changing:
                if self._open:
                    self._end(min(self._open, key=self._open.__getitem__))
            if not self._room.acquire(timeout=_PATIENCE):
                self.shutdown_request(request)
                return
        with self._changing:
            self._open[request] = False, time.monotonic()
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no more threads
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer in the connection's thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def heard(self, request: socket.socket) -> None:
        """Record that a connection's request is complete; such connections are closed last."""
        with self._changing:
            if request in self._open:
                self._open[request] = True, self._open[request][1]

    def service_actions(self) -> None:
        """Close connections that are older than ``longest``; called at least twice a second."""
        end = time.monotonic() - self.longest
        with self._changing:
            for late in [one for one, (_, begun) in self._open.items() if begun < end]:
                self._end(late)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection, and forget it, so that no other thread shuts it down again."""
        with self._changing:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def server_close(self) -> None:
        """Stop listening, and close all connections."""
        super().server_close()
        with self._changing:
            for request in list(self._open):
                self._end(request)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 # the base's names
        """Log the error with its traceback; the base class would print it instead."""
        log.error(
            "an HTTP request on %s:%d failed",
            *self.server_address,
            exc_info=True,
            extra=Event.FAULT(),
        )

    def _end(self, request: socket.socket) -> None:
        """Shut a connection down, so that its thread wakes up and closes the connection.

        The caller must hold the lock, so that the descriptor is not closed and reused meanwhile.
        """
        del self._open[request]
        try:
            request.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the client has already closed the connection


class LoopbackRequest(BaseHTTPRequestHandler):
    """One request; :meth:`answer` sends the answer, and then the connection ends."""

    server: LoopbackServer
    error_content_type = "text/plain; charset=utf-8"
    error_message_format = "%(code)d %(message)s\n"

    def answer(self) -> None:
        """Answer a request for ``self.path``; each subclass defines this."""
        raise NotImplementedError

    def do_GET(self) -> None:
        """Answer a GET request."""
        self.answer()

    def do_HEAD(self) -> None:
        """Answer a HEAD request: :meth:`send` leaves the content out."""
        self.answer()

    def send(self, content: bytes, kind: str) -> None:
        """Answer with content of the media type ``kind``; the answer to HEAD has no content."""
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def handle(self) -> None:
        """Answer the request; it is no error if the client has closed the connection."""
        try:
            head = self._head()
            self.server.heard(self.request)
            self.rfile.close()
            self.rfile = io.BytesIO(head)
            super().handle()
        except ConnectionError:
            self.close_connection = True

    def _head(self) -> bytes:
        """The bytes of a request up to the empty line, but at most :data:`_HEAD` bytes."""
        head = b""
        while len(head) < _HEAD and b"\n\r\n" not in head and b"\n\n" not in head:
            part = self.connection.recv(_HEAD - len(head))
            if not part:
                break
            head += part
        return head

    def version_string(self) -> str:
        """The server's name; the base class would add Python's version."""
        return "syncd"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 # the base's name
        """Log nothing, because scrapes and the self-updating page send requests all the time."""
