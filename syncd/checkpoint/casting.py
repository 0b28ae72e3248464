"""The cast of a save: which of its tensors it changes, and which it keeps in fp32."""

from __future__ import annotations

import logging
from pathlib import Path

from syncd.checkpoint.model_folder import warn_once
from syncd.checkpoint.name_map import kept_by_type, unknown_types
from syncd.checkpoint.save import Delta, SavedWeights
from syncd.checkpoint.tensor_rules import Cast, Casting, general, shown
from syncd.protocol.version_events import CastTwice

log = logging.getLogger(__name__)


def casting_of(
    actor: Path, save: SavedWeights, cast: Cast | None, config: object = None
) -> Casting | None:
    """The cast of a save, by the content of its ``config.json``; None if there is none to make."""
    if cast is None:
        return None
    if cast == save.sync_dtype:
        if not isinstance(save, Delta):
            return None  # the trainer has asked the model what to keep
        kept = {name for receipt in save.receipts for name in receipt.fp32}
        return Casting(cast, lambda name: general(name) in kept)
    if save.sync_dtype is not None:
        CastTwice(actor).tell(log)
    if unknown := unknown_types(config):
        reason = (
            f"config.json names the model type {shown(', '.join(unknown))}, which syncd's tables "
            "do not have, so the cast (cast or --dtype) also rounds what this model may keep in "
            "fp32. Prefer SaveSettings.sync_dtype, which asks the model"
        )
        warn_once(actor, "cast", reason)
    return Casting(cast, kept_by_type(config, cast))
