"""Evaluating what is on disk: the newest version, one step, or every full checkpoint in order.

As the bench and serve modes of Trinity-RFT's explorer. No trainer works meanwhile; a daemon does:
it merges and publishes the steps that are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from explorer_hooks.hook import ExplorerHook
from syncd.protocol.errors import CancelledError, WaitTimeoutError
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import ACTOR, FULL, RETIRED, SAVING, is_resumable_state
from syncd.protocol.policy import Version
from syncd.storage.fsio import Storage
from syncd.storage.steps import step_folders


def latest(hook: ExplorerHook, timeout: float | None = None) -> Version:
    """Load the newest version, and wait for it only where there is none yet.

    Raises:
        WaitTimeoutError, or as :meth:`ExplorerHook.pull`.
    """
    try:
        return hook.pull(0)
    except WaitTimeoutError:
        return hook.version or hook.pull(timeout)


def step(hook: ExplorerHook, number: int, timeout: float | None = None) -> Version:
    """Load one step that is on disk.

    Raises:
        Exception: as :meth:`ExplorerHook.pull_step`.
    """
    return hook.pull_step(number, timeout)


def full_checkpoints(job_dir: str | Path) -> list[int]:
    """The steps that can be resumed from, in order; what is being saved is left out.

    Those with ``.full_checkpoint``, or, of trainers that make none, with an optimizer's state.
    """
    layout = JobLayout(Path(job_dir).absolute())
    storage = Storage(layout.root)
    return [step for step in step_folders(storage, layout) if _is_full(storage, layout, step)]


def every_full_checkpoint(
    hook: ExplorerHook, job_dir: str | Path, *, after: int = -1, timeout: float | None = None
) -> Iterator[Version]:
    """Load one full checkpoint after the other; each is served while it is the caller's turn.

    What is listed is what is there at the beginning. The pointer names the last one in the end.

    Args:
        hook: of the job.
        job_dir: the same job.
        after: only steps above it: to go on with what was evaluated before.
        timeout: seconds until a step must be published; ``sync_timeout`` by default.

    Raises:
        Exception: as :meth:`ExplorerHook.pull_step`.
    """
    for number in full_checkpoints(job_dir):
        if number > after:
            yield hook.pull_step(number, timeout)


def serve(
    hook: ExplorerHook, served: Callable[[Version], object], *, interval: float = 10.0
) -> None:
    """Follow the job, and say each version that is served; until the hook is cancelled or closed.

    Args:
        hook: of the job.
        served: told of each version.
        interval: seconds after which the death of what follows is noticed, at most.

    Raises:
        NotFollowingError: what followed has ended.
    """
    told: Version | None = None
    try:
        hook.start()
        while True:
            try:
                told = hook.wait_until_served(interval, newer_than=told)
            except WaitTimeoutError:
                continue
            served(told)
    except CancelledError:
        pass
    finally:
        hook.stop()


def _is_full(storage: Storage, layout: JobLayout, number: int) -> bool:
    names = storage.names(layout.step(number))
    if SAVING in names or RETIRED in names:
        return False
    if FULL in names:
        return True
    return ACTOR in names and any(map(is_resumable_state, storage.names(layout.actor(number))))
