"""Standard output and error behind a child process, so that nobody who reads them blocks syncd.

The child always reads. It keeps the last MiB that a sink (a pipe, a terminal, a file) has not taken
yet, and says how many lines it dropped, once the sink takes lines again. It outlives syncd by up to
2 s, so it also writes the stacks of a crash.
"""

from __future__ import annotations

import atexit
import logging
import os
import select
import signal
import threading
from typing import Final

from syncd.cli.log_lines import HumanLines, JsonLines
from syncd.protocol.events import LinesDropped

log = logging.getLogger(__name__)

#: The most bytes that wait for a sink.
_MOST: Final = 1024 * 1024
#: Seconds for which a sink gets the last lines.
_LAST: Final = 2.0
#: Seconds until a sink that refused lines, for example a full disk, gets them again.
_AGAIN: Final = 0.2
#: The end of a pipe whose other end only the child has.
_lifelines: list[int] = []


def start() -> None:
    """Start the child, which writes all that this process and its children print from now on.

    Call this before the process has threads.
    """
    # In place of a closed descriptor the next file would get the log.
    while (null := os.open(os.devnull, os.O_RDWR)) < 3:
        pass
    os.close(null)
    # The lines for one file stay in order, in one pipe.
    is_one = os.path.sameopenfile(1, 2)
    out, error = os.pipe(), os.pipe()
    lifeline, held = os.pipe()
    if not os.fork():
        try:
            # What ends syncd, its process group or its unit must not end its last lines.
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            os.close(out[1])
            os.close(error[1])
            copy = threading.Thread(target=_copy, args=(out[0], 1))
            copy.start()
            _copy(error[0], 2)
            copy.join()
        finally:
            os._exit(0)
    os.dup2((error if is_one else out)[1], 1)
    os.dup2(error[1], 2)
    for descriptor in (*out, *error, held):
        os.close(descriptor)
    _lifelines.append(lifeline)
    atexit.register(end)


def end() -> None:
    """Wait until all is written, for about 2 s at most; what is printed later is lost."""
    while _lifelines:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        select.select([_lifelines.pop()], [], [], _LAST + _AGAIN)


def _copy(source: int, sink: int) -> None:
    """Copy a pipe to its end. The sink stays blocking, because others share the open file."""
    changed = threading.Condition()
    waiting = bytearray()
    dropped, ended = 0, False

    def write() -> None:
        said, has_begun = 0, False
        while True:
            with changed:
                changed.wait_for(lambda: b"\n" in waiting or ended)
                if not waiting:
                    return
                # Whole lines: a note would stand within another one.
                count = len(waiting) if ended else waiting.rfind(b"\n") + 1
                lines = bytes(waiting[:count])
                del waiting[:count]
                if dropped > said and not has_begun:
                    said = dropped
                    lines = _note(said, lines) + lines
            try:
                while lines:
                    lines = lines[os.write(sink, lines) :]
            except OSError:
                with changed:
                    waiting[:0] = lines
                    changed.wait(_AGAIN)
            has_begun = bool(lines)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    watched = select.poll()
    watched.register(source, select.POLLIN)
    if sink == 1:  # whose closed end is an error for who prints, as without the child
        watched.register(sink, 0)
    while all(ready == source for ready, _ in watched.poll()) and (part := os.read(source, _MOST)):
        with changed:
            waiting += part
            if (over := len(waiting) - _MOST) > 0:
                over = waiting.find(b"\n", over) + 1 or over
                dropped += waiting.count(b"\n", 0, over)
                del waiting[:over]
            changed.notify()
    os.close(source)
    with changed:
        ended = True
        changed.notify()
    writer.join(_LAST)


def _note(dropped: int, lines: bytes) -> bytes:
    """A line about dropped lines, in the form of the lines that it comes before."""
    event = LinesDropped(dropped)
    record = log.makeRecord(log.name, event.level, "", 0, event, (), None, extra=event.extra)
    form = JsonLines() if lines.startswith(b"{") else HumanLines()
    return f"{form.format(record)}\n".encode()
