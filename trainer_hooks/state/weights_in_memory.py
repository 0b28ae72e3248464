"""One rank's whole tensors, copied to host memory as they come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, Final

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.utils.dlpack import from_dlpack

from syncd.checkpoint.boxes import whole
from syncd.checkpoint.safetensors_file import DIGESTS
from syncd.checkpoint.safetensors_header import HeaderEntry, file_order, header_bytes
from syncd.checkpoint.tensor_rules import name_fault, shown
from syncd.coordination.host_memory import HostMemory, wait_for_copies
from syncd.coordination.tensors import torch_dtype
from syncd.deltas.delta_index import Content, SavedPiece
from syncd.protocol.errors import InvalidSettingsError
from syncd.protocol.records import NonFinite, ReceiptFile, SaveId
from syncd.storage.fsio import Draft
from trainer_hooks.state.finite import LookedAtBytes
from trainer_hooks.state.gather import flat_bytes
from trainer_hooks.state.state_dict import dtype_name

#: Bytes of host memory that are allocated at a time.
BUCKET: Final = 64 * 1024 * 1024


class WeightsInMemory:
    """The whole tensors that one rank gives to a save; the next save uses the same memory.

    The memory holds the tensors' bytes, and less than one bucket more. It is pinned if the first
    tensor of a bucket comes from an accelerator.

    Attributes:
        save_id: the save of the present tensors; None before it begins.
    """

    def __init__(self, bucket: int = BUCKET) -> None:
        self.save_id: SaveId | None = None
        self._size = bucket
        self._buckets: list[HostMemory] = []
        self._entries: dict[str, HeaderEntry] = {}  # with offsets in the buckets
        self._end = 0

    def fill(self, tensors: Iterable[tuple[str, Any]]) -> int:
        """Copy tensors, each before the next is asked for; return their bytes.

        After an error the rest is still asked for, because other ranks may take part in each step
        of the iteration.

        Raises:
            InvalidSettingsError: a value is no whole tensor, or a name comes twice.
        """
        self._entries, self._end, self.save_id = {}, 0, None
        failed: Exception | None = None
        for name, value in tensors:
            try:
                if failed is None:
                    self._add(name, value)
            except Exception as error:  # noqa: BLE001 - raised below
                failed = error
        if failed is not None:
            raise failed
        return self._end

    def write(self, draft: Draft) -> ReceiptFile:
        """Write and commit a safetensors file; return its receipt entry. Can be called again.

        The header has the digest of each tensor. Whole pages come first, and then wider dtypes, so
        that each tensor is aligned.
        """
        order = sorted(
            self._entries.values(),
            key=lambda one: file_order(one.end - one.begin, one.dtype),
        )
        digests: list[bytes] = []
        nonfinite = []
        draft.write(_header(order, [bytes(16)] * len(order)))
        for entry in order:
            hasher = xxhash.xxh3_128()
            looked = LookedAtBytes(torch_dtype(entry.dtype))
            for part in self._parts(entry.begin, entry.end):
                draft.write(part)
                hasher.update(part)
                looked.add(part)
            digests.append(hasher.digest())
            if not looked.is_finite:
                nonfinite.append(entry.name)
        header = _header(order, digests)
        draft.overwrite(header, 0)
        draft.commit()
        return ReceiptFile(
            name=draft.path.name,
            size=draft.size,
            digest=xxhash.xxh3_128_hexdigest(header),
            over="header",
            nonfinite=NonFinite.of(nonfinite),
        )

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return self._end

    def _add(self, name: str, value: Any) -> None:
        fault = name_fault(name)
        if fault is None and name in self._entries:
            fault = "comes twice from this rank"
        if fault is not None:
            raise InvalidSettingsError(f"{shown(str(name))} {fault}. Give each tensor its own name")
        dtype, shape, flat = _bytes_of(name, value)
        begin = self._end
        while flat.numel():
            number, used = divmod(self._end, self._size)
            if number == len(self._buckets):
                self._buckets.append(HostMemory(self._size, flat.device))
            room = self._buckets[number].content[used:]
            part, flat = flat[: room.numel()], flat[room.numel() :]
            room[: part.numel()].copy_(part, non_blocking=True)
            self._end += part.numel()
        wait_for_copies({flat.device})  # the next tensor may come in the same memory
        self._entries[name] = HeaderEntry(name, dtype, shape, begin, self._end)

    def pieces(self, old: WeightsInMemory | None, nonfinite: list[str]) -> Iterator[SavedPiece]:
        """The tensors as pieces of a delta, whose base has the tensors of ``old``.

        The names of tensors with NaN or Inf are added to ``nonfinite``.
        """
        for entry in self._entries.values():
            looked = LookedAtBytes(torch_dtype(entry.dtype))
            new = partial(self._content, entry, looked=looked)
            before = None if old is None else old.content(entry)
            yield SavedPiece(entry.name, entry.dtype, whole(entry.shape), new, before)
            if not looked.is_finite:
                nonfinite.append(entry.name)

    def content(self, like: HeaderEntry) -> Content | None:
        """The bytes of a tensor; None if there is none of this name, dtype and shape."""
        entry = self._entries.get(like.name, like._replace(shape=(-1,)))
        return partial(self._content, entry) if entry[:3] == like[:3] else None

    def _content(
        self, entry: HeaderEntry, begin: int, end: int, looked: LookedAtBytes | None = None
    ) -> memoryview:
        first, *more = self._parts(entry.begin + begin, entry.begin + end)
        part = memoryview(bytearray().join((first, *more))) if more else first
        if looked is not None:
            looked.add(part)
        return part

    def _parts(self, at: int, end: int) -> Iterator[memoryview]:
        while at < end:
            number, used = divmod(at, self._size)
            count = min(end - at, self._size - used)
            yield self._buckets[number].content.numpy().data[used : used + count]
            at += count


def _header(order: Iterable[HeaderEntry], digests: Iterable[bytes]) -> bytes:
    at, entries = 0, []
    for entry in order:
        end = at + entry.end - entry.begin
        entries.append(entry._replace(begin=at, end=end))
        at = end
    return header_bytes(entries, {DIGESTS: b"".join(digests).hex()})


def _bytes_of(name: str, value: Any) -> tuple[str, tuple[int, ...], Tensor]:
    """The dtype in safetensors, the shape, and the bytes as a 1-D uint8 tensor."""
    if isinstance(value, DTensor | ShardedTensor):
        raise InvalidSettingsError(
            f"{shown(name)} is a {type(value).__name__}: give value.full_tensor(), or save the "
            "model with TrainerHook, which writes each rank's shard"
        )
    if not isinstance(value, Tensor | np.ndarray) and hasattr(value, "__dlpack__"):
        value = from_dlpack(value)
    is_plain = type(value) in {Tensor, nn.Parameter} and value.layout is torch.strided
    is_array = type(value) in {np.ndarray, np.memmap}
    if not (is_plain and value.device.type != "meta") and not is_array:
        raise InvalidSettingsError(
            f"{shown(name)} is a {type(value).__name__} that is no plain tensor with values: give "
            "a dense torch tensor, a NumPy array, or an object with __dlpack__"
        )
    dtype = dtype_name(value.dtype)
    if not dtype:
        raise InvalidSettingsError(
            f"{shown(name)} has dtype {value.dtype}, which safetensors files do not have: cast it"
        )
    if isinstance(value, Tensor):
        flat = flat_bytes(value)
    else:  # NumPy's bf16 and fp8 are those of ml_dtypes, which torch does not know
        content = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        flat = torch.from_numpy(content if content.flags.writeable else content.copy())
    return dtype, tuple(value.shape), flat
