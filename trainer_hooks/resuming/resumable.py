"""The choice of the full checkpoint to resume from, by the files on storage.

The order in which a full save is written (:mod:`~trainer_hooks.writing.writer`), and the checkpoint
that counts after a crash before each step::

    .saving made, .full_checkpoint removed the step that was there before every rank's files
    replaced, receipts no .full_checkpoint: cut off the state pointer moved no .full_checkpoint: cut
    off every rank's full receipts no .full_checkpoint: cut off .full_checkpoint made the step that
    the checkpoint pointer names the checkpoint pointer moved whole, though not pointed to .saving
    removed whole and pointed to

So a step is **whole** if it has ``.full_checkpoint`` and the full receipts of all ranks, of one
save. The receipts are needed too: if a step is saved twice, one rank may have begun the second
save when another makes the mark of the first. A save of another trainer (no receipts) is whole if
all shards are there, without ``.saving``, and a mark or the pointer says that it can be resumed
from.

The step that the checkpoint pointer names counts if it is whole. If it is not, because it was being
saved again or was deleted, the newest whole step counts. A file that is missing from a whole step
is damage, not a crash: then no other step is chosen silently.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from syncd.checkpoint.masters import foreign_masters, resumed_weights
from syncd.checkpoint.save import RANK_LIMIT, look_at_save
from syncd.protocol.errors import RecordError, SaveNotReadyError
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


@dataclass(frozen=True, slots=True)
class FullCheckpoint:
    """A whole full checkpoint.

    Attributes:
        step: the step of its folder.
        world_size: the number of ranks that wrote it.
        save_id: the id of the save; None for another trainer's.
        weights: the files that hold the actor's weights, by name inside ``actor/``.
        vouched: for each folder of the step, the receipts' data of each file, by its name inside
            that folder; without an entry if there are no receipts.
    """

    step: int
    world_size: int
    save_id: str | None
    weights: tuple[str, ...]
    vouched: dict[str, dict[str, ReceiptFile]] = field(default_factory=dict)

    def weights_in(self, folder: str) -> tuple[str, ...]:
        """The files that hold the weights in ``actor`` or ``critic``, by name inside it."""
        if folder == ACTOR:
            return self.weights
        return _weights(self.vouched.get(folder, {}), self.world_size)

    @property
    def optimizers(self) -> tuple[str, ...]:
        """The files of all ranks' optimizers, by name inside either folder."""
        return tuple(optimizer_name(self.world_size, rank) for rank in range(self.world_size))


class FoundSteps(NamedTuple):
    """The full checkpoints found in a job.

    Attributes:
        checkpoint: the one to resume from; None if there is none.
        reasons: the reasons why the candidates before it do not count.
    """

    checkpoint: FullCheckpoint | None
    reasons: tuple[str, ...]


def latest_checkpoint(job_dir: str | Path, *, storage: Storage | None = None) -> int | None:
    """The step to resume from: a complete full checkpoint, never one that a crash interrupted.

    It is the step that ``latest_checkpointed_iteration.txt`` names, even if a newer step is whole;
    if that step is not whole, it is the newest whole one.

    Each rank that calls it gets its own answer;
    :func:`~trainer_hooks.resuming.resume.load_checkpoint` agrees on one step for all ranks. Not
    promised: that its files are all there and undamaged; loading checks that.

    Args:
        job_dir: the job directory; nothing in it is changed.
        storage: the seam for tests.

    Returns:
        The step, or None if nothing can be resumed from. If something was saved nevertheless, the
        log has the reason.

    Raises:
        JobUnavailableError: the job directory is not there.
        OSError: it cannot be read now.
    """
    found = find_checkpoint(Job.at(Path(job_dir).absolute(), storage))
    return None if found.checkpoint is None else found.checkpoint.step


def find_checkpoint(job: Job) -> FoundSteps:
    """Look for the full checkpoint to resume from.

    Raises:
        JobUnavailableError: the job directory is not there: it must not count as empty.
        OSError: it cannot be read now.
    """
    if not job.storage.exists(job.layout.root):
        raise no_folder(job.layout.root)
    pointed = pointed_step(job)
    others = (step for step in reversed(full_steps(job)) if step != pointed)
    reasons: list[str] = []
    for step in (*(() if pointed is None else (pointed,)), *others):
        checkpoint = look_at_checkpoint(job, step, is_pointed=step == pointed)
        if isinstance(checkpoint, FullCheckpoint):
            if reasons:
                log.warning("resuming from step %d: %s", step, "; ".join(reasons))
            return FoundSteps(checkpoint, tuple(reasons))
        reasons.append(checkpoint)
    if reasons:
        log.warning("there is no checkpoint to resume from: %s", "; ".join(reasons))
    return FoundSteps(None, tuple(reasons))


def look_at_checkpoint(job: Job, step: int, *, is_pointed: bool) -> FullCheckpoint | str:
    """A step's full checkpoint if it is complete; else the reason why not.

    Args:
        job: the job.
        step: the step.
        is_pointed: whether the checkpoint pointer names it.
    """
    folder, actor = job.layout.step(step), job.layout.actor(step)
    names = job.storage.names(folder)
    if not names:
        return f"{folder} is not there, or empty"
    if RECEIPTS not in job.storage.names(actor):
        return _foreign(job, step, names, is_marked=is_pointed or FULL in names)
    if FULL not in names:
        what = "its trainer has retired it" if RETIRED in names else "its save was cut off"
        return f"{folder} has no {FULL}: it holds no full checkpoint, or {what}"
    try:
        receipts = _full_receipts(job.storage, actor)
    except RecordError as error:
        return str(error)
    world_size, save_id = _identity(receipts[0])
    vouched = _by_folder(receipts)
    weights = _weights(vouched[ACTOR], world_size)
    return FullCheckpoint(step, world_size, save_id, weights, vouched)


def _weights(names: Mapping[str, ReceiptFile], world_size: int) -> tuple[str, ...]:
    """The files of the weights: shards, unless the receipts name one full state dict alone.

    If a rank has cast its weights for explorers: the file of those in the model's dtype.
    """
    shards = resumed_weights(names, world_size)
    if FULL_STATE_DICT in names and not names.keys() & set(shards):
        return (FULL_STATE_DICT,)
    return shards


def _foreign(job: Job, step: int, names: list[str], *, is_marked: bool) -> FullCheckpoint | str:
    """A checkpoint of another trainer, which has no receipts, or one that was copied without."""
    if not is_marked or SAVING in names:
        return f"{job.layout.step(step)} is being written, or is not a full checkpoint"
    save = look_at_save(job.storage, job.layout.actor(step), step)
    if save.identity is None:
        return save.reason
    try:
        masters = foreign_masters(job.storage, job.layout.actor(step), save)
    except SaveNotReadyError as error:
        return str(error)
    # If one of them is missing, loading says so: that is damage, and no reason for another step.
    weights = masters or save.weights
    return FullCheckpoint(step, len(weights), None, weights)


def _full_receipts(storage: Storage, folder: Path) -> list[Receipt]:
    """The full receipts of all ranks.

    Raises:
        RecordError: one is missing or cannot be read, or they are of several saves.
    """
    receipts = [_full_receipt(storage, folder, 0)]
    if receipts[0].world_size > RANK_LIMIT:
        raise RecordError(f"{folder}: rank 0's receipt is of over {RANK_LIMIT} ranks")
    for rank in range(1, receipts[0].world_size):
        receipt = _full_receipt(storage, folder, rank)
        if _identity(receipt) != _identity(receipts[0]) or receipt.rank != rank:
            raise RecordError(
                f"{folder}: the receipts of ranks 0 and {rank} are of two saves, "
                f"{receipts[0].save_id} and {receipt.save_id}: the later one was cut off"
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
    """The data of receipts, whose names are those inside ``actor/``, except the critic's."""
    # Also without a critic: its folder may be left from an earlier save of this step.
    folders: dict[str, dict[str, ReceiptFile]] = {ACTOR: {}, CRITIC: {}}
    for file in (file for receipt in receipts for file in receipt.files):
        folder, _, name = file.name.partition("/")
        if folder == CRITIC:
            folders[CRITIC][name] = file
        else:
            folders[ACTOR][file.name] = file
    return folders
