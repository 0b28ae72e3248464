"""Pins: what is pinned is not pruned, from the moment that the call returns.

A pin is an empty file at the place that pruning itself asks, so that no daemon has to hear of it:

- A version is pinned in its lease folder. Retiring it begins with the rmdir of that folder, which
  fails while anything is in it, on the server, whatever a daemon has decided before.
- A step is pinned in its folder. Pruning takes that out of sight by a rename, looks inside once
  more, and puts it back where anything changed. So a pin that is seen under the step's own name
  after it was made is seen by every prune that comes after, and each one before has put the folder
  back.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from syncd.protocol.errors import InvalidSettingsError, VersionGoneError
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import MANIFEST, PINNED, step_folder, version_folder
from syncd.storage.errnos import is_gone, is_no_record
from syncd.storage.fsio import Storage

#: Seconds between looks for a step folder: it is out of sight while a daemon looks inside it.
_PAUSES: Final = (0.1, 0.2, 0.5, 1.0, 2.0)


def pin_version(storage: Storage, layout: JobLayout, sequence: int) -> None:
    """Keep a published version, until :func:`unpin_version`.

    Raises:
        VersionGoneError: it was retired, or never published.
    """
    marker = layout.lease_folder(sequence) / PINNED
    storage.refresh(layout.leases)
    try:
        _make(storage, marker)
    except OSError as error:
        if not (is_gone(error) or is_no_record(error)):
            raise
        raise VersionGoneError(_gone(layout, sequence)) from error
    # A lease folder is there before its version is.
    storage.refresh(layout.published)
    if not storage.exists(layout.version(sequence) / MANIFEST):
        storage.unlink_if_there(marker)
        raise VersionGoneError(_gone(layout, sequence))


def unpin_version(storage: Storage, layout: JobLayout, sequence: int) -> bool:
    """Let a version go by the usual rules; False where it was not pinned."""
    storage.refresh(layout.leases)
    return storage.unlink_if_there(layout.lease_folder(sequence) / PINNED)


def pin_step(
    storage: Storage,
    layout: JobLayout,
    step: int,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Keep syncd from pruning a step's folder, until :func:`unpin_step`.

    Not promised: that its trainer leaves it alone.

    Raises:
        InvalidSettingsError: there is no such folder.
    """
    marker = layout.step(step) / PINNED
    for pause in (*_PAUSES, None):
        try:
            storage.refresh(layout.root)
            _make(storage, marker)
            storage.refresh(layout.root)
            # By its own name: the file may have been made in a folder that was moved meanwhile.
            if storage.exists(marker):
                return
        except OSError as error:
            if not is_gone(error):
                raise
        if pause is not None:
            sleep(pause)
    raise InvalidSettingsError(
        f"{layout.root} has no {step_folder(step)}: it was pruned, or never saved"
    )


def unpin_step(
    storage: Storage,
    layout: JobLayout,
    step: int,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Let a step's folder go by the usual rules; False where it was not pinned."""
    folder = layout.step(step)
    for pause in (*_PAUSES, None):
        storage.refresh(layout.root)
        if storage.unlink_if_there(folder / PINNED):
            return True
        if storage.exists(folder):
            return False
        if pause is not None:
            sleep(pause)
    return False


def _make(storage: Storage, marker: Path) -> None:
    """Make a pin durable; one that is there already may not be so yet."""
    try:
        storage.write_new(marker, b"")
    except FileExistsError:
        pass
    storage.sync_folder(marker.parent)


def _gone(layout: JobLayout, sequence: int) -> str:
    return (
        f"{layout.root} has no {version_folder(sequence)} that could be kept: it was retired, or "
        "never published; 'syncd status' shows which ones there are"
    )
