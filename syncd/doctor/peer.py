"""The other processes of a run: helpers on this host, or a process on another host."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from syncd.doctor.channel import Channel, There
from syncd.doctor.party import put
from syncd.protocol.errors import JobUnavailableError
from syncd.storage.errnos import is_gone
from syncd.storage.fsio import Storage
from syncd.storage.job import Job
from syncd.storage.probe_room import ProbeRoom, rooms
from syncd.storage.sessions import new_session_id

#: The beginning of the names of rooms that wait for another host.
_PEER: Final = "peer-"
#: In a room: the folder in which processes of other hosts write their names, and the file with the
#: name of the accepted process.
_HELLO: Final = "hello"
_WELCOME: Final = "welcome"
_PAUSE: Final = 0.2
_HELPERS: Final = 2
_ENDING: Final = 10.0


def new_name(*, for_peer: bool) -> str:
    """A new, unique name for a room."""
    return new_session_id(_PEER if for_peer else "")


@contextmanager
def helpers(storage: Storage, room: ProbeRoom, patience: float) -> Iterator[list[There]]:
    """Start processes on this host; end them after the block."""
    with ExitStack() as stack:
        yield [
            There(
                Channel(storage, room.path, 0, number),
                patience,
                stack.enter_context(_helper(room, number)),
            )
            for number in range(1, _HELPERS + 1)
        ]


@contextmanager
def _helper(room: ProbeRoom, number: int) -> Iterator[Callable[[], bool]]:
    """Start a helper; yield a function that returns True if it has ended."""
    told = [str(room.job), str(room.path), str(number), str(os.getpid())]
    process = subprocess.Popen(  # noqa: S603 - syncd itself, by this interpreter
        [sys.executable, "-m", "syncd.doctor", *told]
    )
    try:
        yield lambda: process.poll() is not None
    finally:
        process.kill()
        try:
            process.wait(_ENDING)
        except subprocess.TimeoutExpired:
            pass  # the helper hangs in a call of storage, and ends when that call ends


def receive(storage: Storage, room: ProbeRoom, limit: float, patience: float) -> There:
    """Wait in a room for other hosts, and accept the first process that joins.

    The room's name must come from ``new_name(for_peer=True)``. ``patience`` is for :class:`.There`.

    Raises:
        JobUnavailableError: no host joined within ``limit`` seconds.
    """
    storage.mkdir(room.path / _HELLO)
    deadline = time.monotonic() + limit
    while True:
        room.beat()
        storage.refresh(room.path / _HELLO)
        if found := storage.names(room.path / _HELLO):
            put(storage, room.path / _WELCOME, found[0].encode())
            return There(Channel(storage, room.path, 0, 1), patience)
        if time.monotonic() > deadline:
            raise JobUnavailableError(
                f"no other host joined within {limit:.0f} s. Run 'syncd doctor {room.job} --peer "
                "1' on the other host at the same time. If this command is running there, that "
                "host sees another folder at this path, or cannot write to this folder"
            )
        time.sleep(_PAUSE)


def visit(job: Job, limit: float) -> tuple[Path, Channel]:
    """Join a room that waits for a host; return the room, and the channel to its process.

    Tries all such rooms, because killed runs can leave rooms that never answer.

    Raises:
        JobUnavailableError: no room answered within ``limit`` seconds.
    """
    me = new_session_id()
    greeted: set[Path] = set()
    refused: OSError | None = None
    deadline = time.monotonic() + limit
    while time.monotonic() <= deadline:
        for room in _waiting(job):
            try:
                if room not in greeted:
                    job.storage.refresh(room)
                    put(job.storage, room / _HELLO / me, f"{os.getpid()}".encode())
                    greeted.add(room)
                job.storage.refresh(room)
                if job.storage.read(room / _WELCOME).decode() == me:
                    return room, Channel(job.storage, room, 1, 0)
            except OSError as error:
                refused = refused if is_gone(error) else error
        time.sleep(_PAUSE)
    why = f" ({refused})" if refused else ""
    raise JobUnavailableError(
        f"the other host did not answer within {limit:.0f} s{why}. Run 'syncd doctor "
        f"{job.layout.root} --peer 0' there at the same time. If this command is running there, "
        f"the two hosts see different folders at {job.layout.root}"
    )


def _waiting(job: Job) -> list[Path]:
    try:
        job.storage.refresh(job.layout.state)
        job.storage.refresh(job.layout.doctor)
    except OSError as error:
        if is_gone(error):
            return []
        raise
    return rooms(job, _PEER)
