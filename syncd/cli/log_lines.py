"""Log lines: text, or one JSON object on each line."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
from datetime import UTC, datetime
from types import TracebackType
from typing import Final

from syncd.protocol.errors import InvalidSettingsError, SyncdError
from syncd.protocol.events import JOB_THREAD, NOTE, CommandFailed, Fault
from syncd.protocol.names import printable
from syncd.storage.repeats import Repeats

log = logging.getLogger(__name__)

#: syncd's own packages; other packages' messages below INFO are never shown.
_OURS: Final = ("syncd", "trainer_hooks", "explorer_hooks")
_HALF: Final = re.compile("[\ud800-\udfff]")
#: A line is shown this many times in a minute, before it is held back.
_BURST: Final = 10


def _job_of(record: logging.LogRecord) -> str:
    """The job of a line; empty if the process serves only one job."""
    thread = record.threadName or ""
    return thread.removeprefix(JOB_THREAD) if thread.startswith(JOB_THREAD) else ""


class HumanLines(logging.Formatter):
    """A line for people, e.g. ``2026-01-31 12:00:00,123 INFO published step 7 as v3``.

    If a process serves many jobs, the message begins with the job's name in brackets.
    :func:`.printable` escapes all text, because it can contain names from other programs.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line, with the number of held-back repeats, and the traceback."""
        line = f"{self.formatTime(record)} {record.levelname} "
        if job := _job_of(record):
            line += f"[{os.path.basename(job)}] "
        line += record.getMessage()
        if held_back := getattr(record, "held_back", 0):
            line += f" ({held_back} earlier repeats were not logged)"
        below = [self.formatException(record.exc_info)] if record.exc_info else []
        below += [record.stack_info] if record.stack_info else []
        traces = (f"  {printable(one)}" for text in below for one in text.split("\n"))
        return "\n".join([printable(line), *traces])


class JsonLines(logging.Formatter):
    """One JSON object: time (UTC), level, event, message, logger, and the event's fields.

    A value of a type that JSON lacks becomes text. Bytes that are not UTF-8 are escaped.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The record as one JSON object, without a newline."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": getattr(record, "event", NOTE),
            "message": record.getMessage(),
            "logger": record.name,
        }
        if job := _job_of(record):
            line["job"] = job
        line |= getattr(record, "fields", {})
        if held_back := getattr(record, "held_back", 0):
            line["held_back"] = held_back
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        text = json.dumps(line, default=str, ensure_ascii=False)
        # A name that is not UTF-8 has half surrogate pairs, which many readers refuse in JSON.
        text = _HALF.sub(lambda half: f"\\\\u{ord(half[0]):04x}", text)
        text = text if text.isascii() else json.dumps(json.loads(text))
        # DEL is the one control character that JSON leaves unescaped.
        return text.replace("\x7f", "\\u007f")


class Flood(logging.Filter):
    """Holds back the repeats of a line, after ten in a minute (see :class:`.Repeats`)."""

    def __init__(self, repeats: Repeats | None = None) -> None:
        super().__init__()
        self._repeats = repeats or Repeats(burst=_BURST)

    def filter(self, record: logging.LogRecord) -> bool:
        """True if the line is shown."""
        line = (record.name, record.levelno, record.getMessage(), _job_of(record))
        held_back = self._repeats.held_back(line)
        if held_back:
            record.held_back = held_back
        return held_back is not None


class _Lines(logging.StreamHandler):  # type: ignore[type-arg] # generic in its stub alone
    """A class of its own, so that :func:`set_up` finds the handler of an earlier call."""


def set_up(form: str = "human", level: str = "info") -> None:
    """Log to standard error, as ``human`` or ``json``; ``level`` is the lowest level to log."""
    root = logging.getLogger()
    handler = next((one for one in root.handlers if isinstance(one, _Lines)), None)
    if handler is None:
        handler = _Lines(sys.stderr)
        handler.addFilter(Flood())
        root.addHandler(handler)
    handler.setFormatter(JsonLines() if form == "json" else HumanLines())
    least = logging.getLevelNamesMapping()[level.upper()]
    root.setLevel(max(least, logging.INFO))
    for name in _OURS:
        logging.getLogger(name).setLevel(least)


def name_faults() -> None:
    """Log the uncaught exceptions of all threads.

    Do not call this in a library: Python's exception hooks affect the whole process.
    """

    def of_process(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            log.error(Fault(), exc_info=(kind, error, trace), extra=Fault().extra)
        else:
            sys.__excepthook__(kind, error, trace)

    def of_thread(raised: threading.ExceptHookArgs) -> None:
        if raised.exc_value is not None:
            of_process(raised.exc_type, raised.exc_value, raised.exc_traceback)

    sys.excepthook, threading.excepthook = of_process, of_thread


def last_words(error: Exception, exit_code: int) -> None:
    """Log the error that ends a command, in the configured format."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _Lines) and isinstance(handler.formatter, JsonLines):
            kind = type(error).__name__ if isinstance(error, SyncdError) else "OSError"
            CommandFailed(kind, exit_code, error).tell(log)
            return
    # Only the error of a bad configuration has several lines: one for each mistake.
    lines = str(error).split("\n") if isinstance(error, InvalidSettingsError) else [str(error)]
    lines += getattr(error, "__notes__", ())
    print("syncd:", "\n".join(map(printable, lines)), file=sys.stderr)
