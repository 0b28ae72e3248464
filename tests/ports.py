"""Ports of this host, for processes that a test starts, and servers that answer beside it."""

import random
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

Server = TypeVar("Server", bound=socketserver.BaseServer)

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """A port that nobody listens on.

    Not one of those that the kernel chooses from for connections: one of another test's could have
    it before the process listens there. Nor one that browsers refuse, 10080.
    """
    lowest = int(_RANGE.read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(11_000, max(12_000, lowest))
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


@contextmanager
def listening(server: Server) -> Iterator[Server]:
    """A server that answers beside the block, in its own thread."""
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
