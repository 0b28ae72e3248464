"""List the step folders of a job, and make step folders and pointers as trainers do."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from pathlib import Path

from syncd.protocol.errors import SaveNotReadyError
from syncd.protocol.names import TEMPORARY, parse_step_folder
from syncd.storage.errnos import GONE, NOT_EMPTY, Ignoring, again, is_refused_here
from syncd.storage.fsio import Storage
from syncd.storage.job import Job

log = logging.getLogger(__name__)


def numbers_in(storage: Storage, folder: Path, parse: Callable[[str], int | None]) -> list[int]:
    """The numbers of the versions, deltas or steps in a folder, lowest first."""
    return sorted(n for name in storage.names(folder) if (n := parse(name)) is not None)


def step_folders(job: Job) -> list[int]:
    """The steps that have a folder, lowest first."""
    return numbers_in(job.storage, job.layout.root, parse_step_folder)


def has_marks(job: Job) -> bool:
    """True if a folder has ``.syncd`` or a pointer file. The folder is not listed."""
    at = job.layout
    return any(map(job.storage.exists, (at.state, at.state_pointer, at.checkpoint_pointer)))


def ask_server(job: Job) -> None:
    """Make the next reads of pointers and step folders ask the server, not this client's cache."""
    try:
        job.storage.refresh(job.layout.root)
    except OSError as error:
        if not is_refused_here(error):
            raise
        # A user who may only read the job sees changes when this client's cache expires.
        log.debug(
            "cannot refresh %s. Reads may get older content, until this host's cache expires: %s",
            job.layout.root,
            error,
        )


def check_on_disk(job: Job, step: int) -> None:
    """Check on the server that a step has a folder, because listings can be late.

    Raises:
        SaveNotReadyError: the step has no folder.
        JobUnavailableError: the job is missing now, for example unmounted.
    """
    ask_server(job)
    if job.storage.exists(job.layout.step(step)):
        return
    job.check_is_there()
    there = ", ".join(map(str, step_folders(job)))
    raise SaveNotReadyError(
        f"step {step} is not on disk; the steps on disk are {there}"
        if there
        else f"step {step} is not on disk; {job.layout.root} has no steps"
    )


def make_step_folder(job: Job, step: int, *, mark: str | None = None) -> None:
    """Make the step's folder, if it is missing, by a rename out of ``drafts/``.

    So nothing is made in the mount point of an unmounted job. ``mark`` names an empty file that the
    folder has from the start. Without it, another process that makes the folder at the same time
    could replace the folder, because it is empty.
    """
    folder = job.layout.step(step)

    def make() -> None:
        draft = job.layout.drafts / f"{TEMPORARY}{folder.name}-{secrets.token_hex(6)}"
        try:
            job.storage.mkdir(draft)
            if mark is not None:
                job.storage.close(job.storage.create(draft / mark))
            job.storage.rename(draft, folder)
        except OSError as error:
            _remove(job.storage, draft, mark)
            if error.errno in NOT_EMPTY:
                return
            raise
        job.storage.sync_folder(folder.parent)

    again(make)  # if this process was paused for long, a daemon may have deleted the draft


def _remove(storage: Storage, draft: Path, mark: str | None) -> None:
    with Ignoring(GONE):
        if mark is not None:
            storage.unlink_if_there(draft / mark)
        storage.rmdir(draft)


def point(job: Job, pointer: Path, step: int) -> None:
    """Write the number of a step into a pointer, by one rename."""
    job.storage.replace(pointer, f"{step}\n".encode(), room=job.layout.drafts)
