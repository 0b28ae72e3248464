"""Copies a rank's state to host memory, so that training continues while the copy is written."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import (
    ShardedTensorMetadata,
    TensorProperties,
)
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from syncd.checkpoint.tensor_rules import Casting
from syncd.coordination.host_memory import HostMemory, wait_for_copies
from syncd.coordination.torch_modes import without_modes
from trainer_hooks.state.finite import Looked, is_finite
from trainer_hooks.state.state_dict import cast_to, tensors_of

#: The path of a value in a nesting of dicts, lists and tuples.
Place = tuple[object, ...]


def host_copy(value: Any) -> Any:
    """Copy the tensors in a nesting of dicts, lists and tuples to new host memory."""

    def copied(_: Place, tensor: Tensor) -> Tensor:
        return _with_parts(tensor, [_moved(part) for part in _parts(tensor)], tensor.dtype)

    with without_modes():
        return _mapped(value, copied, ())


class HostCopy(dict[str, Any]):
    """A state that was copied to host memory.

    ``finite``: name → True if this rank's part has no NaN or Inf; only tensors that were checked
    before the copy.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        super().__init__(state)
        self.finite: dict[str, bool] = {}


def nonfinite_names(state: Mapping[str, Any]) -> list[str]:
    """The names of the weights on the CPU whose part on this rank holds NaN or Inf.

    Tensor subclasses and sparse tensors cannot be checked, so they count as finite.
    """
    known = state.finite if isinstance(state, HostCopy) else {}
    return [
        name
        for name, value in tensors_of(state).items()
        if not (
            known[name]
            if name in known
            else all(is_finite(part) for part in _parts(value) if _is_ordinary(part))
        )
    ]


class HostBuffers:
    """Host memory for a state. Each copied state overwrites the previous one.

    A copy with the same names, shapes and dtypes uses no new memory. Buffers for an accelerator's
    tensors are pinned.
    """

    def __init__(self) -> None:
        self._kept: dict[Place, _Kept] = {}

    @without_modes()
    def copy(self, state: Mapping[str, Any], cast: Casting | None = None) -> HostCopy:
        """Copy each tensor of a state to contiguous host memory; return when all copies are done.

        A GPU casts its tensors and checks them for NaN and Inf, one by one. DTensors and
        ShardedTensors keep their type and layout. Tied weights share one copy. Integers, bool,
        tensor subclasses and ``_extra_state`` are not cast.
        """
        before, self._kept = self._kept, {}
        shared: dict[object, _Buffer] = {}
        devices: set[torch.device] = set()
        looked = Looked()
        weights = {} if cast is None else tensors_of(state)

        def copied(place: Place, tensor: Tensor) -> Tensor:
            old = before.pop(place, None)
            is_weight = len(place) == 1 and place[0] in weights
            dtype = cast_to(str(place[0]), tensor.dtype, cast if is_weight else None)
            kept = self._kept[place] = _kept(tensor, dtype, old, shared, looked)
            devices.update(buffer.source for buffer in kept.buffers)
            return kept.value

        found = HostCopy({name: _mapped(value, copied, (name,)) for name, value in state.items()})
        looked.fetch()
        wait_for_copies(devices)
        if any(map(_looks_at, devices)):
            nonfinite = looked.nonfinite()
            for place, kept in self._kept.items():
                if len(place) == 1 and kept.was_looked_at:
                    found.finite[str(place[0])] = nonfinite.isdisjoint(kept.buffers)
        return found

    @property
    def nbytes(self) -> int:
        """The bytes of all buffers."""
        buffers = {id(one): one for kept in self._kept.values() for one in kept.buffers}
        return sum(buffer.copy.nbytes for buffer in buffers.values())


class _Buffer:
    """Host memory for a tensor of one shape, dtype (after the cast) and source device."""

    def __init__(self, tensor: Tensor, dtype: torch.dtype) -> None:
        self.source = tensor.device
        self._like = (dtype, tensor.shape, tensor.device)
        self._memory = HostMemory(tensor.numel() * dtype.itemsize, tensor.device)
        self.copy = self._memory.content.view(dtype).view(tensor.shape)

    def takes(self, tensor: Tensor, dtype: torch.dtype) -> bool:
        return (dtype, tensor.shape, tensor.device) == self._like

    def fill(self, tensor: Tensor, looked: Looked) -> None:
        if self.source.type != "cpu":
            tensor = tensor.to(self.copy.dtype)  # so that fewer bytes leave the device
        if _looks_at(self.source):
            looked.add(self, tensor)
        self.copy.copy_(tensor, non_blocking=True)


class _Kept(NamedTuple):
    """The copy of a value, and the layout of a sharded tensor."""

    buffers: Sequence[_Buffer]
    layout: object
    value: Tensor

    @property
    def was_looked_at(self) -> bool:
        return bool(self.buffers) and all(_looks_at(buffer.source) for buffer in self.buffers)


def _looks_at(device: torch.device) -> bool:
    """True for a GPU; on a CPU, training would have to wait for the check."""
    return device.type == "cuda"  # other accelerators may lack aminmax for some dtype


def _kept(
    tensor: Tensor,
    dtype: torch.dtype,
    old: _Kept | None,
    shared: dict[object, _Buffer],
    looked: Looked,
) -> _Kept:
    parts = _parts(tensor)
    if not all(_is_ordinary(part) for part in parts):
        return _Kept((), None, _with_parts(tensor, [_moved(part) for part in parts], tensor.dtype))
    free = list(old.buffers) if old is not None else []
    buffers = []
    for number, part in enumerate(parts):
        key = _memory(part), dtype
        buffer = shared.get(key) if part.numel() else None
        if buffer is None:
            buffer = free[number] if number < len(free) else None
            # Tensors that were tied the last time need not be tied now.
            if buffer is None or buffer in shared or not buffer.takes(part, dtype):
                buffer = _Buffer(part, dtype)
            shared[key] = shared[buffer] = buffer
            buffer.fill(part, looked)
        buffers.append(buffer)
    layout = _layout(tensor)
    # A parameter has the same layout object each time, and == takes longer than a small copy.
    # (Not the parameter itself: model.to cannot move a parameter that has a weak reference.)
    if old is not None and buffers == free and (layout is old.layout or layout == old.layout):
        return old
    return _Kept(buffers, layout, _with_parts(tensor, [buffer.copy for buffer in buffers], dtype))


def _mapped(value: Any, copied: Callable[[Place, Tensor], Tensor], place: Place) -> Any:
    match value:
        case Tensor():
            return copied(place, value)
        case dict():
            return {key: _mapped(item, copied, (*place, key)) for key, item in value.items()}
        case list() | tuple():
            items = [_mapped(item, copied, (*place, at)) for at, item in enumerate(value)]
            named = isinstance(value, tuple) and hasattr(value, "_fields")
            return type(value)(*items) if named else type(value)(items)
        case _:
            return value


def _parts(tensor: Tensor) -> list[Tensor]:
    """A rank's parts of a tensor of any kind."""
    if isinstance(tensor, ShardedTensor):
        return [shard.tensor for shard in tensor.local_shards()]
    if isinstance(tensor, DTensor):
        # to_local would make another parameter, which takes longer than the copy.
        return [tensor._local_tensor]  # noqa: SLF001 - the result of to_local without gradients
    return [tensor]


def memory_of(tensor: Tensor) -> object | None:
    """A key of the tensor's memory; None if this rank's part is empty."""
    held = tuple(_memory(part) for part in _parts(tensor) if part.numel())
    return held or None


def _memory(part: Tensor) -> object:
    return part.device, part.data_ptr(), part.dtype, part.shape, part.stride()


def _is_ordinary(part: Tensor) -> bool:
    """True for a tensor that is neither a subclass nor sparse."""
    return type(part) in {Tensor, nn.Parameter} and part.layout is torch.strided


def _moved(part: Tensor) -> Tensor:
    if _is_ordinary(part):
        return part.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    return part.detach().to("cpu", copy=True)


def _layout(tensor: Tensor) -> object:
    if isinstance(tensor, ShardedTensor):
        return tensor.metadata()
    if isinstance(tensor, DTensor):
        return tensor._spec  # noqa: SLF001 - mesh, placements and shape in one
    return None


def _with_parts(tensor: Tensor, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    if isinstance(tensor, ShardedTensor):  # like ``ShardedTensor.cpu``, without communication
        metadata = tensor.metadata()
        of_parts = ShardedTensorMetadata(
            shards_metadata=[_on_cpu(one) for one in metadata.shards_metadata],
            size=metadata.size,
            tensor_properties=TensorProperties(
                dtype=dtype, pin_memory=any(part.is_pinned() for part in parts)
            ),
        )
        shards = [
            Shard(part, _on_cpu(shard.metadata))
            for part, shard in zip(parts, tensor.local_shards(), strict=True)
        ]
        return ShardedTensor._init_from_local_shards_and_global_metadata(  # noqa: SLF001 - as torch's .cpu()
            shards,
            sharded_tensor_metadata=of_parts,
            process_group=tensor._process_group,  # noqa: SLF001 - there is no other way to know it
        )
    if isinstance(tensor, DTensor):
        return with_local(tensor, parts[0])
    return parts[0]


def with_local(tensor: DTensor, local: Tensor) -> DTensor:
    """A DTensor with the same layout over another local tensor, of any device and dtype.

    ``DTensor.from_local`` would move the local tensor to the mesh's device, and lose the order in
    which the dimensions are sharded.
    """
    detached: Any = tensor.detach()
    attributes, context = detached.__tensor_flatten__()
    if local.dtype != tensor.dtype:
        context = tuple(_retyped(one, local.dtype) for one in context)
    inner = {name: getattr(tensor, name) for name in attributes} | {"_local_tensor": local}
    stride = tensor.stride()
    if not tensor.is_contiguous():
        stride = torch.empty(tensor.shape, device="meta").stride()
    made: DTensor = DTensor.__tensor_unflatten__(inner, context, tensor.shape, stride)  # type: ignore[no-untyped-call] # torch's
    return made


def _retyped(argument: Any, dtype: torch.dtype) -> Any:
    """Replace the dtype in one of a DTensor's arguments, if it has one."""
    if isinstance(argument, TensorMeta):
        return argument._replace(dtype=dtype)
    if isinstance(argument, DTensorSpec):
        argument = copy.copy(argument)
        argument.tensor_meta = _retyped(argument.tensor_meta, dtype)
    return argument


def _on_cpu(shard: ShardMetadata) -> ShardMetadata:
    rank = shard.placement.rank() if shard.placement is not None else None
    placement = "cpu" if rank is None else f"rank:{rank}/cpu"
    return ShardMetadata(list(shard.shard_offsets), list(shard.shard_sizes), placement)
