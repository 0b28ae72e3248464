"""Which of the names in a ``torch.distributed.checkpoint`` are the model's. Pure.

DCP flattens what it is given to save: ``{"model": model.state_dict(), "optim": …}`` becomes tensors
``model.layers.0.weight`` and so on, and its metadata keeps the *path* of each: ``("model",
"layers.0.weight")``. The last part is the key in the dict that held the tensor, and all before it
that dict's own place, here called its *parent*: a model's tensors, which come out of one flat
``state_dict()``, have one in common.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from syncd.checkpoint.tensor_rules import shown
from syncd.protocol.errors import CheckpointError

#: The keys that lead to a value in what was given to save.
Keys = tuple[str, ...]

#: The place of a dict that is no model's.
_NO_MODEL: Final = re.compile(
    r"(optim|lr_?sched|sched|data_?loader|train_?state|trainer|rng|random|grad_?scaler|scaler).*"
    r"|opt|step|meta|metadata|(.*_)?extra_?state",
    re.IGNORECASE | re.DOTALL,
)
#: What is no weight, and left out: that of TransformerEngine, say.
EXTRA_STATE: Final = "_extra_state"
_TOLD: Final = 5


class Entry(NamedTuple):
    """What is saved by a name.

    Attributes:
        path: where it was in what was given to save.
        dimensions: of a tensor; None of anything else.
    """

    path: Keys
    dimensions: int | None


class Selected(NamedTuple):
    """The model's names.

    Attributes:
        names: of tensors: in the checkpoint → in the model, in the order of the checkpoint.
        others: what is no tensor in the model's dict, by its name in the checkpoint.
        is_all: whether nothing besides the model is there.
    """

    names: Mapping[str, str]
    others: tuple[str, ...]
    is_all: bool


def select_model(entries: Mapping[str, Entry], prefix: str | None, where: str) -> Selected:
    """Tell the model's tensors from all others.

    With a prefix, they are those whose names begin with it, without it; with an empty one, those at
    the top level. Without, they are the tensors of the one parent that can be a model's: an
    optimizer, a scheduler, a data loader and the like are told by what their place is called, and
    what is at the top level beside a dict of tensors must have dimensions. Of several, it is the
    one called ``model``.

    Args:
        entries: by name, in the order of the checkpoint.
        prefix: as the user gave it; None to find out.
        where: the file, for the message.

    Raises:
        CheckpointError: there is no such tensor, or several dicts may be the model's.
    """
    if prefix:
        chosen = [name for name in entries if name.startswith(prefix) and name != prefix]
        found = {name: name.removeprefix(prefix) for name in chosen}
    else:
        parent = () if prefix == "" else _parent(entries, where)
        found = {name: own for name in entries if (own := _own_name(entries[name], parent))}
    weights = {
        name: own for name, own in found.items() if _is_tensor(entries[name]) and not _is_extra(own)
    }
    if not weights:
        what = "at its top level" if not prefix else f"whose name begins with {shown(prefix)!r}"
        raise CheckpointError(
            f"{where} has no tensor {what}: give another --prefix (dcp_prefix); {_told(entries)}"
        )
    others = [name for name, own in found.items() if name not in weights and not _is_extra(own)]
    return Selected(weights, tuple(others), is_all=len(found) == len(entries))


def _own_name(entry: Entry, parent: Keys) -> str:
    """The name of something in the model's dict; nothing where it is in another one."""
    within = entry.path[len(parent) :]
    own = ".".join(within)
    if entry.path[: len(parent)] != parent or not within:
        return ""
    if len(within) > 1 and not within[0].endswith(EXTRA_STATE):
        return ""  # in another dict, which may be inside
    # At the top level there may be a step count and the like, which is none of the model's.
    return own if parent or _is_tensor(entry) or _is_extra(own) else ""


def _is_extra(name: str) -> bool:
    """Whether it is what a module keeps besides tensors, or something in that."""
    return f"{EXTRA_STATE}." in f"{name}."


def _is_tensor(entry: Entry) -> bool:
    return entry.dimensions is not None


def _parents(entries: Mapping[str, Entry]) -> dict[Keys, bool]:
    """The parents of tensors, and whether any of these has dimensions."""
    found: dict[Keys, bool] = {}
    for entry in entries.values():
        if entry.dimensions is not None:
            parent = entry.path[:-1]
            found[parent] = found.get(parent, False) or entry.dimensions > 0
    return found


def _parent(entries: Mapping[str, Entry], where: str) -> Keys:
    """The one dict that can be the model's."""
    found = {
        parent: has_dimensions
        for parent, has_dimensions in _parents(entries).items()
        if not any(_NO_MODEL.fullmatch(part) for part in parent)
    }
    if len(found) > 1 and not found.get((), True):
        del found[()]
    named = [parent for parent in found if parent and parent[-1] == "model"]
    if len(found) > 1 and len(named) == 1 and () not in found:
        return named[0]
    if len(found) == 1:
        return next(iter(found))
    if not found:
        raise CheckpointError(
            f"{where} holds no tensors of a model: save model.state_dict(), or say by --prefix "
            f"(dcp_prefix) where they are; {_told(entries)}"
        )
    raise CheckpointError(
        f"{where} holds tensors in several places, and does not say which are the model's: give "
        f"--prefix (dcp_prefix), such as --prefix model. ; {_told(entries)}"
    )


def _told(entries: Mapping[str, Entry]) -> str:
    """The places of tensors, as prefixes, for a message."""
    places = dict.fromkeys(
        f"'{shown('.'.join((*parent, '')) if parent else '', 60)}'" for parent in _parents(entries)
    )
    cut = list(places)[:_TOLD]
    more = "…" if len(places) > len(cut) else ""
    return f"there are tensors under {', '.join(cut)}{more}" if cut else "it has no tensors at all"
