"""Records that others write: what cannot be read of them keeps nobody from the rest."""

from __future__ import annotations

import logging
from pathlib import Path

from syncd.protocol.errors import RecordError
from syncd.protocol.records import R, parse
from syncd.storage.errnos import is_gone, is_no_record, is_refused_here
from syncd.storage.fsio import Storage

log = logging.getLogger(__name__)


def read_of_others(storage: Storage, model: type[R], path: Path) -> R | None:
    """A record of someone else's; None where there is none that can be read.

    Raises:
        OSError: storage does not answer, which says nothing about what is there.
    """
    try:
        return parse(model, storage.read(path), path)
    except RecordError as error:
        log.debug("%s", error)
    except OSError as error:
        if not (is_gone(error) or is_no_record(error) or is_refused_here(error)):
            raise
    return None
