"""Ports of this host, for processes that a test starts."""

import random
import socket
from pathlib import Path

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
