"""Saves, and which of them are deltas: rank 0's rule, and each rank's copy of its last save."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from syncd.protocol.records import SaveId
from trainer_hooks.explorers import Explorers
from trainer_hooks.resuming.promise import Promise
from trainer_hooks.state.host_buffers import HostBuffers


@dataclass(eq=False)
class OwnSave:
    """A save, and its outcome as this rank knows it. A broadcast is a save without files.

    The writing thread sets the outcome, the training thread reads it. It needs no lock, because
    each access is one operation of an attribute.

    Attributes:
        is_announced: on rank 0, True if explorers can get the weights.
        is_checkpoint: on rank 0, True if training can resume from the save.
        has_failed: True if this rank's part was not written.
        has_hugging_face: True if the full weights for users were, or will be, written.
        base: the save that this one is relative to; None for a full save.
        promise: on rank 0, that training can resume from the save, to be checked.
    """

    id: SaveId
    is_announced: bool = False
    is_checkpoint: bool = False
    has_failed: bool = False
    has_hugging_face: bool = False
    base: SaveId | None = None
    promise: Promise | None = None

    def __post_init__(self) -> None:
        self._root = self.id  # the full save that deltas lead from

    def delta_of(self, base: OwnSave) -> None:
        """Make this a delta."""
        self.base, self._root = base.id, base._root

    def takes_delta(self, step: int, explorers: Explorers) -> bool:
        """On rank 0, True if a later save, of ``step``, can be a delta from this one."""
        is_base = self.is_announced and 0 <= self.id.step < step
        return is_base and bool(explorers.takes_deltas(self._root))


class SaveMemory:
    """The memory of the unfinished saves of one rank.

    Args:
        count: the most copies.
        changed: notified when a copy is free.

    Attributes:
        keeps: whether the copy of the last save is kept, for a delta from it.
        first_ranks: the first rank that has each plain tensor, for deltas.
    """

    def __init__(self, count: int, changed: threading.Condition) -> None:
        self.keeps = False
        self.first_ranks: dict[str, int] = {}
        self._changed = changed
        # The set used last comes first, so that the second set is filled only when both are needed;
        # but if it is kept, it comes last.
        self._free = deque(HostBuffers() for _ in range(count))
        self._last: tuple[SaveId, Mapping[str, Any], HostBuffers] | None = None

    def __len__(self) -> int:
        return len(self._free)

    def take(self, at_end: ExitStack) -> HostBuffers:
        """Take free buffers until the end."""
        buffers = self._free.popleft() if self.keeps else self._free.pop()
        at_end.callback(self._give_back, buffers)
        return buffers

    def keep(self, save: OwnSave, model: Mapping[str, Any], buffers: HostBuffers) -> None:
        """Remember the copy of the last save."""
        self._last = save.id, model, buffers

    def base_of(self, save: OwnSave, at_end: ExitStack) -> Mapping[str, Any] | None:
        """Take the copy of a delta's base until the end; None if this rank lacks it.

        No save may be unfinished.
        """
        if self._last is None or self._last[0] != save.base:
            return None
        _, model, buffers = self._last
        self._free.remove(buffers)
        at_end.callback(self._give_back, buffers)
        return model

    def _give_back(self, buffers: HostBuffers) -> None:
        with self._changed:
            self._free.append(buffers)
            self._changed.notify_all()


def let_go(error: BaseException | None) -> None:
    """Drop an error's stack frames: the next copy needs the memory that they hold."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
