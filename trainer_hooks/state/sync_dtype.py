"""The dtype that the weights of a save are cast to (``SaveSettings.sync_dtype``)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from syncd.checkpoint.tensor_rules import DTYPES, Cast, cast_dtype, refuse_cast
from syncd.coordination.tensors import DTYPES as TORCH_DTYPES
from trainer_hooks.state.state_dict import tensors_of

if TYPE_CHECKING:
    import torch


@cache
def cast_to(dtype: torch.dtype, cast: Cast | None) -> torch.dtype:
    """The dtype after a cast. Not cast: integers, bool, and dtypes unknown to safetensors."""
    told = _name_of(dtype)
    wanted = cast_dtype(told, cast)
    return dtype if wanted == told else TORCH_DTYPES[wanted]


def changes(state: Mapping[str, Any], cast: Cast | None) -> bool:
    """True if a cast changes any tensor."""
    return any(cast_to(one.dtype, cast) != one.dtype for one in tensors_of(state).values())


def refuse_quantized(state: Mapping[str, Any]) -> None:
    """Raise CheckpointError if the state has a quantized tensor, so that no cast is allowed."""
    for name, value in tensors_of(state).items():
        refuse_cast(name, _name_of(value.dtype))


def _name_of(dtype: torch.dtype) -> str:
    return DTYPES.get(str(dtype).removeprefix("torch."), ("", 0))[0]
