"""Receive weights by broadcast: do the handshake, receive buckets, fill an engine's tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import islice, starmap
from typing import TYPE_CHECKING

import torch
import xxhash
from torch import Tensor

from explorer_hooks.engines.in_place import HostBuffer, synchronize
from explorer_hooks.engines.targets import Fit, Target, differ
from syncd.checkpoint.boxes import whole as whole_box
from syncd.coordination.broadcast.weight_meta import (
    AHEAD,
    AT_A_TIME,
    DIGEST,
    HEADER,
    Bucket,
    Header,
    Image,
    WeightMeta,
    WeightSpec,
)
from syncd.coordination.host_memory import HostMemory, wait_for_copies
from syncd.coordination.tensors import bytes_of, torch_dtype
from syncd.protocol.errors import BroadcastError, EngineBrokenError

if TYPE_CHECKING:
    from syncd.coordination.broadcast.group import Broadcasting, WeightGroup


@contextmanager
def greet(group: WeightGroup, known: WeightMeta | None) -> Iterator[Arriving]:
    """Do the handshake of a transfer. The block must prepare for the yielded transfer.

    ``known`` is the list of tensors (the meta) of an earlier transfer, if any. The trainer sends
    the meta only if a member does not know it. After the block, all members are prepared for the
    transfer. If the block raises an error, no tensor is sent.
    """
    header = Header.decode(_received(group, HEADER))
    meta = known if known is not None and known.digest == header.digest else None
    told = None if group.agree(meta is not None) else _received(group, header.meta_bytes)
    try:
        meta = meta or _decoded(told, header)
        yield Arriving(group, header, meta, Image.of(meta, header.bucket_bytes))
    # Whatever the error is, the other members must learn that this one takes no part.
    except Exception as error:
        raise _refused(group, f"cannot receive the trainer's broadcast: {error}") from error
    _go_on_if_all(group)


@dataclass
class Arriving:
    """A transfer that the trainer has announced.

    Attributes:
        fault: the reason why :meth:`end` must refuse the transfer, if any.
    """

    group: WeightGroup
    header: Header
    meta: WeightMeta
    image: Image
    fault: str | None = None
    _digests: list[bytes] = field(default_factory=list)

    def fill_image(self, content: Tensor) -> None:
        """Receive all tensors into ``content`` (host memory), at the offsets of :attr:`image`."""
        if self.group.device.type == "cpu":
            for _ in self._buckets(content):
                pass
            return
        try:
            for bucket, arrived in self._buckets():
                content[bucket.begin :][: bucket.size].copy_(arrived, non_blocking=True)
        finally:  # also on an error, because the memory may be freed then
            wait_for_copies({self.group.device})

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors on the group's device, each valid until the next."""
        large = None
        for bucket, arrived in self._buckets():
            for piece in bucket.pieces:
                spec = self.meta.tensors[piece.tensor]
                flat = arrived[piece.at :][: piece.size]
                if piece.size < spec.nbytes:
                    if large is None:
                        large = flat.new_empty(spec.nbytes)
                    large[piece.first :][: piece.size].copy_(flat)
                    if piece.first + piece.size < spec.nbytes:
                        continue
                    flat, large = large, None
                yield spec.name, as_tensor(flat, spec)
        for spec in self.meta.tensors:
            if not spec.nbytes:
                none = torch.empty(0, dtype=torch.uint8, device=self.group.device)
                yield spec.name, as_tensor(none, spec)

    def end(self) -> None:
        """Confirm the last byte, and wait until all members have confirmed it."""
        sent = DIGEST * len(self._digests)
        if self.header.has_digests and _received(self.group, sent) != b"".join(self._digests):
            self.fault = "their digests differ from the digests that the trainer sent"
        if self.fault is not None:
            raise _refused(self.group, f"refusing the received weights: {self.fault}")
        _go_on_if_all(self.group)

    def _buckets(self, into: Tensor | None = None) -> Iterator[tuple[Bucket, Tensor]]:
        """Yield arrived buckets. Without ``into``, each is valid only until the next bucket."""
        buckets = self.image.buckets
        most = max((bucket.size for bucket in buckets), default=0)
        ahead = AHEAD if into is not None else AT_A_TIME
        kept = [
            torch.empty(most, dtype=torch.uint8, device=self.group.device)
            for _ in buckets[:ahead]
            if into is None
        ]

        def begin(number: int, bucket: Bucket) -> tuple[Bucket, Tensor, Broadcasting]:
            room = kept[number % ahead] if into is None else into[bucket.begin :]
            memory = room[: bucket.size]
            return bucket, memory, self.group.broadcast(memory)

        rest = starmap(begin, enumerate(buckets))
        coming = deque(islice(rest, ahead))
        while coming:
            bucket, memory, broadcasting = coming.popleft()
            broadcasting.wait()
            if self.header.has_digests:
                self._digests.append(xxhash.xxh3_128_digest(bytes_of(memory.cpu())))
            yield bucket, memory
            coming.extend(islice(rest, 1))


def _refused(group: WeightGroup, why: str) -> BroadcastError:
    refused = BroadcastError(why)
    try:
        group.agree(ok=False)
    except BroadcastError as error:  # perhaps the others do not learn it; this member fails anyway
        refused.add_note(str(error))
    return refused


def _go_on_if_all(group: WeightGroup) -> None:
    if not group.agree(ok=True):
        raise BroadcastError(
            "another member of the weight group refuses the transfer. See the log of that "
            "member for the reason"
        )


def _received(group: WeightGroup, size: int) -> bytes:
    content = torch.empty(size, dtype=torch.uint8, device=group.device)
    group.broadcast(content).wait()
    return bytes(bytes_of(content.cpu()))


def _decoded(told: bytes | None, header: Header) -> WeightMeta:
    if told is None:
        raise BroadcastError("the trainer did not send the tensor list of the transfer")
    meta = WeightMeta.decode(told)
    if meta.digest != header.digest:
        raise BroadcastError(
            "the tensor list of the transfer differs from the announced tensor list"
        )
    for spec in meta.tensors:
        torch_dtype(spec.dtype)
    return meta


def as_tensor(flat: Tensor, spec: WeightSpec) -> Tensor:
    """View bytes as a tensor, without a copy."""
    return flat.view(torch_dtype(spec.dtype)).view(spec.shape)


@dataclass
class WeightReceiver:
    """Receives one transfer per call, together with all other members of the group.

    No tensor is sent before every receiver has accepted the names, dtypes and shapes. After an
    error the group is unusable: leave it. Not thread-safe.

    Attributes:
        meta: the list of tensors of the last transfer that began; at first, of an earlier one.
    """

    group: WeightGroup
    meta: WeightMeta | None = None

    def receive(self, fits: Callable[[WeightMeta], object]) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors, in host memory, once every receiver has confirmed the last byte.

        To refuse the tensors, ``fits`` must raise an error. The first ``next()`` waits for the
        whole transfer; a later ``next()`` cannot fail. The tensors are contiguous views of one
        block, as large as the model. The block is freed when the iterator and all tensors are gone.

        Raises:
            BroadcastError: a receiver has failed, or has refused the tensors. No tensor was
                yielded.
        """
        with self._greet() as arriving:
            fits(arriving.meta)
            memory = HostMemory(arriving.image.size, self.group.device)
        arriving.fill_image(memory.content)
        arriving.end()
        for offset, spec in zip(arriving.image.offsets, arriving.meta.tensors, strict=True):
            yield spec.name, as_tensor(memory.content[offset:][: spec.nbytes], spec)

    def receive_into(self, buffer: HostBuffer, fit: Callable[[WeightMeta], Fit]) -> list[Target]:
        """Receive new content for the engine's targets into a buffer; return these targets.

        ``fit`` returns the targets of the announced tensors, or raises an error to refuse them.
        After an error the buffer is closed, because bytes can still arrive in its memory.

        Raises:
            BroadcastError: see :meth:`receive`. Or two tensors of one target have different
                contents.
        """
        try:
            with self._greet() as arriving:
                fitted = fit(arriving.meta)
                content = buffer.lay_out(fitted.targets)
            specs = [(spec.name, whole_box(spec.shape)) for spec in arriving.meta.tensors]
            if [(target.name, target.box) for target in fitted.targets] == specs:
                arriving.fill_image(content)
            else:
                _receive_parts(arriving, fitted, buffer.views)
            arriving.end()
        except BaseException:
            buffer.close()
            raise
        return fitted.targets

    def fill(
        self, fit: Callable[[WeightMeta], Fit], changing: AbstractContextManager[object]
    ) -> None:
        """Fill the engine's targets in place, inside the context ``changing``.

        On return, the copies to all devices are complete.

        Raises:
            BroadcastError: see :meth:`receive`. No target was changed.
            EngineBrokenError: the transfer failed half-way. Some targets may have new content.
        """
        with self._greet() as arriving:
            found = fit(arriving.meta)
        with changing:
            try:
                _receive_parts(arriving, found, [target.tensor for target in found.targets])
                arriving.end()
            except Exception as error:
                raise EngineBrokenError(
                    f"a broadcast failed after it had changed some weights: {error}. Load a "
                    "version from the files"
                ) from error

    @contextmanager
    def _greet(self) -> Iterator[Arriving]:
        with greet(self.group, self.meta) as arriving:
            yield arriving
        self.meta = arriving.meta


@torch.inference_mode()  # as HostBuffer.copy
def _receive_parts(arriving: Arriving, found: Fit, views: Sequence[Tensor]) -> None:
    """Fill each target's view with its part of a tensor, and wait until all devices have it."""
    parts: dict[str, list[tuple[Target, Tensor]]] = {}
    for target, view in zip(found.targets, views, strict=True):
        parts.setdefault(target.name, []).append((target, view))
    tied = {other: parts[one] for one, other in found.unknown if one in parts}
    for name, whole in arriving.tensors():
        for target, view in parts.get(name, ()):
            view.copy_(target.of(whole))
        for target, view in () if name in parts else tied.get(name, ()):
            own = target.of(whole).to(view.device, view.dtype)
            if not torch.equal(_bytes(own), _bytes(view)):
                arriving.fault = differ(target.name, name, "the module")
    synchronize(views)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
