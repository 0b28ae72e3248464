"""A read-only HTTP server on loopback that no client can block."""

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

from syncd.protocol.events import Fault

log = logging.getLogger(__name__)

HOST: Final = "127.0.0.1"
#: The most seconds to wait for the end of a connection that was closed to make room.
_PATIENCE: Final = 1.0
#: The most bytes of a request that are read.
_HEAD: Final = 16 * 1024


class LoopbackServer(socketserver.ThreadingTCPServer):
    """Answers requests on 127.0.0.1, with one thread for each connection.

    Every user of the host can connect, so connections are limited. A connection ends after
    ``longest`` seconds. At most ``most`` connections are open. For one more, the server closes the
    oldest connection whose request is not complete, because real requests are complete within
    milliseconds. If all requests are complete, it closes the oldest connection.

    Port 0 means any free port.

    Raises:
        OSError: the port cannot be used.
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
        """Answer in a new thread; at the limit, close one connection first."""
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
        """Record that a connection's request is complete."""
        with self._changing:
            if request in self._open:
                self._open[request] = True, self._open[request][1]

    def service_actions(self) -> None:
        """Close connections that are older than ``longest``."""
        end = time.monotonic() - self.longest
        with self._changing:
            for late in [one for one, (_, begun) in self._open.items() if begun < end]:
                self._end(late)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection, and forget it, so that nothing shuts it down again."""
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
        """Log the error with its traceback."""
        Fault().tell(log)

    def _end(self, request: socket.socket) -> None:
        """Shut a connection down, so that its thread wakes up and closes it.

        The caller must hold the lock. Otherwise the descriptor may be closed and reused meanwhile.
        """
        del self._open[request]
        try:
            request.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the client has already closed the connection


class LoopbackRequest(BaseHTTPRequestHandler):
    """One request; after its answer the connection ends."""

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
        """Answer a HEAD request, without content."""
        self.answer()

    def send(self, content: bytes, kind: str) -> None:
        """Answer with content of the media type ``kind``."""
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def handle(self) -> None:
        """Answer the request; ignore a connection that the client has closed."""
        try:
            head = self._head()
            self.server.heard(self.request)
            self.rfile.close()
            self.rfile = io.BytesIO(head)
            super().handle()
        except ConnectionError:
            self.close_connection = True

    def _head(self) -> bytes:
        """The request up to the empty line, but at most :data:`_HEAD` bytes."""
        head = b""
        while len(head) < _HEAD and b"\n\r\n" not in head and b"\n\n" not in head:
            part = self.connection.recv(_HEAD - len(head))
            if not part:
                break
            head += part
        return head

    def version_string(self) -> str:
        """The server's name, without Python's version."""
        return "syncd"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 # the base's name
        """Log nothing, because requests come all the time."""
