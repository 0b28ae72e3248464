"""The record of a name map, which maps a trainer's tensors to the tensors on the hub."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, FailFast, Field

from syncd.protocol.records import Record, Size, Text


class HubPiece(BaseModel):
    """A part of a trainer's tensor: one or several hub tensors, or a part of a hub tensor.

    :class:`~syncd.checkpoint.name_map.NameMap` explains how the fields work together.

    Attributes:
        name: the tensor's name on the hub. If ``first`` is given, it has one ``{}`` for a number.
        first: None if dimension 0 is not split. Otherwise each index along dimension 0 gives one
            hub tensor, which lacks dimension 0; ``first`` is the number in the name for index 0.
        rows: begin and end along the first remaining dimension; None for all rows.
        transposed: True if the last two remaining dimensions are swapped, after ``rows``.
        at: the row of the hub's tensor at which the part begins; None if the part is the whole. The
            hub's tensor consists of all parts with its name, one after the other.
    """

    model_config = ConfigDict(frozen=True)

    name: Annotated[str, Field(min_length=1, max_length=1000)]
    first: Size | None = None
    rows: tuple[Size, Size] | None = None
    transposed: bool = False
    at: Size | None = None


class MappedTensor(BaseModel):
    """A trainer's tensor: its shape, and its pieces on the hub."""

    model_config = ConfigDict(frozen=True)

    shape: Annotated[tuple[Size, ...], FailFast()]
    pieces: Annotated[tuple[HubPiece, ...], FailFast(), Field(min_length=1)]


class NameMapRecord(Record):
    """``name_map.json`` beside ``config.json``: maps a trainer's tensors to the hub's tensors.

    Attributes:
        tensors: trainer's name → tensor. A tensor that is not listed is the same on the hub.
        refused: the reason why there is no mapping, for people; in that case ``tensors`` is empty.
    """

    tensors: dict[str, MappedTensor] = Field(default_factory=dict)
    refused: Text | None = None
