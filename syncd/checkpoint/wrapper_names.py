"""The names that torch's wrappers add to the names of tensors in a saved state dict. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from syncd.checkpoint.merging.plan import ShardIndex
from syncd.protocol.errors import CoverageError

#: What ``torch.compile``, FSDP1 and activation checkpointing call the module inside.
_INSIDE: Final = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
#: DDP's name for it. Other modules have children of this name, too.
_DDP: Final = "module."


def without_wrappers(indexes: Sequence[ShardIndex], *, ddp: bool) -> Sequence[ShardIndex]:
    """The same tensors by the names of the plain model.

    If ``ddp``, ``module.`` is cut off, too, if all names begin with it.

    Raises:
        CoverageError: a file would have two tensors of one name.
    """
    names = {name: _plain(name) for index in indexes for name in index.tensors}
    while ddp and names and all(plain.startswith(_DDP) for plain in names.values()):
        names = {name: plain.removeprefix(_DDP) for name, plain in names.items()}
    if all(name == plain for name, plain in names.items()):
        return indexes
    renamed = []
    for label, tensors in indexes:
        plain = {names[name]: value for name, value in tensors.items()}
        if len(plain) < len(tensors):
            raise CoverageError(
                f"{label}: without the names of wrappers two tensors would have the same name. "
                "Save the state dict of the module inside"
            )
        renamed.append(ShardIndex(label, plain))
    return renamed


def _plain(name: str) -> str:
    *path, own = name.split(".")
    return ".".join([*(part for part in path if part not in _INSIDE), own])
