"""The folders of steps, and the pointers to them: which there are, and how trainers make them."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Final

from syncd.protocol.layout import JobLayout
from syncd.protocol.names import TEMPORARY, parse_step_folder
from syncd.storage.errnos import NOT_EMPTY, is_gone
from syncd.storage.fsio import Storage

_ATTEMPTS: Final = 5


def step_folders(storage: Storage, layout: JobLayout) -> list[int]:
    """The steps that have a folder, lowest first.

    Raises:
        OSError: the job's folder cannot be listed.
    """
    found = (parse_step_folder(name) for name in storage.names(layout.root))
    return sorted(step for step in found if step is not None)


def make_step_folder(
    storage: Storage, layout: JobLayout, step: int, *, mark: str | None = None
) -> None:
    """Make the step's folder, if it is not there, by a rename out of a folder of ours.

    Where the job is not mounted its place may be an empty folder: nothing is made in that.

    Args:
        storage: the shared storage.
        layout: the job.
        step: whose.
        mark: an empty file that the folder is born with. A folder that is empty is replaced by the
            rename of whoever makes it at the same time; one with a file in it is not.
    """
    folder = layout.step(step)
    for left in reversed(range(_ATTEMPTS)):
        draft = layout.drafts / f"{TEMPORARY}{folder.name}-{secrets.token_hex(6)}"
        try:
            storage.mkdir(draft)
            if mark is not None:
                storage.close(storage.create(draft / mark))
            storage.rename(draft, folder)
        except OSError as error:
            _remove(storage, draft, mark)
            if error.errno in NOT_EMPTY:
                return
            # A daemon that collects leftovers takes a draft that lies still for one.
            if not (is_gone(error) and left):
                raise
        else:
            storage.sync_folder(folder.parent)
            return


def _remove(storage: Storage, draft: Path, mark: str | None) -> None:
    try:
        if mark is not None:
            storage.unlink_if_there(draft / mark)
        storage.rmdir(draft)
    except OSError as error:
        if not is_gone(error):
            raise


def point(storage: Storage, layout: JobLayout, pointer: Path, step: int) -> None:
    """Let a pointer name a step, by one rename."""
    storage.replace(pointer, f"{step}\n".encode(), room=layout.drafts)
