"""Retention of full checkpoints: chooses the ones to keep, and retires the others.

The daemon deletes retired checkpoints (``docs/protocol.md``, "Pruning").
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from syncd.protocol.names import FULL, RETIRED, SAVING, parse_pointer
from syncd.storage.errnos import GONE, Ignoring, is_gone
from syncd.storage.job import Job, step_folders

log = logging.getLogger(__name__)


def kept_steps(
    steps: Collection[int], *, newest: int, max_to_keep: int, keep_every: int
) -> frozenset[int]:
    """The steps of the full checkpoints to keep; reads no storage.

    ``newest`` is always kept, and counts toward ``max_to_keep`` (0 keeps all). Steps above
    ``newest`` are kept, and do not count: an abandoned run saved them, and this run will write them
    again.
    """
    older = sorted(step for step in steps if step < newest)
    among = older[max(0, len(older) - max_to_keep + 1) :] if max_to_keep else older
    multiples = [step for step in older if keep_every and step % keep_every == 0]
    later = [step for step in steps if step >= newest]
    return frozenset((newest, *later, *among, *multiples))


def retire_old(job: Job, *, newest: int, max_to_keep: int, keep_every: int) -> list[int]:
    """Rename ``.full_checkpoint`` to ``.retired`` in the steps that :func:`kept_steps` omits.

    Does nothing if the checkpoint pointer does not name ``newest``. After an error or a kill, the
    next call does the remaining renames.
    """
    if max_to_keep == 0:
        return []
    pointed = pointed_step(job)
    if pointed != newest:
        log.warning(
            "%s names step %s instead of step %d. Therefore older full checkpoints are not "
            "retired, and the daemon does not delete them",
            job.layout.checkpoint_pointer, pointed, newest,
        )  # fmt: skip
        return []
    steps = full_steps(job)
    kept = kept_steps(steps, newest=newest, max_to_keep=max_to_keep, keep_every=keep_every)
    retired = []
    for step in sorted(set(steps) - kept):
        folder = job.layout.step(step)
        try:
            # The step is not being saved, because a newer checkpoint is complete. A killed trainer
            # left ``.saving``, which would keep the step for ever.
            job.storage.unlink_if_there(folder / SAVING)
            job.storage.rename(folder / FULL, folder / RETIRED)
            job.storage.sync_folder(folder)
        except OSError as error:
            if not is_gone(error):
                raise
            continue  # someone deleted it
        log.info("retired the full checkpoint of step %d. The daemon deletes it later", step)
        retired.append(step)
    return retired


def full_steps(job: Job) -> list[int]:
    """The steps that have a ``.full_checkpoint``, lowest first."""
    return [step for step in step_folders(job) if job.storage.exists(job.layout.step(step) / FULL)]


def pointed_step(job: Job) -> int | None:
    """The step that ``latest_checkpointed_iteration.txt`` names, or None."""
    with Ignoring(GONE):
        step = parse_pointer(job.storage.read(job.layout.checkpoint_pointer))
        return step if step is not None and step >= 0 else None
    return None
