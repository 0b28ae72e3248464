"""The full state dict in one safetensors file: planned and gathered by all ranks."""

from __future__ import annotations

import json
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from syncd.checkpoint.merging.plan import PlannedTensor, header_entries, plan_merge
from syncd.checkpoint.model_folder import says_tied
from syncd.checkpoint.placement import Local
from syncd.checkpoint.safetensors_file import CONTENT, content_digest
from syncd.checkpoint.safetensors_header import header_bytes
from syncd.checkpoint.tensor_rules import DTYPES, ITEMSIZE, Cast, name_fault, shown
from syncd.coordination.host_memory import HostMemory, wait_for_copies
from syncd.coordination.tensors import torch_dtype
from syncd.protocol.errors import CoverageError, SaveFailedError, SyncdError
from syncd.protocol.names import FULL_STATE_DICT
from syncd.protocol.records import NonFinite, ReceiptFile
from syncd.storage.fsio import Draft
from trainer_hooks.ranks import Ranks
from trainer_hooks.state.finite import LookedAtBytes
from trainer_hooks.state.gather import Derived, flat_bytes, full_tensor
from trainer_hooks.state.host_buffers import memory_of
from trainer_hooks.state.state_dict import cast_to, shape_of, tensors_of

LIMIT: Final = 256 * 1024 * 1024
_PIECES: Final = 8


@dataclass
class FullStateStream:
    """Sends the full state dict of one save, tensor by tensor, from all ranks into rank 0's file.

    On every rank the training thread calls :meth:`gather`. At the same time, a writer thread of
    rank 0 calls :meth:`write` once. If one thread fails, the other does not wait for it. In
    addition to the buffer, rank 0 has one whole tensor in memory (twice under FSDP1 without a
    mesh).

    Args:
        state: this rank's sharded state dict; the same names, in the same order, on every rank. It
            must not change before :meth:`gather` returns.
        limit: the size of the buffer between the two threads, in bytes of host memory.
        tied: whether to leave out the output embedding (:func:`ties_embeddings`).
        derived: name → a tensor to write instead of the one in ``state``; same dtype and shape.
        cast: None to keep the dtypes.
    """

    state: Mapping[str, Any]
    rank: int
    limit: int = LIMIT
    tied: bool = False
    derived: Mapping[str, Derived] = field(default_factory=dict)
    name: str = FULL_STATE_DICT
    cast: Cast | None = None

    def __post_init__(self) -> None:
        self.state = tensors_of(self.state)
        self._pipe = BytePipe(self.limit)

    @torch.no_grad()
    def gather(self) -> None:
        """Gather every tensor, even if the writer has failed. Collective.

        Raises:
            SaveFailedError: on every rank: the ranks' tensors differ, a tensor cannot be written,
                or a collective failed.
        """
        try:
            plan = agree_on_plan(
                self.state,
                self.rank,
                tied=self.tied,
                derived=self.derived,
                cast=self.cast,
            )
            self._pipe.announce(plan)
            for name in plan.in_order():
                # No variable: it would keep the tensor in memory while the next one is gathered.
                self._hand_over(self._whole(name))
            if self.rank == 0:
                self._pipe.flush()
        except RuntimeError as error:
            self.abort(error)
            raise SaveFailedError(f"the full state dict could not be gathered: {error}") from error
        except BaseException as error:
            self.abort(error)
            raise
        finally:
            self.state, self.derived = {}, {}

    def _whole(self, name: str) -> Tensor | None:
        derived, held = self.derived.get(name), self.state[name]
        dtype = cast_to(held.dtype, self.cast)
        if derived is None:
            return full_tensor(held, rank=self.rank, dtype=dtype)
        parts = {part: full_tensor(value, rank=self.rank) for part, value in derived.parts.items()}
        if self.rank > 0:
            return None
        try:
            made = derived.make({part: one for part, one in parts.items() if one is not None})
            return made.to(dtype)
        except Exception as error:  # noqa: BLE001 - it fails the file; raised here, it would leave other ranks alone in a collective
            self.abort(error)
            return None

    def write(self, draft: Draft) -> ReceiptFile:
        """Write arriving tensors into the draft; the caller must finish and commit the draft.

        The header holds the digest of the tensors. So files with equal headers have equal contents.

        Raises:
            SaveFailedError: the state dict was not gathered.
            CoverageError: the embeddings differ, although the config says that they are tied.
            OSError: storage failed.
        """
        try:
            return self._write(draft, self._pipe.plan())
        except BaseException as error:
            self.abort(error)
            raise

    def abort(self, error: BaseException) -> None:
        """End the waits of both threads; :meth:`write` then raises."""
        self._pipe.abort(error)

    def _hand_over(self, whole: Tensor | None) -> None:
        """Give a tensor to the writer; an error fails the file, but not the gathering."""
        if whole is None:
            return
        try:
            self._pipe.put(whole)
        except (RuntimeError, MemoryError) as error:
            self.abort(error)

    def _write(self, draft: Draft, plan: FullPlan) -> ReceiptFile:
        draft.write(plan.header(bytes(16)))
        digests, nonfinite = [], []
        for tensor in plan.tensors:
            looked = LookedAtBytes(torch_dtype(tensor.dtype))
            digests.append(self._digest(tensor, draft.write, looked.add))
            if not looked.is_finite:
                nonfinite.append(tensor.name)
        for tensor, digest in zip(plan.tensors, digests, strict=True):
            for copy in tensor.copies:
                if self._digest(tensor) != digest:
                    raise CoverageError(
                        f"{shown(copy.tied)} differs from {shown(tensor.name)}, but config.json "
                        "has tie_word_embeddings. Tie these tensors, or set tie_word_embeddings "
                        "to false"
                    )
        header = plan.header(content_digest(digests))
        draft.overwrite(header, 0)
        return ReceiptFile(
            name=self.name,
            size=draft.size,
            digest=xxhash.xxh3_128_hexdigest(header),
            over="header",
            nonfinite=NonFinite.of(nonfinite),
        )

    def _digest(self, tensor: PlannedTensor, *given_to: Callable[[memoryview], object]) -> bytes:
        hasher = xxhash.xxh3_128()
        for part in self._pipe.take(tensor.length):
            hasher.update(part)
            for give in given_to:
                give(part)
        return hasher.digest()


def ties_embeddings(model: nn.Module) -> bool:
    """True if the model's config says ``tie_word_embeddings``."""
    to_json = getattr(getattr(model, "config", None), "to_json_string", None)
    return to_json is not None and says_tied(json.loads(to_json()))


class FullPlan(NamedTuple):
    """The plan of a full state dict's file; ``tensors`` are in the order of the file."""

    tensors: Sequence[PlannedTensor]

    def in_order(self) -> Iterator[str]:
        """The names in the order of gathering; tied tensors, which are only compared, come last."""
        yield from (tensor.name for tensor in self.tensors)
        yield from (str(copy.tied) for tensor in self.tensors for copy in tensor.copies)

    def header(self, content: bytes) -> bytes:
        """The file's header with the digest ``content``; all digests give the same length."""
        return header_bytes(header_entries(self.tensors), {CONTENT: content.hex()})


@dataclass(frozen=True)
class _Outline:
    """A summary of a rank's tensors, to compare with other ranks.

    ``memory`` has, for each tensor, the number of the first tensor with the same memory.
    """

    digest: str
    count: int
    fault: str | None
    memory: tuple[int, ...]


def agree_on_plan(
    state: Mapping[str, Tensor],
    rank: int,
    *,
    tied: bool,
    derived: Mapping[str, Derived] = MappingProxyType({}),
    cast: Cast | None = None,
) -> FullPlan:
    """The plan of the file; the same on all ranks. Collective.

    For the arguments see :class:`~trainer_hooks.state.full_file.FullStateStream`. A derived tensor
    never counts as tied.

    Raises:
        SaveFailedError: on all ranks: their tensors differ, or a tensor cannot be saved.
    """
    outline = _outline(state, rank, tied=tied, derived=derived)
    outlines = Ranks().gathered(outline)
    for number, other in enumerate(outlines):
        if other.fault is not None:
            raise SaveFailedError(f"rank {number} cannot save its full state dict: {other.fault}")
        if other.digest != outlines[0].digest:
            raise SaveFailedError(
                f"the {other.count} tensors of rank {number} differ from the {outlines[0].count} "
                "tensors of rank 0 in name, kind, dtype or shape. Pipeline stages can be saved "
                "only as shards"
            )
    try:
        return FullPlan(_planned(state, outlines[0].memory, tied=tied, cast=cast))
    except SyncdError as error:
        raise SaveFailedError(f"the full state dict cannot be saved: {error}") from error


def _outline(
    state: Mapping[str, Tensor], rank: int, *, tied: bool, derived: Mapping[str, Derived]
) -> _Outline:
    fault = None if state else "the state dict has no tensors"
    hasher = xxhash.xxh3_128(b"tied" if tied else b"")
    memory = []
    seen: dict[object, int] = {}
    for number, (name, value) in enumerate(state.items()):
        fault = fault or _fault(name, value, rank)
        is_derived = name in derived
        hasher.update(repr((_like(name, value), is_derived)).encode())
        for part, own in derived[name].parts.items() if is_derived else ():
            fault = fault or _fault(part, own, rank)
            hasher.update(repr(_like(part, own)).encode())
        key = number if is_derived else memory_of(value) or number
        memory.append(seen.setdefault(key, number))
    return _Outline(hasher.hexdigest(), len(state), fault, tuple(memory))


def _like(name: str, value: Tensor) -> object:
    kind = "DTensor" if isinstance(value, DTensor) else type(value).__name__
    return name, kind, value.dtype, tuple(shape_of(value))


def _fault(name: object, value: Tensor, rank: int) -> str | None:
    fault = name_fault(name)
    if fault is None and _dtype(value) not in DTYPES:
        fault = f"has dtype {value.dtype}, which safetensors files do not have"
    if fault is None and isinstance(value, DTensor):
        if any(placement.is_partial() for placement in value.placements):
            fault = "is Partial: redistribute it to Replicate() or Shard() before saving"
        elif rank == 0 and value.device_mesh.get_coordinate() is None:
            fault = "is on a device mesh without rank 0, so only shards can be saved"
    return None if fault is None else f"{shown(name)} {fault}"


def _planned(
    state: Mapping[str, Tensor], memory: tuple[int, ...], *, tied: bool, cast: Cast | None
) -> Sequence[PlannedTensor]:
    """Plan one file by the merge's own planner, as if one rank had all tensors.

    Tensors with the same memory get the same offset, so tied tensors need no comparison.
    """
    tensors = {}
    for (name, value), offset in zip(state.items(), memory, strict=True):
        dtype, shape = DTYPES[_dtype(value)][0], shape_of(value)
        length = shape.numel() * ITEMSIZE[dtype]
        tensors[name] = Local(dtype, tuple(shape), offset, length, "", None)
    plan = plan_merge([(FULL_STATE_DICT, tensors)], max_file_size=sys.maxsize, tied=tied, cast=cast)
    (file,) = plan.files
    return file.tensors


def _dtype(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


class BytePipe:
    """Passes the tensors' bytes, end to end, from the gathering thread to the writing thread."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._plan: FullPlan | None = None
        self._size = max(1, limit // _PIECES)
        self._unmade = max(1, limit // self._size)
        self._free: deque[HostMemory] = deque()
        self._ready: deque[tuple[HostMemory, int]] = deque()
        # For the gathering thread: the piece that it fills, and the number of bytes in it.
        self._filling: HostMemory | None = None
        self._filled = 0
        self._sources: set[torch.device] = set()
        # For the writing thread: the piece that it reads, and the rest of it.
        self._reading: HostMemory | None = None
        self._rest = memoryview(b"")

    def announce(self, plan: FullPlan) -> None:
        """Give the plan to the writing thread."""
        with self._changed:
            self._plan = plan
            self._changed.notify_all()

    def plan(self) -> FullPlan:
        """Wait for the plan."""
        with self._changed:
            self._changed.wait_for(lambda: self._plan is not None or self._error is not None)
            if self._error is None and self._plan is not None:
                return self._plan
        raise self._not_gathered()

    def abort(self, error: BaseException) -> None:
        """End the waits of both threads: put() drops bytes, and take() raises."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def put(self, whole: Tensor) -> None:
        """Copy a tensor's bytes into the buffer."""
        flat = flat_bytes(whole)
        while flat.numel():
            if self._filling is None:
                self._filling = self._next_free(whole.device)
                if self._filling is None:
                    return
            room = self._filling.content[self._filled :]
            part = flat[: room.numel()]
            room[: part.numel()].copy_(part, non_blocking=True)
            self._sources.add(whole.device)
            self._filled += part.numel()
            flat = flat[part.numel() :]
            if self._filled == self._size:
                self.flush()

    def flush(self) -> None:
        """Pass the last, partly filled piece to the writing thread."""
        if self._filling is None:
            return
        wait_for_copies(self._sources)
        with self._changed:
            self._ready.append((self._filling, self._filled))
            self._changed.notify_all()
        self._filling, self._filled = None, 0

    def take(self, count: int) -> Iterator[memoryview]:
        """Yield the next ``count`` bytes in parts, each valid until the next part is yielded."""
        while count:
            if not self._rest:
                self._reading, filled = self._next_ready()
                self._rest = self._reading.content.numpy().data[:filled]
            part, self._rest = self._rest[:count], self._rest[count:]
            count -= len(part)
            yield part

    def _next_free(self, source: torch.device) -> HostMemory | None:
        with self._changed:
            if not self._free and self._error is None and self._unmade:
                self._unmade -= 1
                return HostMemory(self._size, source)
            self._changed.wait_for(lambda: self._free or self._error is not None)
            return self._free.popleft() if self._error is None else None

    def _next_ready(self) -> tuple[HostMemory, int]:
        """Free the piece that was read before, and return the next one."""
        with self._changed:
            if self._reading is not None:
                self._free.append(self._reading)
                self._reading = None
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._ready or self._error is not None)
            if self._error is None:
                return self._ready.popleft()
        raise self._not_gathered()

    def _not_gathered(self) -> SaveFailedError:
        failed = SaveFailedError(f"the full state dict was not gathered: {self._error}")
        failed.__cause__ = self._error
        return failed
