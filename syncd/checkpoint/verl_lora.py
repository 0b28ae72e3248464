"""``adapter_config.json`` for a LoRA job of verl, which saves only rank, alpha and task. Pure.

The result is what verl's own merger writes, but with the whole names of the modules: their last
parts, for example ``0``, can also be those of modules that no LoRA can change.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

import pydantic

from syncd.checkpoint.adapter import PREFIX
from syncd.checkpoint.placement import Shape
from syncd.checkpoint.tensor_rules import shown
from syncd.protocol.errors import CheckpointError
from syncd.protocol.names import ADAPTER_CONFIG, HUGGINGFACE
from syncd.protocol.records import Fields

_PLAIN: Final = re.compile(
    re.escape(PREFIX) + r"(.+)\.lora_(embedding_)?([AB])(?(2)|\.weight)", re.DOTALL
)
_REMEDY: Final = f"Write the adapter's {ADAPTER_CONFIG} into {HUGGINGFACE}/ beside the shards"


class TrainedLora(Fields):
    """The keys of ``lora_train_meta.json``."""

    r: pydantic.PositiveInt
    lora_alpha: pydantic.PositiveInt
    task_type: str


def read_trained(content: bytes) -> TrainedLora | None:
    """The content of ``lora_train_meta.json``; None if verl has not written that file."""
    with suppress(pydantic.ValidationError):
        return TrainedLora.model_validate_json(content, strict=True)
    return None


def make_config(trained: TrainedLora | None, where: object, shapes: Mapping[str, Shape]) -> bytes:
    """The ``adapter_config.json`` of an adapter.

    ``trained`` is in the file ``where``. ``shapes`` has the adapter's tensors by their names in
    PEFT's files.

    Raises:
        CheckpointError: the file is not what verl writes, or does not describe these tensors.
    """
    if trained is None:
        raise CheckpointError(
            f"{where} is not what verl writes, a JSON object with r and lora_alpha, whole numbers "
            f"above 0, and the text task_type. {_REMEDY}"
        )
    modules = set()
    for name, shape in shapes.items():
        match = _PLAIN.fullmatch(name)
        if match is None:
            raise CheckpointError(
                f"the adapter has '{shown(name)}', but {where} can only describe plain LoRA, "
                f"without DoRA, biases and modules_to_save. {_REMEDY}"
            )
        if match[3] == "A" and shape[:1] != (trained.r,):
            raise CheckpointError(
                f"'{shown(name)}' has the shape {shape}, but {where} says rank {trained.r}, "
                f"perhaps because of rank_pattern or target_parameters. {_REMEDY}"
            )
        modules.add(match[1])
    config = {
        "peft_type": "LORA",
        **trained.model_dump(),
        "target_modules": sorted(modules),
        "bias": "none",
        "inference_mode": True,
        "use_rslora": False,
        "use_dora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    return json.dumps(config, indent=2).encode() + b"\n"
