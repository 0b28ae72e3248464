"""The names that a model's tensors have on the hub, as transformers would save the model.

transformers' own conversion runs on tensors without content. Each result is a view of a model's
tensor, and is traced back to that tensor.
"""

from __future__ import annotations

import copy
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from syncd.checkpoint import name_map
from syncd.checkpoint.name_map import NameMap
from syncd.checkpoint.placement import Shape
from syncd.checkpoint.tensor_rules import shown
from syncd.protocol.errors import RecordError
from syncd.protocol.names import NAME_MAP
from syncd.protocol.tensor_names import HubPiece, MappedTensor, NameMapRecord
from trainer_hooks.state.load_proof import LoadFault, prove
from trainer_hooks.state.model_files import published_config
from trainer_hooks.state.plain_model import on_meta, own_class, plain_model
from trainer_hooks.state.small_files import Files
from trainer_hooks.state.state_dict import described, tensors_of
from trainer_hooks.state.wrappers import is_pretrained, unwrapped

log = logging.getLogger(__name__)

_NUMBER: Final = re.compile(r"\d+")


class HubNames:
    """Makes the name map of a trained model, for each of its saves.

    transformers must load the model under the map's names; if it cannot, the map has the reason. No
    save fails because of the map.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        #: The tensors of pipeline stages on other ranks, on ``meta``.
        self.of_stages: dict[str, Tensor] = {}
        #: The names, shapes and dtypes of the last state.
        self.key: object = None
        self._files: Files = {}
        self._choices = self._choose({}, None)

    def files(self, state: Mapping[str, Any], base: nn.Module | None = None) -> Files:
        """``name_map.json``; empty if no map is needed.

        If ``state`` is the merged state of a PEFT model, ``base`` is its base model without
        wrappers.
        """
        tensors = tensors_of(state)
        key = described(tensors)
        if self.key != key:
            self.close()
            self.key, self._files = key, {}
            self._choices = self._choose({**self.of_stages, **on_meta(tensors)}, base)
        self._files = next(self._choices, self._files)
        return self._files

    def close(self) -> None:
        """End a proof that is under way. Safe to call twice."""
        self._choices.close()

    def _choose(self, tensors: Mapping[str, Tensor], base: nn.Module | None) -> Generator[Files]:
        """Yield the map to publish: again and again while a proof is under way."""
        inner = unwrapped(self.model if base is None else base)
        if not is_pretrained(inner):
            return
        try:
            model: Any = plain_model(inner, tensors) if base is None else base
            maps = [name_map_of(model, tensors)]
            if getattr(model, "_weight_conversions", None):
                # A load that dequantized had other names than the weights that it made.
                model = copy.copy(model)
                model._weight_conversions = None  # noqa: SLF001 - as if the model was not loaded
                maps.append(name_map_of(model, tensors))
        except Exception as error:  # noqa: BLE001 - copying a model's modules may fail, but no save may fail because of it
            maps = [
                _refused(f"the model's modules cannot be copied: {type(error).__name__}: {error}")
            ]
        shapes = {name: tuple(value.shape) for name, value in tensors.items()}
        kind, refused = own_class(inner), ""
        for names in maps:
            if names is not None and names.refused is not None:
                refused = refused or names.refused
                continue
            fault, files = LoadFault(), self._files_of(names)
            try:
                for answer in prove(kind, published_config(self.model), hub_shapes(names, shapes)):
                    if answer is None:
                        yield files
                    else:
                        fault = answer
            except Exception as error:  # noqa: BLE001 - any model's own code may run
                log.info("not proved that %s loads a version: %s", kind.__name__, error)
            # A name of the trainer that stays, as of a head for values, is no fault of the map.
            if shapes.keys() >= set(fault.unknown):
                if fault.reason:
                    log.warning("no version will load as it was trained: %s", fault.reason)
                yield files
                return
            refused = fault.reason
        log.warning("the model is published with the trainer's tensor names only: %s", refused)
        yield self._files_of(_refused(refused))

    def _files_of(self, names: NameMap | None) -> Files:
        """Nothing if readers would assume the same names without the file."""
        config = getattr(unwrapped(self.model), "config", None)
        try:
            known = config is not None and name_map.has_table(config.to_dict())
        except Exception:  # noqa: BLE001 - a config may have been changed to anything; the map is true in any case
            known = True
        if names is None or not (names or names.refused or known):
            return {}
        return {NAME_MAP: names.encode()}


def hub_shapes(names: NameMap | None, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """The names and shapes on the hub of the trainer's tensors."""
    if names is None:
        return dict(shapes)
    found: dict[str, Shape] = {}
    for name, shape in shapes.items():
        for part in names.hub(name, shape):
            before = found.get(part.name)  # of a tensor that is joined
            joined = before and (before[0] + part.shape[0], *part.shape[1:])
            found[part.name] = joined or part.shape
    return found


def name_map_of(model: nn.Module, tensors: Mapping[str, Tensor] | None = None) -> NameMap | None:
    """The names by which transformers would save a model, tensor by tensor.

    A model that was loaded from a checkpoint of the hub is saved under the hub's names. Any other
    model is saved under the names that transformers has for its type. The model must have no
    wrappers. Of ``tensors`` (by default the state dict) only names, dtypes and shapes are used.

    Returns:
        The map; ``refused`` if transformers cannot convert the names, or if a tensor of the hub is
            not made of whole rows of the model's tensors. None if the model is not of transformers,
            or if transformers is older than version 5.
    """
    if not is_pretrained(model):
        return None
    try:
        from transformers.core_model_loading import revert_weight_conversion  # noqa: PLC0415 - slow, and imported by a model of it
    except ImportError:
        return None
    told = tensors_of(model.state_dict(keep_vars=True)) if tensors is None else tensors
    sources = {
        name: torch.empty(value.shape, dtype=value.dtype, device="meta")
        for name, value in told.items()
    }
    asked: Any = copy.copy(model)  # the same modules; only its own attributes may change
    if not getattr(asked, "_weight_conversions", None):
        asked._weight_conversions = None  # noqa: SLF001 - as if the model was not loaded
    try:
        with _Views() as views:
            found = revert_weight_conversion(asked, dict(sources))
    except Exception as error:  # noqa: BLE001 - any model's code may run; the map records its error
        return _refused(
            f"transformers cannot convert the model's tensor names: {type(error).__name__}: {error}"
        )
    try:
        return NameMap(NameMapRecord(tensors=_Trace(sources, views).tensors(found)))
    except (_NotRowsError, RecordError) as error:
        return _refused(str(error))


def _refused(why: str) -> NameMap:
    return NameMap(NameMapRecord(refused=shown(why)))


class _NotRowsError(Exception):
    """A tensor of the hub is not made of whole rows of the trainer's tensors."""


class _Views(TorchFunctionMode):
    """A mode in which ``clone`` and ``contiguous`` do not copy, and ``torch.cat`` is recorded.

    ``joined``: the memory of a tensor that ``torch.cat`` made → the dimension and the parts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.joined: dict[int, tuple[int, Sequence[Tensor]]] = {}
        self._kept: list[Tensor] = []  # so that no two tensors get the same id of memory

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in {Tensor.contiguous, Tensor.clone, torch.clone}:
            return args[0]
        result = func(*args, **(kwargs or {}))
        if func in {torch.cat, torch.concat, torch.concatenate}:
            told = dict(zip(("tensors", "dim"), args, strict=False)) | (kwargs or {})
            self.joined[_memory(result)] = told.get("dim", 0), tuple(told["tensors"])
            self._kept.append(result)
        return result


@dataclass(frozen=True, slots=True)
class _Place:
    """The position of a hub's tensor, or a part of it, in a trainer's tensor."""

    source: str
    hub_name: str
    index: int | None
    rows: tuple[int, int] | None
    transposed: bool
    at: int | None


class _Trace:
    def __init__(self, sources: Mapping[str, Tensor], views: _Views) -> None:
        self._sources = sources
        self._joined = views.joined
        self._source_of = {_memory(value): name for name, value in sources.items()}

    def tensors(self, values: Mapping[str, Tensor]) -> dict[str, MappedTensor]:
        """The map's entries, except those of tensors that are the same on the hub."""
        places: defaultdict[str, list[_Place]] = defaultdict(list)
        for hub_name, value in values.items():
            for part, at in self._parts(hub_name, value):
                place = self._place(hub_name, part, at)
                places[place.source].append(place)
        tensors = {}
        for name, value in self._sources.items():
            pieces = places.get(name)
            if pieces is None:
                raise _NotRowsError(f"{shown(name)} is in no tensor of the hub")
            if pieces != [_Place(name, name, None, None, False, None)]:
                shape = tuple(value.shape)
                tensors[name] = MappedTensor(shape=shape, pieces=_pieces(pieces, shape))
            elif name.removesuffix("_scale_inv") in tensors:
                raise _NotRowsError(f"{shown(name)} keeps its name, but its weight does not")
        return tensors

    def _parts(self, hub_name: str, value: Tensor) -> list[tuple[Tensor, int | None]]:
        joined = self._joined.get(_memory(value))
        if joined is None:
            return [(value, None)]
        dim, parts = joined
        if dim != 0 or value.shape[1:] != parts[0].shape[1:] or not value.is_contiguous():
            raise _NotRowsError(
                f"{shown(hub_name)} is several tensors joined along dimension {dim}"
            )
        placed: list[tuple[Tensor, int | None]] = []
        at = 0
        for part in parts:
            placed.append((part, at))
            at += part.shape[0]
        if at != value.shape[0]:
            raise _NotRowsError(
                f"the hub's {shown(hub_name)} has only some rows of the trainer's tensors"
            )
        return placed

    def _place(self, hub_name: str, value: Tensor, at: int | None) -> _Place:
        name = self._source_of.get(_memory(value))
        if name is None:
            raise _NotRowsError(f"{shown(hub_name)} is computed, not a part of a model's tensor")
        shape = tuple(self._sources[name].shape)
        for transposed in (False, True):
            sizes, steps = list(value.shape), list(value.stride())
            if transposed:
                if len(sizes) < 2:
                    continue
                sizes[-2:], steps[-2:] = sizes[:-3:-1], steps[:-3:-1]
            offset, index = int(value.storage_offset()), None
            inner = shape
            if len(sizes) == len(shape) - 1:
                index, offset = divmod(offset, max(1, prod(shape[1:])))
                inner = shape[1:]
            rows = _rows(sizes, steps, inner, offset)
            if rows is not None:
                whole = not inner or rows == (0, inner[0])
                return _Place(name, hub_name, index, None if whole else rows, transposed, at)
        raise _NotRowsError(
            f"the hub's {shown(hub_name)} of shape {tuple(value.shape)} is not made of whole rows "
            f"of the trainer's {shown(name)} of shape {shape}"
        )


def _rows(
    sizes: Sequence[int], steps: Sequence[int], inner: Shape, offset: int
) -> tuple[int, int] | None:
    """The rows of a tensor that a view covers; None if they are not whole."""
    if not inner:
        return (0, 1) if not sizes and not offset else None
    if tuple(sizes[1:]) != inner[1:] or len(sizes) != len(inner):
        return None
    step = prod(inner)
    for size, own, told in zip(sizes, inner, steps, strict=True):
        step = step // own if own else 0
        if size > 1 and told != step:
            return None
    width = prod(inner[1:])
    begin = offset // width if width else 0
    if begin * width != offset or begin + sizes[0] > inner[0]:
        return None
    return begin, begin + sizes[0]


def _pieces(places: Sequence[_Place], shape: Shape) -> tuple[HubPiece, ...]:
    """Join places that differ only in an index to one piece."""
    groups: defaultdict[object, list[_Place]] = defaultdict(list)
    for place in places:
        same = place.index is not None, place.rows, place.transposed, place.at
        # A place without an index is a separate piece.
        groups[(*same, None if same[0] else place.hub_name)].append(place)
    pieces = []
    for group in groups.values():
        first = group[0]
        name, number = first.hub_name, None
        if first.index is not None:
            name, number = _counted(sorted(group, key=lambda place: place.index or 0), shape)
        pieces.append(
            HubPiece(
                name=name,
                first=number,
                rows=first.rows,
                transposed=first.transposed,
                at=first.at,
            )
        )
    return tuple(pieces)


def _counted(group: Sequence[_Place], shape: Shape) -> tuple[str, int]:
    """The common name, with ``{}`` for the number; and the first number."""
    names = [place.hub_name for place in group]
    if [place.index for place in group] == list(range(shape[0])):
        for match in reversed(list(_NUMBER.finditer(names[0]))):
            first = int(match[0])
            before, after = names[0][: match.start()], names[0][match.end() :]
            if names == [f"{before}{first + index}{after}" for index in range(shape[0])]:
                return f"{before}{{}}{after}", first
    raise _NotRowsError(
        f"on the hub, {shown(group[0].source)} is several tensors, and their names (such as "
        f"{shown(names[0])}) are not numbered consecutively"
    )


def _memory(value: Tensor) -> int:
    """An id of a tensor's memory, unique while the memory exists."""
    return int(value.untyped_storage()._cdata)  # noqa: SLF001 - on meta there is no address
