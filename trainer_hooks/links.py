"""Saves, and which of them are links: rank 0's rule, and each rank's copy of its last save."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

from syncd.deltas.link_index import SavedPiece, WrittenLink
from syncd.protocol.records import SaveId
from trainer_hooks.explorers import Explorers
from trainer_hooks.state.host_buffers import HostBuffers
from trainer_hooks.writing.rank_files import LinkContents, RankContents

#: A link in which more of rank 0's elements changed is dense.
_DENSEST: Final = 0.30
#: After so many dense links in a row come full saves, until so many saves have passed.
_DENSE, _PASSED = 2, 12


@dataclass(eq=False)
class Save:
    """A save, and its outcome as this rank knows it. A broadcast is a save without files.

    The writing thread sets the outcome, the training thread reads it. It needs no lock, because
    each access is one operation of an attribute.

    Attributes:
        is_announced: on rank 0, True if explorers can get the weights.
        is_checkpoint: on rank 0, True if training can resume from the save.
        has_failed: True if this rank's part was not written.
        has_hugging_face: True if the full weights for users were, or will be, written.
        base: the save that this one is relative to; None for a full save.
        is_whole: True if all weights are written although there is a base.
    """

    id: SaveId
    is_announced: bool = False
    is_checkpoint: bool = False
    has_failed: bool = False
    has_hugging_face: bool = False
    base: SaveId | None = None
    is_whole: bool = False

    def __post_init__(self) -> None:
        self._root = self.id
        self._dense = 0

    def follow(self, last: Save, base: SaveId | None) -> None:
        """Make this the save after ``last``: a link if there is a base."""
        self.base = base
        self._dense = last._dense
        if base is not None:
            self._root = last._root
        elif self._dense >= _DENSE:
            self._dense = (self._dense + 1) % _PASSED

    def written(self, link: WrittenLink) -> None:
        """Count the dense links."""
        is_dense = link.changed > _DENSEST * link.elements
        self._dense = self._dense + 1 if is_dense else 0

    def as_link(
        self, contents: RankContents, pieces: Callable[[list[str]], Iterator[SavedPiece]]
    ) -> RankContents:
        """Make contents a link to the base."""
        link = LinkContents(str(self.base), pieces, self.is_whole, self.written)
        return contents._replace(link=link)

    def base_for(self, step: int, explorers: Explorers) -> SaveId | None:
        """On rank 0, the base of a save of ``step`` after this one, if it can be a link."""
        is_base = self.is_announced and not self.has_failed and 0 <= self.id.step < step
        if is_base and self._dense < _DENSE and explorers.takes_links(self._root):
            return self.id
        return None


class Copies:
    """The memory of the unfinished saves of one rank.

    Args:
        count: the most copies.
        changed: notified when a copy is free.

    Attributes:
        keeps: whether the copy of the last save is kept, because the next save can be a link to it.
    """

    def __init__(self, count: int, changed: threading.Condition) -> None:
        self.keeps = False
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

    def keep(self, save: Save, model: Mapping[str, Any], buffers: HostBuffers) -> None:
        """Remember the copy of the last save."""
        self._last = save.id, model, buffers

    def base_of(self, save: Save, at_end: ExitStack) -> Mapping[str, Any] | None:
        """Take the copy of a link's base until the end; None if this rank lacks it.

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
