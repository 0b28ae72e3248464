"""The names of a model that stand for the same tensor."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any, Final

from syncd.checkpoint.merging.plan import Ties, is_output_embedding
from syncd.checkpoint.model_folder import says_tied
from trainer_hooks.state.state_dict import joined, tensors_of, tied_by_fsdp1
from trainer_hooks.state.wrappers import unwrapped

if TYPE_CHECKING:
    from torch import Tensor, nn


#: What wrappers inside a model call the module that they wrap.
_WRAPPED: Final = {"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"}


def ties_of(model: nn.Module, state: Mapping[str, Any]) -> Ties:
    """The names that ``save_pretrained`` leaves out → the names of the same tensors.

    ``state`` has the model's own parameters (or FSDP1's copies), by the names of the plain model.
    A model of transformers declares its ties. For any other model, and for most models of
    transformers 4, the result is True if the config says ``tie_word_embeddings``.
    """
    outer = unwrapped(model)
    to_json = getattr(getattr(outer, "config", None), "to_json_string", None)
    is_tied = to_json is not None and says_tied(json.loads(to_json()))
    if not hasattr(outer, "_tied_weights_keys"):
        return is_tied
    tensors = tensors_of(state)
    ties = tied_by_fsdp1(model) if is_tied else {}
    first: dict[int, str] = {}
    for name, value in tensors.items() if is_tied else ():
        ties.setdefault(name, first.setdefault(id(value), name))
    # The model's own code may have tied them, too.
    ties = {name: other for name, other in ties.items() if is_output_embedding(name)}
    for path, module in outer.named_modules():
        declared = getattr(module, "_tied_weights_keys", None) or {}
        if not isinstance(declared, Mapping):
            return is_tied
        if getattr(getattr(module, "config", None), "tie_word_embeddings", False):
            for names in declared.items():
                plain = ".".join(part for part in path.split(".") if part not in _WRAPPED)
                left_out, kept = (_matching(plain, pattern, tensors) for pattern in names)
                ties |= zip(left_out, cycle(kept), strict=False)
    return {name: other for name, other in ties.items() if name != other}


def _matching(path: str, pattern: str, tensors: Mapping[str, Tensor]) -> Sequence[str]:
    """The names that transformers means: of a tensor, or of all that begin as the pattern says."""
    if (exact := joined(path, pattern)) in tensors:
        return [exact]
    begin = re.compile(joined(re.escape(path), pattern))
    return sorted(name for name in tensors if begin.match(name))
