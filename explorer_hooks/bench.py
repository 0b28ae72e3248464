"""Evaluate saved weights: the newest version, one step, or every full checkpoint in order.

These functions resemble the bench and serve modes of Trinity-RFT's explorer. A trainer and other
explorers can run at the same time, because only the explorer that asks for a step loads that step.
A daemon must run, because the daemon builds the steps that are not published.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from explorer_hooks.hook import ExplorerHook
from syncd.protocol.errors import CancelledError, WaitTimeoutError
from syncd.protocol.names import ACTOR, FULL, RETIRED, SAVING, is_resumable_state
from syncd.protocol.policy import Version
from syncd.storage.job import Job
from syncd.storage.step_folders import step_folders

__all__ = ["every_full_checkpoint", "full_checkpoints", "latest", "serve", "step"]


def latest(hook: ExplorerHook, timeout: float | None = None) -> Version:
    """Load the newest version; wait only if no version is published yet.

    Args:
        hook: the hook of the job.
        timeout: seconds to wait for the first version; None to wait without a limit.

    Raises:
        WaitTimeoutError: no version was published in time.
        Exception: for the other errors see :meth:`ExplorerHook.pull`.
    """
    try:
        return hook.pull(0)
    except WaitTimeoutError:
        return hook.version or hook.pull(timeout)


def step(hook: ExplorerHook, number: int, timeout: float | None = None) -> Version:
    """Load one step from disk into this explorer only.

    Args:
        hook: the hook of the job.
        number: the step.
        timeout: seconds until the step must be built; ``sync_timeout`` by default.

    Raises:
        Exception: for the errors see :meth:`ExplorerHook.load_step`.
    """
    return hook.load_step(number, timeout)


def full_checkpoints(job_dir: str | Path) -> list[int]:
    """List the steps of all full checkpoints that are fully saved, in ascending order.

    A step is a full checkpoint if its folder has ``.full_checkpoint``. Some trainers do not write
    ``.full_checkpoint``. A step of such a trainer is a full checkpoint if the step's folder has the
    state of an optimizer.
    """
    job = Job.at(Path(job_dir).absolute())
    return [step for step in step_folders(job) if _is_full(job, step)]


def every_full_checkpoint(
    hook: ExplorerHook, job_dir: str | Path, *, after: int = -1, timeout: float | None = None
) -> Iterator[Version]:
    """Load the full checkpoints one by one, in the order of their steps.

    Each load happens when you ask for the next item. The steps are listed once, at the beginning.
    At the end the engine still serves the last checkpoint. Use :func:`latest` to load the newest
    version again.

    Args:
        hook: the hook of the job.
        job_dir: the directory of the hook's job.
        after: load only steps above this number, for example to continue an earlier evaluation.
        timeout: seconds until a step must be built; ``sync_timeout`` by default.

    Raises:
        Exception: for the errors see :meth:`ExplorerHook.load_step`.
    """
    for number in full_checkpoints(job_dir):
        if number > after:
            yield hook.load_step(number, timeout)


def serve(
    hook: ExplorerHook, served: Callable[[Version], object], *, interval: float = 10.0
) -> None:
    """Follow the job, and report each served version, until the hook is cancelled or closed.

    Args:
        hook: the hook of the job.
        served: called with each version.
        interval: seconds between two checks that the hook's background thread is alive.

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
    if FULL in names:
        return True
    return ACTOR in names and any(
        map(is_resumable_state, job.storage.names(job.layout.actor(number)))
    )
