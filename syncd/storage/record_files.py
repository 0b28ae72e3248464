"""Record files that others write: they may be missing, torn, foreign or of a newer syncd."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from syncd.protocol.errors import RecordError
from syncd.protocol.events import Event
from syncd.protocol.records import R, parse
from syncd.storage.errnos import is_gone, is_unreadable
from syncd.storage.fsio import Storage

log = logging.getLogger(__name__)


def _warn(path: Path, error: Exception) -> None:
    log.warning("%s", error, extra=Event.RECORD_LOST(path=path, reason=error))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPolicy:
    """The failures of a read that are no errors. By default: no file, and no record in it.

    Attributes:
        absent: whether an OSError counts as if there were no file; nothing is logged.
        damaged: whether another OSError counts as a record that cannot be read.
        newer: whether the record of a newer protocol counts as one too; if not, it is an error.
        say: logs the path and the error of a record that cannot be read.
    """

    absent: Callable[[OSError], bool] = is_gone
    damaged: Callable[[OSError], bool] = lambda _: False
    newer: bool = True
    say: Callable[[Path, Exception], None] = _warn


EXPECTED: Final = ReadPolicy()
#: The same without a word.
SILENT: Final = ReadPolicy(say=lambda *_: None)
#: No single file keeps the reader from the other files; only failing storage is an error.
OF_OTHERS: Final = ReadPolicy(
    absent=lambda error: is_gone(error) or is_unreadable(error),
    say=lambda _, error: log.debug("%s", error),
)
#: People are shown all that can be read: nothing is an error.
IF_ANY: Final = ReadPolicy(absent=lambda _: True, say=lambda *_: None)


def readable_lines(model: type[R], lines: Iterable[bytes], path: Path) -> Iterator[R]:
    """The records in a file of one record a line.

    Lines that cannot be read are left out: torn ones, those of a newer syncd, and the empty one
    between those of two daemons.
    """
    for line in lines:
        try:
            record = parse(model, line, path)
        except RecordError:
            continue
        yield record


def move_away(storage: Storage, path: Path) -> None:
    """Rename a foreign file that has the name of one of syncd's files; delete nothing."""
    away = path.with_name(f"{path.name}.moved-{secrets.token_hex(6)}")
    storage.rename(path, away)
    log.error(
        "%s was not a file of syncd: renamed it to %s, which you may remove",
        path,
        away.name,
        extra=Event.LEFT_ALONE(path=away, reason="it was no file of syncd's"),
    )
