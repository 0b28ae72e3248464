"""Read record files, which may be missing, torn, foreign, or of a newer syncd."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from syncd.protocol.errors import RecordError
from syncd.protocol.events import LeftAlone, RecordLost
from syncd.protocol.records import R, parse
from syncd.storage.errnos import is_gone, is_unreadable
from syncd.storage.fsio import Storage

log = logging.getLogger(__name__)


def _warn(path: Path, error: Exception) -> None:
    RecordLost(path, error).tell(log)


@dataclass(frozen=True, kw_only=True)
class ReadPolicy:
    """The failures of a read that raise no error: by default, a missing file and a damaged record.

    Attributes:
        absent: returns True for an OSError that counts as a missing file, which is not logged.
        damaged: returns True for an OSError that counts as an unreadable record.
        newer: if False, a record of a newer protocol raises; otherwise it counts as unreadable.
        say: logs the path and the error of an unreadable record.
    """

    absent: Callable[[OSError], bool] = is_gone
    damaged: Callable[[OSError], bool] = lambda _: False
    newer: bool = True
    say: Callable[[Path, Exception], None] = _warn


EXPECTED: Final = ReadPolicy()
#: Like :data:`EXPECTED`, but nothing is logged.
SILENT: Final = ReadPolicy(say=lambda *_: None)
#: For reading many files: unreadable files are ignored. Only a failure of the storage is an error.
OF_OTHERS: Final = ReadPolicy(
    absent=lambda error: is_gone(error) or is_unreadable(error),
    say=lambda _, error: log.debug("%s", error),
)
#: For showing people every record that can be read: no failure is an error.
IF_ANY: Final = ReadPolicy(absent=lambda _: True, say=lambda *_: None)


def readable_lines(model: type[R], lines: Iterable[bytes], path: Path) -> Iterator[R]:
    """The records in a file with one record a line. Torn, empty and newer lines are left out."""
    for line in lines:
        try:
            record = parse(model, line, path)
        except RecordError:
            continue
        yield record


def move_away(storage: Storage, path: Path) -> None:
    """Rename a foreign file or folder whose name syncd needs for its own file; delete nothing."""
    away = path.with_name(f"{path.name}.moved-{secrets.token_hex(6)}")
    storage.rename(path, away)
    LeftAlone(away, f"it was {path.name}, but no file of syncd; you may remove it").tell(log)
