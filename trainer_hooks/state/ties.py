"""The names of a model that stand for the same tensor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from syncd.checkpoint.merging.plan import Ties
from syncd.checkpoint.model_folder import says_tied
from syncd.checkpoint.tensor_rules import is_output_embedding
from trainer_hooks.state.plain_model import on_meta, plain_model
from trainer_hooks.state.state_dict import tensors_of, tied_by_fsdp1
from trainer_hooks.state.wrappers import unwrapped

if TYPE_CHECKING:
    from torch import nn


class KnownTies:
    """The ties of a model, which are asked for again only if its tensors or its config change."""

    def __init__(self) -> None:
        #: Pipeline stages have some of the tensors, so only the config can tell.
        self.is_staged = False
        self._key: object = None
        self._ties: Ties = False

    def of(self, model: nn.Module, state: Mapping[str, Any]) -> Ties:
        """See :func:`ties_of`."""
        config = getattr(unwrapped(model), "config", None)
        says = id(config), getattr(config, "tie_word_embeddings", None)
        key = says, tuple(state), len(set(map(id, state.values())))
        if key != self._key:
            with suppress(Exception):  # a config may have become anything: the ties stay
                self._key, self._ties = key, ties_of(model, state, is_staged=self.is_staged)
        return self._ties


def ties_of(model: nn.Module, state: Mapping[str, Any], *, is_staged: bool = False) -> Ties:
    """The names that ``save_pretrained`` leaves out → the names of the same tensors.

    ``state`` has the model's own parameters (or FSDP1's copies), by the names of the plain model.
    If transformers cannot tell the ties (before version 5, or of no model of its own), the result
    is True if the config says ``tie_word_embeddings``.
    """
    outer = unwrapped(model)
    to_json = getattr(getattr(outer, "config", None), "to_json_string", None)
    is_tied = to_json is not None and says_tied(json.loads(to_json()))
    if is_staged or not hasattr(outer, "get_expanded_tied_weights_keys"):
        return is_tied
    tensors = tensors_of(state)
    same = tied_by_fsdp1(model)  # name → the first name of the same tensor
    first: dict[int, str] = {}
    for name, value in tensors.items():
        same.setdefault(name, first.setdefault(id(value), name))
    # The model's own code may have tied heads, too.
    ties = {name: same[name] for name in tensors if is_tied and is_output_embedding(name)}
    try:
        plain: Any = plain_model(outer, on_meta(tensors))
        declared = plain.get_expanded_tied_weights_keys(all_submodels=True)
    except Exception:  # noqa: BLE001 - any model's code may run
        return is_tied
    ties |= {
        name: other
        for name, other in declared.items()
        # The merge refuses a head that differs, because engines believe the config.
        if name in tensors and (is_output_embedding(name) or same.get(other) == same[name])
    }
    return {name: other for name, other in ties.items() if name != other and other in tensors}
