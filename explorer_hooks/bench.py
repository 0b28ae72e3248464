"""Evaluate saved weights: the newest version, one step, or every full checkpoint in order.

The hook builds the steps that are not published, in the job. A daemon, a trainer and other
explorers can run meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from explorer_hooks.hook import ExplorerHook
from syncd.protocol.errors import CancelledError, WaitTimeoutError
from syncd.protocol.names import ACTOR, FULL, RETIRED, SAVING, is_resumable_state
from syncd.protocol.policy import Version
from syncd.storage.job import Job, step_folders

__all__ = ["every_full_checkpoint", "full_checkpoints", "latest", "serve", "step"]


def latest(hook: ExplorerHook, timeout: float | None = None) -> Version:
    """Load the newest version into ``hook``; wait only if no version is published yet.

    ``timeout`` is in seconds; None waits without a limit.

    Raises:
        WaitTimeoutError: no version was published in time.
        Exception: for the other errors see :meth:`ExplorerHook.pull`.
    """
    return hook.pull(0) or hook.version or hook.pull(timeout)


def step(hook: ExplorerHook, number: int, timeout: float | None = None) -> Version:
    """Load the step ``number`` into the engine of ``hook`` only.

    ``timeout`` and the errors are those of :meth:`ExplorerHook.load_step`.
    """
    return hook.load_step(number, timeout)


def full_checkpoints(job_dir: str | Path) -> list[int]:
    """List the steps of all full checkpoints that are fully saved, in ascending order.

    Some trainers do not write ``.full_checkpoint``, so a folder with the state of an optimizer
    counts, too.
    """
    job = Job.at(Path(job_dir).absolute())
    return [step for step in step_folders(job) if _is_full(job, step)]


def every_full_checkpoint(
    hook: ExplorerHook, job_dir: str | Path, *, after: int = -1, timeout: float | None = None
) -> Iterator[Version]:
    """Load the full checkpoints of a job one by one, in the order of their steps.

    ``job_dir`` must be the job of ``hook``. The first ``next()`` lists the steps above ``after``.
    Each ``next()`` loads one step and yields its version. After the last step the engine still
    serves that step; call :func:`latest` to load the newest version again.

    ``timeout`` and the errors are those of :meth:`ExplorerHook.load_step`.
    """
    for number in full_checkpoints(job_dir):
        if number > after:
            yield hook.load_step(number, timeout)


def serve(
    hook: ExplorerHook, served: Callable[[Version], object], *, interval: float = 10.0
) -> None:
    """Follow the job of ``hook`` until the hook is cancelled or closed.

    ``served`` is called with the served version after a load. Versions that are served during the
    call can be missed. ``interval`` is the longest single wait for a version, in seconds.

    Raises:
        NotFollowingError: the background thread has died.
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


def _is_full(job: Job, number: int) -> bool:
    names = job.storage.names(job.layout.step(number))
    if SAVING in names or RETIRED in names:
        return False
    if FULL in names or ACTOR not in names:
        return FULL in names
    return any(map(is_resumable_state, job.storage.names(job.layout.actor(number))))
