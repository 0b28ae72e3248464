"""verl's checkpoint engine ``syncd`` and its manager; docs/verl.md has the configuration.

Import this module only where verl is installed: it registers the engine there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import TYPE_CHECKING, Any

from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry
from verl.utils.ray_utils import auto_await

from syncd.protocol.errors import EngineBrokenError, SaveFailedError
from trainer_hooks.verl_engine import VERSION, SyncdCheckpointEngine

if TYPE_CHECKING:
    from verl.workers.rollout import RolloutReplica

__all__ = ["SyncdCheckpointEngine", "SyncdCheckpointManager"]

CheckpointEngineRegistry.register("syncd")(SyncdCheckpointEngine)


class SyncdCheckpointManager(CheckpointEngineManager):
    """Sends weights and copies them to the rollouts' hosts while the rollouts generate.

    Each replica pauses only while it loads, and does not wait for the others. If the send fails,
    all replicas serve what they have. A replica that cannot load stays paused, and the next update
    tries it again.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sent: tuple[int, int | None] | None = None

    @auto_await
    async def update_weights(self, global_steps: int | None = None) -> dict[str, Any]:
        """Send the actor's weights, and load them into all replicas; return the sender's metrics.

        Raises:
            SaveFailedError: the send failed, so no replica was paused.
            EngineBrokenError: a replica has not loaded the version.
        """
        sending = self.actor_wg.update_weights(global_steps=global_steps, mode=self.backend)
        metrics: dict[str, Any] = {}
        try:
            for told in await _all(sending):
                metrics |= told
        except Exception as error:
            raise SaveFailedError(
                f"step {global_steps} was not sent, so all replicas keep what they serve: "
                f"{_said(error)}"
            ) from error
        self._sent = int(metrics[VERSION]), global_steps
        await self._load(self.replicas)
        return metrics

    def add_replicas(self, replicas: list[RolloutReplica]) -> None:
        """Add replicas, and load the last version that was sent into them."""
        super().add_replicas(replicas)
        self._load(replicas)

    @auto_await
    async def _load(self, replicas: list[RolloutReplica]) -> None:
        if self._sent is None:
            return
        loading = [self._load_one(replica, *self._sent) for replica in replicas]
        told = await asyncio.gather(*loading, return_exceptions=True)
        failed = {
            replica.replica_rank: error
            for replica, error in zip(replicas, told, strict=True)
            if isinstance(error, BaseException)
        }
        if failed:
            why = "; ".join(f"replica {rank}: {_said(error)}" for rank, error in failed.items())
            raise EngineBrokenError(
                f"{len(failed)} of {len(replicas)} replicas have not loaded version "
                f"{self._sent[0]}. Remove them, or start them again: {why}"
            ) from next(iter(failed.values()))

    async def _load_one(self, replica: Any, sequence: int, global_steps: int | None) -> None:
        workers = replica.workers
        await _all(w.execute_checkpoint_engine.remote("stage", sequence) for w in workers)
        await replica.abort_all_requests()
        await replica.release_kv_cache()
        try:
            await _all(w.update_weights.remote(global_steps) for w in workers)
        finally:
            await replica.resume_kv_cache()
        await replica.resume_generation()
        await _all(w.execute_checkpoint_engine.remote("finalize") for w in workers)


async def _all(pending: Iterable[Awaitable[Any]]) -> list[Any]:
    """Wait for all, and then raise the first error."""
    told = await asyncio.gather(*pending, return_exceptions=True)
    for one in told:
        if isinstance(one, BaseException):
            raise one
    return told


def _said(error: BaseException) -> str:
    """An actor's error, without the traceback that Ray puts before it."""
    cause = getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: {cause}"
