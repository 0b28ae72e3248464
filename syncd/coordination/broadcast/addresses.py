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
    """This host's IP address on its default route; ``127.0.0.1`` without a default route.

    If other hosts need an address on another network, set ``master_address``.
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
    """Listen on an address of this host; raise BroadcastError if this is impossible."""
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
