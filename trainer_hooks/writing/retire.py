"""Choosing the full checkpoints that stay, and marking the others as ready to be pruned.

Nothing is deleted here: the daemon does that, by its own rules (``docs/protocol.md``, "Pruning").
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from syncd.protocol.names import FULL, RETIRED, SAVING, parse_pointer
from syncd.storage.errnos import is_gone
from syncd.storage.job import Job
from syncd.storage.step_folders import step_folders

log = logging.getLogger(__name__)


def kept_steps(
    steps: Collection[int], *, newest: int, max_to_keep: int, keep_every: int
) -> frozenset[int]:
    """Which of the full checkpoints stay. Pure.

    Those above ``newest`` stay too, and do not count: a trainer that resumed at a lower step has
    them before it, of a run that was given up, and will write them again when it comes there.

    Args:
        steps: of all full checkpoints.
        newest: the one that is pointed to; it stays, and counts, even where it is not in ``steps``.
        max_to_keep: how many of the newest stay, ``newest`` among them; 0 keeps all.
        keep_every: besides, all whose step is a multiple of this stay; 0 for no such rule.
    """
    older = sorted(step for step in steps if step < newest)
    among = older[max(0, len(older) - max_to_keep + 1) :] if max_to_keep else older
    multiples = [step for step in older if keep_every and step % keep_every == 0]
    later = [step for step in steps if step >= newest]
    return frozenset((newest, *later, *among, *multiples))


def retire_old(job: Job, *, newest: int, max_to_keep: int, keep_every: int) -> list[int]:
    """Rename ``.full_checkpoint`` to ``.retired`` in the steps that the rules do not keep.

    The list is read from disk, so that a trainer that starts anew forgets nothing. Called by rank 0
    once all ranks have written ``newest`` and the checkpoint pointer names it; where the pointer
    names another step nothing is retired. Each renaming is a commit of its own: cut off anywhere,
    what was not renamed is found by the next call.

    Not promised: that what is retired goes. The daemon, or ``syncd prune``, decides that.

    Args:
        job: the job.
        newest: the step that was just saved.
        max_to_keep: as in :func:`kept_steps`.
        keep_every: as there.

    Returns:
        The steps that were retired now, lowest first.

    Raises:
        OSError: the storage refused; what was retired until then stays retired.
    """
    if max_to_keep == 0:
        return []
    pointed = pointed_step(job)
    if pointed != newest:
        log.warning(
            "%s names step %s and not %d: no full checkpoint is retired",
            job.layout.checkpoint_pointer, pointed, newest,
        )  # fmt: skip
        return []
    steps = full_steps(job)
    kept = kept_steps(steps, newest=newest, max_to_keep=max_to_keep, keep_every=keep_every)
    retired = []
    for step in sorted(set(steps) - kept):
        folder = job.layout.step(step)
        try:
            # All ranks have written a newer one, each after this: the mark is of a trainer that was
            # killed between the last two things that a save does, and would keep it for ever.
            job.storage.unlink_if_there(folder / SAVING)
            job.storage.rename(folder / FULL, folder / RETIRED)
            job.storage.sync_folder(folder)
        except OSError as error:
            if not is_gone(error):
                raise
            continue  # someone deleted it
        log.info("the full checkpoint of step %d is retired", step)
        retired.append(step)
    return retired


def full_steps(job: Job) -> list[int]:
    """The steps that have a ``.full_checkpoint`` on disk, lowest first."""
    return [step for step in step_folders(job) if job.storage.exists(job.layout.step(step) / FULL)]


def pointed_step(job: Job) -> int | None:
    """The step that ``latest_checkpointed_iteration.txt`` names; None where it names none."""
    try:
        step = parse_pointer(job.storage.read(job.layout.checkpoint_pointer))
    except OSError as error:
        if is_gone(error):
            return None
        raise
    return step if step is not None and step >= 0 else None
