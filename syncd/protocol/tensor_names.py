"""The record of a name map, which maps a trainer's tensors to the tensors on the hub."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import FailFast, Field

from syncd.protocol.records import Fields, Record, Size, Text, encode


class HubPiece(Fields):
    """A part of a trainer's tensor: one or several hub tensors, or a part of a hub tensor.

    :class:`~syncd.checkpoint.name_map.NameMap` explains the fields, and the order in which they
    apply.
    """

    name: Annotated[str, Field(min_length=1, max_length=1000)]
    first: Size | None = None
    rows: tuple[Size, Size] | None = None
    transposed: bool = False
    at: Size | None = None


class MappedTensor(Fields):
    """A trainer's tensor: its shape, and its pieces on the hub."""

    shape: Annotated[tuple[Size, ...], FailFast()]
    pieces: Annotated[tuple[HubPiece, ...], FailFast(), Field(min_length=1)]


class NameMapRecord(Record):
    """``name_map.json`` beside ``config.json``: maps a trainer's tensors to the hub's tensors.

    Attributes:
        tensors: trainer's name → tensor. A tensor that is not listed is the same on the hub.
        refused: the reason why there is no mapping; ``tensors`` is then empty.
    """

    tensors: dict[str, MappedTensor] = Field(default_factory=dict)
    refused: Text | None = None


#: The size of a map that maps nothing.
EMPTY_MAP: Final = len(encode(NameMapRecord()))
