"""verl's checkpoint engine ``syncd`` and its manager; docs/verl.md has the configuration.

Import this module only where verl is installed: it registers the engine there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry
from verl.utils.ray_utils import auto_await
from verl.workers.rollout.replica import RolloutMode

from syncd.protocol.errors import (
    EngineBrokenError,
    InvalidSettingsError,
    SaveFailedError,
    WaitTimeoutError,
)
from trainer_hooks.verl_engine import TIMEOUT, VERSION, SyncdCheckpointEngine

if TYPE_CHECKING:
    from verl.workers.rollout import RolloutReplica

__all__ = ["SyncdCheckpointEngine", "SyncdCheckpointManager"]

T = TypeVar("T")

CheckpointEngineRegistry.register("syncd")(SyncdCheckpointEngine)


class SyncdCheckpointManager(CheckpointEngineManager):
    """Sends weights, and copies them to the rollouts' hosts, before it pauses any rollout.

    Each replica pauses only while it loads, and does not wait for the others. If the send fails,
    all replicas serve what they have. A replica that fails in its load stays paused, and the next
    update tries it again.

    Raises:
        InvalidSettingsError: the backend is another one, or a replica shares the actor's processes.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.backend != "syncd":
            raise InvalidSettingsError(
                f"this manager needs checkpoint_engine.backend=syncd, not {self.backend}"
            )
        if any(one.rollout_mode is RolloutMode.HYBRID for one in self.replicas):
            raise InvalidSettingsError(
                "the rollouts share the actor's processes, so there is nothing to send. Use the "
                "backend naive, or rollouts of their own (standalone)"
            )
        given = self.config.engine_kwargs.get("syncd", {})
        # A worker may wait for the version, and then for its copy.
        self._patience: float = 2 * given.get("timeout", TIMEOUT)
        self._sent: tuple[int, int | None] | None = None

    @auto_await
    async def update_weights(self, global_steps: int | None = None) -> dict[str, float]:
        """Send the actor's weights, and load them into all replicas.

        Returns the bytes of all ranks, the longest stall in seconds, and the version's sequence.

        Raises:
            SaveFailedError: the send failed, so no replica was paused.
            EngineBrokenError: a replica has not loaded the version.
        """
        sending = self.actor_wg.update_weights(global_steps=global_steps, mode=self.backend)
        try:
            told = await _all("sending", sending, None)  # the senders have limits of their own
            sequence = int(told[0][VERSION])
        except Exception as error:
            raise SaveFailedError(
                f"step {global_steps} was not sent, so all replicas keep what they serve: "
                f"{_said(error)}"
            ) from error
        self._sent = sequence, global_steps
        await self._load(self.replicas)
        return {
            VERSION: float(sequence),
            "sync/bytes": sum(one["sync/bytes"] for one in told),
            "time/stall": max(one["time/stall"] for one in told),
        }

    def add_replicas(self, replicas: list[RolloutReplica]) -> None:
        """Add replicas, and load the last version that was sent into them."""
        super().add_replicas(replicas)
        self._load(replicas)

    @auto_await
    async def _load(self, replicas: list[RolloutReplica]) -> None:
        if self._sent is None:
            return
        sequence, global_steps = self._sent
        loading = {one.replica_rank: self._load_one(one, *self._sent) for one in replicas}
        told = await asyncio.gather(*loading.values(), return_exceptions=True)
        failed = {
            rank: error
            for rank, error in zip(loading, told, strict=True)
            if isinstance(error, BaseException)
        }
        if failed:
            why = "; ".join(f"replica {rank}: {_said(error)}" for rank, error in failed.items())
            raise EngineBrokenError(
                f"{len(failed)} of {len(loading)} replicas have not loaded v{sequence} "
                f"(step {global_steps}). Remove them, or start them again: {why}"
            ) from next(iter(failed.values()))

    async def _load_one(self, replica: Any, sequence: int, global_steps: int | None) -> None:
        workers, patience = replica.workers, self._patience

        async def stage(sequence: int) -> list[tuple[int, int]]:
            staging = [one.execute_checkpoint_engine.remote("stage", sequence) for one in workers]
            return await _all("copying the version", staging, patience)

        staged = await stage(sequence)
        while len(set(staged)) > 1:  # a newer version came meanwhile
            staged = await stage(max(staged)[0])
        step = None if global_steps is None else staged[0][1]
        await _all("pausing", [replica.abort_all_requests()], patience)
        await _all("pausing", [replica.release_kv_cache()], patience)
        await _all("loading", [one.update_weights.remote(step) for one in workers], patience)
        await _all("resuming", [replica.resume_kv_cache()], patience)
        await _all("resuming", [replica.resume_generation()], patience)
        ending = [one.execute_checkpoint_engine.remote("finalize") for one in workers]
        await _all("releasing the old version", ending, patience)


async def _all(what: str, work: Iterable[Awaitable[T]], seconds: float | None) -> list[T]:
    """The results of all, or the first error: a worker can wait for one that has failed."""
    tasks = [asyncio.ensure_future(one) for one in work]
    done, late = await asyncio.wait(tasks, timeout=seconds)
    for error in [task.exception() for task in tasks if task in done]:
        if error is not None:
            raise error
    if late:
        raise WaitTimeoutError(f"{what} took longer than {seconds:g} s")
    return [task.result() for task in tasks]


def _said(error: BaseException) -> str:
    """An actor's error, without the traceback that Ray puts before it."""
    cause = getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: {cause}"
