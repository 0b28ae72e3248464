"""Which full checkpoints stay, and saying of the others that they may go.

Nothing is deleted here: the daemon does that, by its own rules (``docs/protocol.md``, "Pruning").
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from syncd.protocol.layout import JobLayout
from syncd.protocol.names import FULL, RETIRED, SAVING, parse_pointer
from syncd.storage.errnos import is_gone
from syncd.storage.fsio import Storage
from syncd.storage.steps import step_folders

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

    Raises:
        ValueError: a rule is negative.
    """
    if max_to_keep < 0 or keep_every < 0:
        raise ValueError(f"max_to_keep={max_to_keep}, keep_every={keep_every}: use 0 or more")
    older = sorted(step for step in steps if step < newest)
    among = older[max(0, len(older) - max_to_keep + 1) :] if max_to_keep else older
    multiples = [step for step in older if keep_every and step % keep_every == 0]
    later = [step for step in steps if step >= newest]
    return frozenset((newest, *later, *among, *multiples))


def retire_old(
    storage: Storage, layout: JobLayout, *, newest: int, max_to_keep: int, keep_every: int
) -> list[int]:
    """Rename ``.full_checkpoint`` to ``.retired`` in the steps that the rules do not keep.

    The list is read from disk, so that a trainer that starts anew forgets nothing. Called by rank 0
    once all ranks have written ``newest`` and the checkpoint pointer names it; where the pointer
    names another step nothing is retired. Each renaming is a commit of its own: cut off anywhere,
    what was not renamed is found by the next call.

    Not promised: that what is retired goes. The daemon, or ``syncd prune``, decides that.

    Args:
        storage: the shared storage.
        layout: the job.
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
    pointed = pointed_step(storage, layout)
    if pointed != newest:
        log.warning(
            "%s names step %s and not %d: no full checkpoint is retired",
            layout.checkpoint_pointer, pointed, newest,
        )  # fmt: skip
        return []
    steps = full_steps(storage, layout)
    kept = kept_steps(steps, newest=newest, max_to_keep=max_to_keep, keep_every=keep_every)
    retired = []
    for step in sorted(set(steps) - kept):
        folder = layout.step(step)
        try:
            # All ranks have written a newer one, each after this: the mark is of a trainer that was
            # killed between the last two things that a save does, and would keep it for ever.
            storage.unlink_if_there(folder / SAVING)
            storage.rename(folder / FULL, folder / RETIRED)
            storage.sync_folder(folder)
        except OSError as error:
            if not is_gone(error):
                raise
            continue  # someone deleted it
        log.info("the full checkpoint of step %d is retired", step)
        retired.append(step)
    return retired


def full_steps(storage: Storage, layout: JobLayout) -> list[int]:
    """The steps that have a ``.full_checkpoint`` on disk, lowest first."""
    return [
        step for step in step_folders(storage, layout) if storage.exists(layout.step(step) / FULL)
    ]


def pointed_step(storage: Storage, layout: JobLayout) -> int | None:
    """The step that ``latest_checkpointed_iteration.txt`` names; None where it names none."""
    try:
        step = parse_pointer(storage.read(layout.checkpoint_pointer))
    except OSError as error:
        if is_gone(error):
            return None
        raise
    return step if step is not None and step >= 0 else None
