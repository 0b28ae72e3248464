"""What a trainer does beside writing a save: it makes a step's folder, and moves a pointer."""

from __future__ import annotations

import secrets
from pathlib import Path

from syncd.protocol.layout import TEMPORARY, JobLayout
from syncd.storage.errnos import NOT_EMPTY
from syncd.storage.fsio import Storage


def make_step_folder(storage: Storage, layout: JobLayout, step: int) -> None:
    """Make the step's folder, if it is not there, by a rename out of a folder of ours.

    Where the job is not mounted its place may be an empty folder: nothing is made in that.
    """
    folder = layout.step(step)
    draft = layout.drafts / f"{TEMPORARY}{folder.name}-{secrets.token_hex(6)}"
    storage.mkdir(draft)
    try:
        storage.rename(draft, folder)
    except OSError as error:
        storage.rmdir(draft)
        if error.errno not in NOT_EMPTY:
            raise
    else:
        storage.sync_folder(folder.parent)


def point(storage: Storage, layout: JobLayout, pointer: Path, step: int) -> None:
    """Let a pointer name a step, by one rename."""
    storage.replace(pointer, f"{step}\n".encode(), room=layout.drafts)
