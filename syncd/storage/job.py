"""Opening a job directory: the folders of ours in it, and the format that all agree on."""

from __future__ import annotations

import os
import secrets
import stat

from syncd.protocol.errors import JobUnavailableError
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import TEMPORARY
from syncd.protocol.records import Format, encode, parse
from syncd.storage.errnos import is_gone, is_no_record
from syncd.storage.fsio import Storage


def open_job(storage: Storage, layout: JobLayout, *, lease_time: float | None = None) -> Format:
    """Make what is missing of ``.syncd`` and ``published``, and agree on the format.

    The lease time is fixed by whoever comes first; later wishes are not heard, since two hosts that
    judge by different lease times would take leases from each other.

    Args:
        storage: the shared storage.
        layout: the job directory; it must exist.
        lease_time: seconds, for a job that has none yet. Default 30.

    Returns:
        The format of the job.

    Raises:
        JobUnavailableError: the job directory is missing or cannot be written.
        ProtocolMismatchError: the job is of a newer protocol.
    """
    try:
        status = storage.status(layout.root)
        if status is None or not os.path.isdir(layout.root):
            raise JobUnavailableError(
                f"the job directory {layout.root} is not there: create it, or mount its storage"
            )
        for folder in (
            layout.published,
            layout.epochs,
            layout.leases,
            layout.sessions,
            layout.explorers,
            layout.quarantine,
            layout.requests,
            layout.drafts,
        ):
            storage.make_folder(folder, below=layout.root)
        check_folders(storage, layout)
        return _agree(storage, layout, lease_time)
    except PermissionError as error:
        raise JobUnavailableError(
            f"{error.filename} may not be written by user {os.geteuid()}: run as the trainers' "
            "user, or give the folder a group that both are in"
        ) from error
    except OSError as error:
        if not (is_no_record(error) or is_gone(error)):
            raise
        raise JobUnavailableError(
            f"{error}: move away what stands where a file or folder of syncd's belongs"
        ) from error


def lease_time_of(storage: Storage, layout: JobLayout) -> float:
    """The lease time of a job that is there already, in seconds; nothing is made.

    Raises:
        JobUnavailableError: this is no job that syncd has served.
        RecordError: its format cannot be read.
    """
    check_folders(storage, layout)
    try:
        return parse(Format, storage.read(layout.format), layout.format).lease_time
    except OSError as error:
        if is_gone(error):
            raise JobUnavailableError(
                f"{layout.root} is not a job that syncd has served: it has no .syncd/format.json"
            ) from error
        raise JobUnavailableError(f"{layout.format} cannot be read: {error}") from error


def check_folders(storage: Storage, layout: JobLayout) -> None:
    """Look that our folders are folders: filelock would follow a link out of the job.

    Raises:
        JobUnavailableError: one of them is something else.
    """
    for folder in (layout.state, layout.published, layout.epochs, layout.leases, layout.sessions):
        status = storage.status(folder)
        if status is not None and not stat.S_ISDIR(status.st_mode):
            raise JobUnavailableError(
                f"{folder} is a link or a file where syncd has a folder: move it away"
            )


def _agree(storage: Storage, layout: JobLayout, lease_time: float | None) -> Format:
    """The format on disk, or ours where there is none: a link never replaces another's."""
    if not storage.exists(layout.format):
        ours = Format() if lease_time is None else Format(lease_time=lease_time)
        mine = layout.state / f"{TEMPORARY}format-{secrets.token_hex(6)}"
        storage.write_new(mine, encode(ours))
        try:
            storage.link(mine, layout.format)
        except FileExistsError:
            pass  # another was first; its format holds
        finally:
            storage.unlink_if_there(mine)
        storage.sync_folder(layout.state)
    return parse(Format, storage.read(layout.format), layout.format)
