"""The small files beside the weights: configs and tokenizer, if the model has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import nn

#: The attributes of wrappers (DDP, FSDP1, ``torch.compile``) that hold the wrapped model.
_INSIDE = ("module", "_orig_mod")


class Pretrained(Protocol):
    """A tokenizer, processor or config of transformers."""

    def save_pretrained(self, save_directory: str) -> object:
        """Write its files into a folder."""


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside wrappers that hide its attributes."""
    while getattr(model, "config", None) is None:
        inside = (getattr(model, name, None) for name in _INSIDE)
        inner = next((one for one in inside if isinstance(one, nn.Module)), None)
        if inner is None:
            break
        model = inner
    return model


def adapters_of(model: nn.Module) -> Mapping[str, Any]:
    """The configs of a PEFT model's adapters, by name; empty for any other model."""
    adapters = getattr(unwrapped(model), "peft_config", None)
    return adapters if isinstance(adapters, dict) else {}


def model_files(
    model: nn.Module, tokenizer: Pretrained | None
) -> tuple[Callable[[Path], object], ...]:
    """Functions that write the model's configs and the tokenizer into a folder."""
    inner = unwrapped(model)
    parts = [getattr(inner, name, None) for name in ("config", "generation_config")]
    return tuple(
        (lambda folder, part=part: part.save_pretrained(str(folder)))
        for part in (*parts, tokenizer)
        if hasattr(part, "save_pretrained")
    )
