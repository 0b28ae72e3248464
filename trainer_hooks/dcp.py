"""Announcing saves of trainers that use ``torch.distributed.checkpoint``."""

from __future__ import annotations

import errno
from pathlib import Path

from syncd.protocol.errors import InvalidSettingsError, SaveNotReadyError
from syncd.protocol.names import (
    DCP_METADATA,
    DCP_UNFINISHED,
    RECEIPTS,
    RETIRED,
    is_dcp_file,
    parse_part_name,
    parse_shard_name,
)
from syncd.storage.fsio import Storage
from syncd.storage.job import Job, make_step_folder, point
from trainer_hooks.writing.parts import make_mark

__all__ = ["announce_dcp"]


def announce_dcp(
    job_dir: str | Path,
    step: int,
    *,
    folder: str | Path | None = None,
    storage: Storage | None = None,
) -> None:
    """Announce a save that ``dcp.save`` has written: move the pointer that the daemon follows.

    Call this function on one rank, after all ranks have written: ``dcp.save`` must have returned,
    or the future of ``dcp.async_save`` must have a result. The daemon may delete this step once a
    newer step is announced.

    Promised: the pointer moves by one rename, and only to a folder with a finished DCP save. Not
    promised: that the daemon can merge the save. If it cannot, its log has the reason.

    Args:
        job_dir: the job directory; its folder ``.syncd`` is created if it is missing.
        step: the step that was saved.
        folder: the folder of the save, by default ``JOB/global_step_N/actor``. Any other folder
            must be on the same filesystem, because its files are hard-linked into the job.
            Afterwards you may delete that folder. With such a folder,
            ``latest_checkpointed_iteration.txt`` names the step, too.
        storage: set only by tests.

    Raises:
        SaveNotReadyError: the folder has no finished save.
        InvalidSettingsError: the folder cannot be hard-linked into the job. Or the step's folder
            has shards or receipts of another save, so the daemon would not publish this save.
        JobUnavailableError: the job directory is missing or not writable.
        OSError: storage failed.
    """
    job = Job.at(job_dir, storage)
    job.open()
    storage, layout = job.storage, job.layout
    actor = layout.actor(step)
    source = actor if folder is None else Path(folder)
    names = storage.names(source)
    parts = [name for name in names if parse_part_name(name) is not None]
    if DCP_UNFINISHED in names or not (DCP_METADATA in names or parts):
        raise SaveNotReadyError(
            f"{source} has no {DCP_METADATA}, which torch.distributed.checkpoint writes last. "
            "Announce a save only when it is complete. Check that the checkpoint_id of the save "
            "is this folder"
        )
    is_elsewhere = folder is not None and source.absolute() != actor.absolute()
    others = [
        name
        for name in (storage.names(actor) if is_elsewhere else names)
        if name == RECEIPTS or parse_shard_name(name) is not None
    ]
    if others:
        raise InvalidSettingsError(
            f"{actor} already has {others[0]} of another save. Therefore the daemon would not "
            "publish the new save. Remove the files of the other save, or give each save its own "
            "step"
        )
    if is_elsewhere:
        files = sorted(filter(is_dcp_file, names)) if DCP_METADATA in names else parts
        _link_into(job, step, source, files)
        point(job, layout.checkpoint_pointer, step)
    else:
        # Left if an earlier save of this step was announced from another folder.
        storage.unlink_if_there(layout.step(step) / RETIRED)
    storage.sync_folder(actor)
    point(job, layout.state_pointer, step)


def _link_into(job: Job, step: int, source: Path, files: list[str]) -> None:
    """Hard-link files into the step's folder, which has no ``.metadata`` until it has all files."""
    make_step_folder(job, step)
    actor = job.layout.actor(step)
    job.storage.make_folder(actor, below=job.layout.root)
    make_mark(job.storage, job.layout.step(step) / RETIRED)
    job.storage.unlink_if_there(actor / DCP_METADATA)
    for name in job.storage.names(actor):
        if is_dcp_file(name) or parse_part_name(name) is not None:
            job.storage.unlink_if_there(actor / name)
    for name in sorted(files, key=lambda name: name == DCP_METADATA):
        try:
            job.storage.link(source / name, actor / name)
        except OSError as error:
            if error.errno not in {errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP}:
                raise
            raise InvalidSettingsError(
                f"{source / name} cannot be hard-linked into {actor} ({error.strerror}). Save "
                f"into {actor}, or into another folder of the same filesystem"
            ) from error
