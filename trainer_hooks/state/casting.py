"""The cast of a model for explorers, which keeps in fp32 what transformers keeps there."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import nn

from syncd.checkpoint.tensor_rules import Cast, Casting
from trainer_hooks.state.plain_model import own_class
from trainer_hooks.state.state_dict import cast_to, joined, plain_paths
from trainer_hooks.state.wrappers import adapters_of, is_pretrained


def casting_of(model: nn.Module, dtype: Cast | None) -> Casting | None:
    """The cast to ``dtype``, with the dtypes that ``from_pretrained(dtype=…)`` would give.

    It makes each model of transformers in ``model`` once more, on the meta device.
    """
    if dtype is None:
        return None
    # Merged weights have the names of the base model.
    paths = {} if adapters_of(model) else plain_paths(model)
    wanted = cast_to("", torch.float32, Casting(dtype))
    inner: set[nn.Module] = set()
    kept = []
    for module in model.modules():
        if module not in inner and is_pretrained(module):
            inner.update(module.modules())
            listed = re.compile("|".join(_listed(module, wanted)) or "(?!)")
            path = joined(paths.get(module, ""), "")
            kept.append((path, listed, _made_in_fp32(module, wanted)))

    @cache
    def keeps(name: str) -> bool:
        return any(
            (own := name.removeprefix(path)) in made or listed.search(own) is not None
            for path, listed, made in kept
            if name.startswith(path)
        )

    return Casting(dtype, keeps)


def _listed(model: Any, dtype: torch.dtype) -> list[str]:
    """Regular expressions for the names of modules and tensors that the model lists."""
    if hasattr(model, "_get_dtype_plan"):
        return [name.replace("*", ".*") for name in model._get_dtype_plan(dtype)]  # noqa: SLF001 - there is no other way to know it
    # Before version 5, transformers compared whole parts of a name.
    lists = ["_keep_in_fp32_modules_strict"]
    lists += ["_keep_in_fp32_modules"] if dtype == torch.float16 else []
    names = (name for key in lists for name in getattr(model, key, None) or ())
    return [rf"(?:^|\.){name}(?:$|\.)" for name in names]


def _made_in_fp32(model: Any, dtype: torch.dtype) -> Collection[str]:
    """The tensors that the model's class makes in fp32 even if the default dtype is ``dtype``."""
    if not hasattr(model, "_get_dtype_plan"):
        return ()  # earlier releases would make the parts of a model in their configs' dtypes
    kind: Any = own_class(model)
    state: dict[str, Any] = {}
    with suppress(Exception), torch.random.fork_rng(devices=[]), torch.device("meta"):
        # Any model's code may run, and fail; then its lists alone are known.
        config = copy.deepcopy(model.config)
        config._attn_implementation = "eager"  # noqa: SLF001 - others may need a package, or a kernel
        state = kind._from_config(config, dtype=dtype).state_dict()  # noqa: SLF001 - likewise
    return {name for name, value in state.items() if value.dtype == torch.float32}
