"""The child process that casts tensors: the only module of ``merging`` that imports torch.

Its requests hold only numbers and names of dtypes, so nothing in a file can harm it.
"""

from __future__ import annotations

import io
import mmap
import signal
import sys
import warnings

import torch

from syncd.checkpoint.merging.cast import READY, REQUEST, SLOT, TILE
from syncd.checkpoint.tensor_rules import DTYPES


def run() -> None:
    """Cast until standard input ends. The argument is the shared memory's descriptor."""
    # A signal to a whole service, or from a terminal, is for the parent to handle.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # One thread is faster than storage. Two threads that share a tile often wait for each other.
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dtypes = {name: getattr(torch, key) for key, (name, _) in DTYPES.items() if hasattr(torch, key)}
    memory = memoryview(mmap.mmap(int(sys.argv[2]), 0))
    requests, answers = io.FileIO(0, "r"), io.FileIO(1, "w")
    answers.write(READY)
    try:
        while len(head := requests.read(REQUEST.size) or b"") == REQUEST.size:
            slot, count, given, wanted = REQUEST.unpack(head)
            begin = slot * SLOT
            source = torch.frombuffer(
                memory, dtype=dtypes[given.rstrip(b"\0").decode()], count=count, offset=begin
            )
            target = torch.frombuffer(
                memory,
                dtype=dtypes[wanted.rstrip(b"\0").decode()],
                count=count,
                offset=begin + TILE,
            )
            target.copy_(source)
            answers.write(bytes((slot,)))
    except BrokenPipeError:
        pass  # the parent has gone
