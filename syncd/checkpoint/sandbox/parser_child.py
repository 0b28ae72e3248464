"""The child process that reads untrusted pickles and JSON headers.

If it exceeds its limits of memory or processor time, only this process fails.
"""

from __future__ import annotations

import gc
import io
import math
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterable
from itertools import starmap
from typing import Final

from syncd.checkpoint.dcp.dcp_metadata import read_chunked_fields, read_metadata
from syncd.checkpoint.safetensors_header import read_fields
from syncd.checkpoint.sandbox.wire import (
    CHUNKED_HEADER,
    ERRORS,
    HEADER,
    METADATA,
    NAME_MAP,
    OUT_OF_MEMORY,
    PICKLE,
    READY,
    REQUEST,
    TENSOR,
    Row,
    contents_rows,
    failure,
    frame,
    frames,
    name_map_rows,
    piece_row,
    read_asked,
)
from syncd.checkpoint.torch_files.pieces import read_pieces, read_tensor

#: Exit status if there is not even memory to report the lack of it.
EXIT_MEMORY: Final = 70
_PAGE: Final = resource.getpagesize()


def run() -> None:
    """Call :func:`main` with the command-line arguments after the path."""
    try:
        main(*map(int, sys.argv[2:]))
    except MemoryError:
        os._exit(EXIT_MEMORY)
    except BrokenPipeError:
        pass  # the parent has gone


def main(memory: int, memory_factor: int, memory_most: int, cpu_seconds: int) -> None:
    """Answer requests until standard input ends. The limits are those of ``ParseLimits``."""
    _confine()
    base = _address_space()
    # Lower the hard limit for good: a request can change only the soft limit below it.
    resource.setrlimit(resource.RLIMIT_AS, (base + memory_most, base + memory_most))
    gc.disable()  # collections would take half of the time and find nothing
    requests, answers = io.FileIO(0, "r"), io.FileIO(1, "w")
    _send(answers, frame(READY, b""))
    while head := _take(requests, REQUEST.size):
        kind, length = REQUEST.unpack(head)
        allowed = min(memory + memory_factor * length, memory_most)
        resource.setrlimit(resource.RLIMIT_AS, (base + allowed, base + memory_most))
        used = resource.getrusage(resource.RUSAGE_SELF)
        spent = math.ceil(used.ru_utime + used.ru_stime)
        resource.setrlimit(resource.RLIMIT_CPU, (spent + cpu_seconds, resource.RLIM_INFINITY))
        try:
            _answer(answers, kind, _take(requests, length))
        except MemoryError:
            _send(answers, failure(OUT_OF_MEMORY, ""))
        gc.collect()


def _confine() -> None:
    """Drop rights that parsing does not need, and be the first to be killed if memory is short."""
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as score:
            score.write("1000")
    except OSError:
        pass  # a container without /proc: then the kernel chooses by size
    for limit in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC):
        resource.setrlimit(limit, (0, 0))
    # Only the kernel and the parent may end this child. Ignore signals to the whole service.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGXCPU})


def _address_space() -> int:
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[0]) * _PAGE
    except OSError:
        return 256 * 1024 * 1024  # no /proc: more than this process has


def _answer(answers: io.FileIO, kind: bytes, data: bytes) -> None:
    try:
        for part in frames(_ROWS[kind](data)):
            _send(answers, part)
    except tuple(ERRORS.values()) as error:
        if isinstance(error.__cause__, MemoryError):
            raise error.__cause__ from None
        _send(answers, failure(type(error).__name__, str(error)))


# Messages begin with the file's name, which the parent adds. Pickles are read in C even if no
# CRC-32 vouches for the bytes: the limit bounds the memory that a damaged memo index takes.


def _tensor(data: bytes) -> Iterable[Row]:
    name, pickled = read_asked(data)
    return [piece_row("", read_tensor(pickled, "", name or ""))]


def _metadata(data: bytes) -> Iterable[Row]:
    prefix, pickled = read_asked(data)
    return contents_rows(read_metadata(pickled, "", prefix=prefix, intact=True))


_ROWS: Final[dict[bytes, Callable[[bytes], Iterable[Row]]]] = {
    PICKLE: lambda data: starmap(piece_row, read_pieces(data, "", intact=True).items()),
    TENSOR: _tensor,
    METADATA: _metadata,
    HEADER: lambda data: read_fields(data, ""),
    CHUNKED_HEADER: lambda data: ([*entry, at] for entry, at in read_chunked_fields(data, "")),
    NAME_MAP: name_map_rows,
}


def _take(requests: io.FileIO, count: int) -> bytes:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        done = requests.readinto(view)
        if not done:
            return b""
        view = view[done:]
    view.release()
    return bytes(data)


def _send(answers: io.FileIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[answers.write(view) :]
