"""The dtype that the weights of a save are cast to (``SaveSettings.sync_dtype``)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Final

import torch

from syncd.checkpoint.tensor_rules import DTYPES, Cast, cast_dtype
from trainer_hooks.state.state_dict import tensors_of

_TORCH_DTYPES: Final = {
    told: getattr(torch, name) for name, (told, _) in DTYPES.items() if hasattr(torch, name)
}


@cache
def cast_to(dtype: torch.dtype, cast: Cast | None) -> torch.dtype:
    """The dtype after a cast. Not cast: integers, bool, fp8, and dtypes unknown to safetensors."""
    told, _ = DTYPES.get(str(dtype).removeprefix("torch."), ("", 0))
    wanted = cast_dtype(told, cast)
    return dtype if wanted == told else _TORCH_DTYPES[wanted]


def changes(state: Mapping[str, Any], cast: Cast | None) -> bool:
    """True if a cast changes any tensor."""
    return any(cast_to(one.dtype, cast) != one.dtype for one in tensors_of(state).values())
