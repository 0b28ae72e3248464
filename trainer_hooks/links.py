"""Saves, and which of them are links: rank 0's rule, and each rank's copy of its last save."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from syncd.deltas.link_index import WrittenLink
from syncd.protocol.records import SaveId
from trainer_hooks.explorers import Explorers
from trainer_hooks.state.host_buffers import HostBuffers

#: A link in which more of rank 0's elements changed is dense.
_DENSEST: Final = 0.30
#: After so many dense links in a row come full saves, until so many saves have passed.
_DENSE, _PASSED = 2, 12


class Kept(NamedTuple):
    """This rank's copy of its last save, and its memory."""

    id: SaveId
    model: Mapping[str, Any]
    buffers: HostBuffers


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
        is_whole: True if all weights are written, even if there is a base.
    """

    id: SaveId
    is_announced: bool = False
    is_checkpoint: bool = False
    has_failed: bool = False
    has_hugging_face: bool = False
    base: SaveId | None = None
    is_whole: bool = True

    def __post_init__(self) -> None:
        self._root = self.id
        self._dense = 0

    def follow(self, last: Save, base: SaveId | None, *, is_whole: bool) -> None:
        """Make this the save after ``last``: a link if there is a base."""
        self.base, self.is_whole = base, is_whole or base is None
        self._dense = last._dense
        if base is not None:
            self._root = last._root
        elif self._dense >= _DENSE:
            self._dense = (self._dense + 1) % _PASSED

    def written(self, link: WrittenLink) -> None:
        """Count the dense links."""
        is_dense = link.changed > _DENSEST * link.elements
        self._dense = self._dense + 1 if is_dense else 0

    def base_for(self, step: int, explorers: Explorers) -> SaveId | None:
        """On rank 0, the base of a save of ``step`` after this one, if it can be a link."""
        is_base = self.is_announced and not self.has_failed and 0 <= self.id.step < step
        if is_base and self._dense < _DENSE and explorers.takes_links(self._root):
            return self.id
        return None
