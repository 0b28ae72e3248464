"""Addresses of this host, and a socket that listens on one of them."""

from __future__ import annotations

import errno
import socket
from typing import Final

from syncd.protocol.errors import BroadcastError

#: Addresses that no host has (RFC 5737, RFC 3849), so packets to them take the default route.
_ANYWHERE: Final = ("192.0.2.1", "2001:db8::1")
#: Any port will do, because no packet is sent.
_DISCARD: Final = 9


def own_address() -> str:
    """The IP address at which other hosts can reach this host: the address of the default route.

    If this host has no default route, the result is ``127.0.0.1``, which no other host can reach.
    If this host is on several networks, other hosts may need another address: set
    ``master_address``.
    """
    for host in _ANYWHERE:
        try:
            return address_towards(host, _DISCARD)
        except OSError:
            continue  # no route of this family
    return "127.0.0.1"


def address_towards(host: str, port: int) -> str:
    """The IP address from which this host sends packets to another host."""
    family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(where)
        return str(probe.getsockname()[0])


def listen(address: str, port: int) -> socket.socket:
    """Listen on one address of this host; raise BroadcastError if its port cannot be used."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(
            address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind)
    except (OSError, UnicodeError) as error:  # UnicodeError: an impossible host name
        raise BroadcastError(f"cannot listen on {address}: {error}") from error
    try:
        # For a fixed port, on which a previous group's connections linger for a minute.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(where)
        listening.listen(socket.SOMAXCONN)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            raise BroadcastError(
                f"another program uses port {port} of {address}: give another port, or 0 for any "
                "free port"
            ) from error
        raise BroadcastError(
            f"cannot listen on {address} port {port}: {error}. Check master_address"
        ) from error
    return listening
