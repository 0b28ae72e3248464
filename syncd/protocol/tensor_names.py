"""The record of a name map: a model's tensors by the names of the hub."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, FailFast, Field

from syncd.protocol.records import Record, Size, Text


class HubPiece(BaseModel):
    """A part of a trainer's tensor, which is one or several hub tensors, or a part of a hub tensor.

    :class:`~syncd.checkpoint.name_map.NameMap` explains how the fields work together.

    Attributes:
        name: the tensor's name on the hub. If ``first`` is given, the name has one ``{}`` for a
            number.
        first: None if dimension 0 is not split. If dimension 0 is split, each index along dimension
            0 gives one hub tensor, which lacks dimension 0. ``first`` is the number in the name of
            the hub tensor for index 0.
        rows: begin and end along the first dimension that remains after the split; None for all
            rows.
        transposed: True if the last two remaining dimensions are swapped, after ``rows`` was
            applied.
        at: the row of the hub's tensor at which the part begins (an index along dimension 0). The
            hub's tensor consists of all parts with its name, one after the other. None if the part
            is the whole tensor of the hub.
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
    """``name_map.json`` beside ``config.json``: a model's tensors by the names of the hub.

    Attributes:
        tensors: the trainer's tensors whose name or shape differs on the hub: the name of each
            tensor → its pieces. A tensor that is not listed has the same name and shape on the hub.
        refused: the reason why there is no mapping, for people; in that case ``tensors`` is empty.
    """

    tensors: dict[str, MappedTensor] = Field(default_factory=dict)
    refused: Text | None = None
