"""The child process that makes versions; :class:`~.maker.MakerProcess` starts it.

It ends at once when its standard input does, so nothing is written for a daemon that has ended.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import queue
import resource
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, Final

from syncd.checkpoint.merging.options import Work
from syncd.checkpoint.model_folder import LOGGED
from syncd.checkpoint.sandbox.confinement import ignore_signals
from syncd.daemon.orders import decoded
from syncd.daemon.signs import AnsweredStorage
from syncd.storage.job import Job

#: Seconds between two signs of life, each after a look whether the folder is still there.
_SIGN: Final = 1.0
_TELLING: Final = threading.Lock()
#: Seconds without an order after which the process ends.
_IDLE: Final = 60.0
#: The pages of memory with which the process takes no more orders, because Python keeps them.
_MUCH: Final = 256 * 1024**2 // resource.getpagesize()


def run() -> None:
    """Make what orders on standard input say.

    Ends with status 0 only between two orders.
    """
    ignore_signals()
    logging.getLogger().addHandler(_Lines())
    logging.getLogger().setLevel(logging.INFO)
    orders: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(orders,), daemon=True).start()
    try:
        while _resident() < _MUCH:
            _carry_out(*json.loads(orders.get(timeout=_IDLE)))
    except (queue.Empty, BrokenPipeError):
        pass
    os._exit(0)  # the other thread still reads


def _resident() -> int:
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()
        return int(pages[1]) - int(pages[2])  # without the files of torch
    except OSError:
        return 0  # no /proc: memory is not looked at


def _listen(orders: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        orders.put(line)
    os._exit(0)  # the parent has ended


def _carry_out(root: str, flaws: list[str], *told: Any) -> None:
    LOGGED.update((Path(root), flaw) for flaw in flaws)
    at, said, has_answered = (0, 0), time.monotonic(), False

    def answered() -> None:
        nonlocal has_answered
        has_answered = True

    job, order = Job.at(root, AnsweredStorage(Path(root), answered)), decoded(*told)
    uncounted = Job.at(root).storage

    def progress(done: int, total: int) -> None:
        nonlocal at
        at = done, total
        alive()

    def alive() -> None:
        nonlocal said, has_answered
        if time.monotonic() - said >= _SIGN:
            said = time.monotonic()
            if not uncounted.exists(order.folder):  # its daemon was superseded
                os._exit(1)
            # Not if all threads wait for storage, while this one looks after them.
            if has_answered:
                has_answered = False
                _tell("at", *at)

    try:
        order.make(job, Work(alive, progress))
    except BrokenPipeError:
        raise
    except OSError as error:
        text = str(error.strerror or error)
        _tell("failed", "OSError", text, error.errno or errno.EIO, error.filename)
    except Exception as error:  # noqa: BLE001 - the parent raises it
        _tell("failed", type(error).__name__, str(error), None, traceback.format_exc())
    else:
        _tell("at", *at)
        _tell("made")


class _Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        fields = {key: vars(record).get(key) for key in ("event", "fields")}
        _tell("log", record.name, record.levelno, record.getMessage(), fields)


def _tell(*what: object) -> None:
    view = memoryview(json.dumps(what, default=str).encode() + b"\n")
    with _TELLING:
        while view:
            view = view[os.write(1, view) :]
