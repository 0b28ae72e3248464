"""Find a version's tensors by the trainer's names or by the hub's names.

The trainer and the hub can name, split or join tensors differently. No data are copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import add, sub
from typing import TYPE_CHECKING, Final, NamedTuple

from explorer_hooks.engines.fitting import TensorSpec
from syncd.checkpoint.boxes import Box, whole
from syncd.checkpoint.name_map import HubPart, NameMap, TrainerPart
from syncd.checkpoint.placement import Shape
from syncd.checkpoint.tensor_rules import shown
from syncd.coordination.broadcast.weight_meta import Described
from syncd.protocol.errors import CoverageError
from syncd.protocol.records import Names
from syncd.protocol.tensor_names import NameMapRecord

if TYPE_CHECKING:
    from torch import Tensor

    from syncd.coordination.leased_version import LeasedVersion


class NamedPiece(NamedTuple):
    """A part of a version's tensor, and the same part under the tensor's other name.

    Attributes:
        own, own_box: the tensor's name in the version, and the part.
        other, other_box: the trainer's or the hub's name, and the part in that tensor. In a
            trainer's stack of tensors, ``other_box`` has one more dimension, of size 1.
        swaps: True if the last two dimensions are swapped.
    """

    own: str
    own_box: Box
    other: str
    other_box: Box
    swaps: bool

    def to_own(self, part: Box) -> Box:
        """Convert a part of ``other``, which must be inside this piece, to a part of ``own``."""
        own, other = self.own_box, self.other_box

        def turned(shape: Shape, size: int) -> Shape:
            shape = _swapped(shape) if self.swaps else shape
            return shape[-self._more :] if self._more < 0 else (size,) * self._more + shape

        ahead = turned(tuple(map(sub, part.offsets, other.offsets)), 0)
        return Box(tuple(map(add, ahead, own.offsets)), turned(part.shape, 1))

    def seen_from_own(self, part: Tensor) -> Tensor:
        """View a part of ``other`` with the order and number of dimensions of ``own``."""
        turned = part.transpose(-1, -2) if self.swaps else part
        return turned[(0,) * -self._more] if self._more < 0 else turned[(None,) * self._more]

    @property
    def _more(self) -> int:
        return len(self.own_box.shape) - len(self.other_box.shape)


@dataclass(frozen=True)
class GivenNames:
    """The names of a version's tensors in the trainer's module and on the hub.

    Attributes:
        name_map: the names. Its ``refused`` is the reason why the hub's names are unknown, if any.
        given: the names in the version: ``trainer`` or ``hub``.
    """

    name_map: NameMap
    given: Names

    def pieces_of(self, tensor: Described) -> list[NamedPiece]:
        """The pieces of a version's tensor; empty if the map has no other name for it."""
        name, shape = tensor.name, tensor.shape
        if self.given == "trainer":
            return [
                NamedPiece(
                    name, _in_trainer(shape, part), part.name, _in_hub(part), part.transposed
                )
                for part in self._hub(name, shape)
            ]
        pieces = [
            _place(name, place, own)
            for place in self.name_map.trainer(name)
            if (own := place.shape) is not None
        ]
        fits = pieces and around(piece.own_box.ends for piece in pieces) == shape
        return pieces if fits else []

    def by_hub(self, tensors: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
        """Rename tensors to the hub's names."""
        renamed: dict[str, TensorSpec] = {}
        for name, spec in tensors.items():
            parts = self._hub(name, spec.shape)
            for part in parts:
                shape = _in_hub(part).ends
                if part.at is not None and part.name in renamed:  # the parts may come in any order
                    shape = around((shape, renamed[part.name].shape))
                renamed[part.name] = TensorSpec(spec.dtype, shape)
            if not parts:
                renamed[name] = spec
        return renamed

    def shown(self, name: str) -> str:
        """Format a name for messages, with the tensor's other name."""
        if (shape := self.name_map.tensors().get(name)) is not None:
            first, *others = dict.fromkeys(part.name for part in self.name_map.hub(name, shape))
            return f"{shown(name)} (on the hub {shown(first)}{', …' if others else ''})"
        (first_place, *_) = self.name_map.trainer(name)
        if first_place.shape is not None:
            return f"{shown(name)} (in the trainer's module {shown(first_place.name)})"
        return shown(name)

    def _hub(self, name: str, shape: Shape) -> list[HubPart]:
        if name not in self.name_map:
            return []
        try:
            return self.name_map.hub(name, shape)
        except CoverageError:
            return []  # the map seems to be another model's


SAME_NAMES: Final = GivenNames(NameMap(NameMapRecord()), "trainer")


def names_of(version: LeasedVersion) -> GivenNames:
    """Read the names of a version's tensors; VerificationError if the name map is damaged."""
    return GivenNames(version.name_map(), version.manifest.names)


def _place(hub: str, place: TrainerPart, own: Shape) -> NamedPiece:
    box = _in_trainer(own, place)
    shape = box.shape if place.index is None else box.shape[1:]
    part = HubPart(hub, _swapped(shape) if place.transposed else shape, at=place.at)
    return NamedPiece(hub, _in_hub(part), place.name, box, place.transposed)


def _in_trainer(shape: Shape, part: HubPart | TrainerPart) -> Box:
    offsets, sizes = [0] * len(shape), list(shape)
    if part.index is not None:
        offsets[0], sizes[0] = part.index, 1
    if part.rows is not None:
        dim = int(part.index is not None)
        offsets[dim], sizes[dim] = part.rows[0], part.rows[1] - part.rows[0]
    return Box(tuple(offsets), tuple(sizes))


def _in_hub(part: HubPart) -> Box:
    box = whole(part.shape)
    return box if part.at is None else Box((part.at, *box.offsets[1:]), part.shape)


def around(ends: Iterable[Shape]) -> Shape:
    """The least shape that holds parts with these ends."""
    return tuple(map(max, zip(*ends, strict=False)))


def _swapped(shape: Shape) -> Shape:
    return (*shape[:-2], shape[-1], shape[-2])
