"""Chooses the full checkpoint to resume from, by the files on storage.

A full save does the actions of the left column in this order
(:mod:`~trainer_hooks.writing.writer`). The right column says what a crash before the action leaves
in the step's folder::

    make .saving, remove .full_checkpoint     the previous full checkpoint of this step, if any
    write every rank's files and receipts     no .full_checkpoint: the save was cut off
    move the state pointer                    no .full_checkpoint: the save was cut off
    write every rank's full receipt           no .full_checkpoint: the save was cut off
    make .full_checkpoint                     no .full_checkpoint: the save was cut off
    move the checkpoint pointer               a whole checkpoint that the pointer does not name
    remove .saving                            a whole checkpoint that the pointer names

A step is **whole** if it has ``.full_checkpoint``, and all ranks' full receipts are of one save.
``.full_checkpoint`` alone is not enough: if a step is saved twice, a rank can make this file for
the first save after another rank has begun the second save. A save of another trainer (e.g. verl's)
has no receipts. It is whole if all shards exist, no ``.saving`` exists, and ``.full_checkpoint``
exists or the checkpoint pointer names the step.

The step that the checkpoint pointer names is chosen if it is whole, otherwise the newest whole
step. A whole step that lacks a file is damaged, because a crash does not remove files. Then loading
fails, and no other step is chosen silently.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from syncd.checkpoint.masters import foreign_masters, resumed_weights
from syncd.checkpoint.save import RANK_LIMIT, look_at_save
from syncd.protocol.errors import (
    JobUnavailableError,
    RecordError,
    SaveFailedError,
    SaveNotReadyError,
)
from syncd.protocol.names import (
    ACTOR,
    CRITIC,
    FULL,
    FULL_STATE_DICT,
    RECEIPTS,
    RETIRED,
    SAVING,
    full_receipt_name,
    optimizer_name,
)
from syncd.protocol.records import Receipt, ReceiptFile, parse
from syncd.storage.errnos import is_gone
from syncd.storage.fsio import Storage
from syncd.storage.job import Job, no_folder
from trainer_hooks.writing.retire import full_steps, pointed_step

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FullCheckpoint:
    """A whole full checkpoint.

    Attributes:
        save_id: None for a save of another trainer.
        identity: the daemon's name of the save.
        weights: the names, inside ``actor/``, of the files that hold the actor's weights.
        vouched: ``actor`` or ``critic`` → file name → the file's entry in its receipt. Empty if
            there are no receipts.
    """

    step: int
    world_size: int
    save_id: str | None
    identity: str
    weights: tuple[str, ...]
    vouched: dict[str, dict[str, ReceiptFile]] = field(default_factory=dict)

    def weights_in(self, folder: str) -> tuple[str, ...]:
        """The names of the weight files in ``actor`` or ``critic``."""
        if folder == ACTOR:
            return self.weights
        return _weights(self.vouched.get(folder, {}), self.world_size)

    @property
    def optimizers(self) -> tuple[str, ...]:
        """The names of all ranks' optimizer files; the same in actor and critic."""
        return tuple(optimizer_name(self.world_size, rank) for rank in range(self.world_size))


class FoundSteps(NamedTuple):
    """The checkpoint to resume from, and the reasons against other candidates."""

    checkpoint: FullCheckpoint | None
    reasons: tuple[str, ...]


def latest_checkpoint(job_dir: str | Path, *, storage: Storage | None = None) -> int | None:
    """Return the step to resume from, or None if there is no complete full checkpoint.

    If the step that ``latest_checkpointed_iteration.txt`` names is complete, it is chosen, even if
    a newer step is complete too. Otherwise the newest complete step is chosen. The log has the
    reasons against the checkpoints that were rejected. Nothing in ``job_dir`` is changed.

    Each rank that calls this function chooses for itself;
    :func:`~trainer_hooks.resuming.resume.load_checkpoint` chooses the same step for all ranks. Not
    promised: that all files of the step exist and are undamaged. Loading checks the files.

    Raises:
        JobUnavailableError: the job directory does not exist.
        OSError: the job directory cannot be read now.
    """
    found = find_checkpoint(Job.at(Path(job_dir).absolute(), storage))
    return None if found.checkpoint is None else found.checkpoint.step


def failed_checkpoint(error: SaveFailedError, job: Job) -> SaveFailedError:
    """The error of a failed full checkpoint, with what training can resume from, and what to do."""
    last = "the step that latest_checkpoint() returns"  # storage may fail now
    with suppress(OSError, JobUnavailableError):
        found = find_checkpoint(job).checkpoint
        last = "no step yet" if found is None else f"step {found.step}"
    return SaveFailedError(
        f"{error}. Training can resume from {last}. Mend this, then call save_checkpoint again"
    )


def find_checkpoint(job: Job) -> FoundSteps:
    """Find the checkpoint to resume from; raises the errors of :func:`latest_checkpoint`."""
    if not job.storage.exists(job.layout.root):
        raise no_folder(job.layout.root)
    pointed = pointed_step(job)
    others = (step for step in reversed(full_steps(job)) if step != pointed)
    reasons: list[str] = []
    for step in (*(() if pointed is None else (pointed,)), *others):
        checkpoint = look_at_checkpoint(job, step, is_pointed=step == pointed)
        if isinstance(checkpoint, FullCheckpoint):
            if reasons:
                log.warning(
                    "step %d is the one to resume from, because others cannot be used: %s",
                    step,
                    "; ".join(reasons),
                )
            return FoundSteps(checkpoint, tuple(reasons))
        reasons.append(checkpoint)
    if reasons:
        log.warning("there is no checkpoint to resume from: %s", "; ".join(reasons))
    return FoundSteps(None, tuple(reasons))


def look_at_checkpoint(job: Job, step: int, *, is_pointed: bool) -> FullCheckpoint | str:
    """A step's full checkpoint, or the reason why it is incomplete."""
    folder, actor = job.layout.step(step), job.layout.actor(step)
    names = job.storage.names(folder)
    if not names:
        return f"{folder} does not exist, or is empty"
    if RECEIPTS not in job.storage.names(actor):
        return _foreign(job, step, names, is_marked=is_pointed or FULL in names)
    if FULL not in names:
        what = (
            "the trainer has retired the full checkpoint"
            if RETIRED in names
            else "the save of the full checkpoint was cut off"
        )
        return f"{folder} has no {FULL}: no full checkpoint was saved there, or {what}"
    try:
        receipts = _full_receipts(job.storage, actor)
    except RecordError as error:
        return str(error)
    world_size, save_id = _identity(receipts[0])
    vouched = _by_folder(receipts)
    weights = _weights(vouched[ACTOR], world_size)
    return FullCheckpoint(step, world_size, save_id, save_id, weights, vouched)


def _weights(names: Mapping[str, ReceiptFile], world_size: int) -> tuple[str, ...]:
    """Return the shards in the model's own dtype, or else the full state dict."""
    shards = resumed_weights(names, world_size)
    if FULL_STATE_DICT in names and not names.keys() & set(shards):
        return (FULL_STATE_DICT,)
    return shards


def _foreign(job: Job, step: int, names: list[str], *, is_marked: bool) -> FullCheckpoint | str:
    """Read a checkpoint without receipts: another trainer's, or an incomplete copy."""
    if not is_marked or SAVING in names:
        return f"{job.layout.step(step)} is being written, or is not a full checkpoint"
    save = look_at_save(job.storage, job.layout.actor(step), step)
    if save.identity is None:
        return save.reason
    try:
        masters = foreign_masters(job.storage, job.layout.actor(step), save)
    except SaveNotReadyError as error:
        return str(error)
    # If one of these files is missing, the step is damaged, so loading it must fail.
    weights = masters or save.weights
    return FullCheckpoint(step, len(weights), None, save.identity, weights)


def _full_receipts(storage: Storage, folder: Path) -> list[Receipt]:
    """Return all ranks' receipts; raise a RecordError if they are of two saves."""
    receipts = [_full_receipt(storage, folder, 0)]
    if receipts[0].world_size > RANK_LIMIT:
        raise RecordError(f"{folder}: rank 0's receipt names more than {RANK_LIMIT} ranks")
    for rank in range(1, receipts[0].world_size):
        receipt = _full_receipt(storage, folder, rank)
        if _identity(receipt) != _identity(receipts[0]) or receipt.rank != rank:
            raise RecordError(
                f"{folder}: the receipts of ranks 0 and {rank} belong to two saves, "
                f"{receipts[0].save_id} and {receipt.save_id}. The later save was cut off"
            )
        receipts.append(receipt)
    return receipts


def _full_receipt(storage: Storage, folder: Path, rank: int) -> Receipt:
    path = folder / RECEIPTS / full_receipt_name(rank)
    try:
        return parse(Receipt, storage.read(path), path)
    except OSError as error:
        if is_gone(error):
            raise RecordError(
                f"{path} is missing: the full save of this step was cut off"
            ) from error
        raise


def _identity(receipt: Receipt) -> tuple[int, str]:
    return receipt.world_size, receipt.save_id


def _by_folder(receipts: list[Receipt]) -> dict[str, dict[str, ReceiptFile]]:
    # ``critic`` always has an entry: its folder may be left from an earlier save of this step.
    folders: dict[str, dict[str, ReceiptFile]] = {ACTOR: {}, CRITIC: {}}
    for file in (file for receipt in receipts for file in receipt.files):
        folder, _, name = file.name.partition("/")
        if folder == CRITIC:
            folders[CRITIC][name] = file
        else:
            folders[ACTOR][file.name] = file
    return folders
