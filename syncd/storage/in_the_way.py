"""What stands where a file of ours belongs, and is none."""

from __future__ import annotations

import logging
import secrets
from pathlib import Path

from syncd.protocol.events import Event
from syncd.storage.fsio import Storage

log = logging.getLogger(__name__)


def move_away(storage: Storage, path: Path) -> None:
    """Give another name to what stands where a file of ours belongs; nothing is deleted."""
    away = path.with_name(f"{path.name}.moved-{secrets.token_hex(6)}")
    storage.rename(path, away)
    log.error(
        "%s was no file of syncd's: it is %s now, and may be removed",
        path,
        away.name,
        extra=Event.LEFT_ALONE(path=away, reason="it was no file of syncd's"),
    )
