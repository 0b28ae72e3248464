"""Reading what someone else writes, and may not have written yet."""

from __future__ import annotations

import logging
from pathlib import Path

from syncd.protocol.errors import RecordError
from syncd.protocol.events import Event
from syncd.protocol.records import R, parse
from syncd.storage.errnos import is_gone
from syncd.storage.fsio import RECORD_LIMIT, Storage

log = logging.getLogger(__name__)


def read_if_there(
    storage: Storage, model: type[R], path: Path, limit: int = RECORD_LIMIT
) -> R | None:
    """A record; None where there is none, or none that can be read, which is logged.

    Raises:
        OSError: storage failed, or the file has more than ``limit`` bytes.
    """
    try:
        return parse(model, storage.read(path, limit), path)
    except RecordError as error:
        log.warning("%s", error, extra=Event.RECORD_LOST(path=path, reason=error))
        return None
    except OSError as error:
        if is_gone(error):
            return None
        raise
