"""Agreement of all ranks: an error on one rank is raised on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from syncd.protocol.errors import CheckpointError, SyncdError

T = TypeVar("T")


class Ranks:
    """The ranks of a process group; only this process if torch.distributed is not initialized."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._grouped = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if self._grouped else 0
        self.world_size = dist.get_world_size() if self._grouped else 1

    def gathered(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order. Collective; values are pickled."""
        if not self._grouped:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def together(self, work: Callable[[], T]) -> T:
        """Run rank-local work. If the work fails on any rank, every rank raises an error.

        Raises:
            Exception: this rank's error, or else the first error of another rank: of its class if
                it is a :class:`SyncdError`, otherwise as a :class:`CheckpointError`.
        """
        result: T | None = None
        failure: tuple[type[SyncdError], str] | None = None
        raised: Exception | None = None
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - any error, because the other ranks must not wait
            kind = type(error) if isinstance(error, SyncdError) else CheckpointError
            raised, failure = error, (kind, str(error) or type(error).__name__)
        failures = self.gathered(failure)
        if raised is not None:
            raise raised
        for rank, told in enumerate(failures):
            if told is not None:
                raise told[0](f"rank {rank}: {told[1]}")
        return result  # type: ignore[return-value]  # nothing was raised, so work returned it

    def of_first(self, work: Callable[[], T]) -> T:
        """Return rank 0's result of ``work`` on all ranks, or raise its error on all ranks."""
        mine = self.together(lambda: work() if self.rank == 0 else None)
        return self.gathered(mine)[0]  # type: ignore[return-value]  # rank 0 has worked
