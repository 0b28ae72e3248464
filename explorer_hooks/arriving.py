"""One transfer on its way in: the handshake, the buckets, and the word of all that it is here."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import torch
import xxhash
from torch import Tensor

from syncd.coordination.host_memory import wait_for_copies
from syncd.coordination.tensors import bytes_of, torch_dtype
from syncd.coordination.weight_meta import (
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
from syncd.protocol.errors import BroadcastError

if TYPE_CHECKING:
    from syncd.coordination.broadcast import Broadcasting, WeightGroup

T = TypeVar("T")


def greet(
    group: WeightGroup, known: WeightMeta | None, prepare: Callable[[WeightMeta, Image], T]
) -> Arriving[T]:
    """Learn what will be sent, and make ready for it; all members have when this returns.

    Args:
        group: in which a transfer begins.
        known: the meta of one before, which need not be sent again.
        prepare: makes ready for what it is told will come, or raises: then nothing is sent.

    Raises:
        BroadcastError: it cannot be taken, here or elsewhere, or the group has failed.
    """
    header = Header.decode(_told(group, HEADER))
    meta = known if known is not None and known.digest == header.digest else None
    told = None if group.agree(meta is not None) else _told(group, header.meta_bytes)
    try:
        meta = meta or _decoded(told, header)
        image = Image.of(meta, header.bucket_bytes)
        arriving = Arriving(group, header, meta, image, prepare(meta, image))
    # Whatever it is, the others must know that this one is not with them.
    except Exception as error:
        raise _refused(group, f"what the trainer sends cannot be taken: {error}") from error
    _go_on_if_all(group)
    return arriving


class _UnderWay(NamedTuple):
    """A bucket that arrives, and its memory."""

    bucket: Bucket
    memory: Tensor
    broadcasting: Broadcasting


class Arriving(Generic[T]):
    """One transfer, from the end of its handshake on.

    Args:
        group: that it comes by.
        header, meta, image: what comes.
        prepared: what the receiver has made for it.

    Attributes:
        fault: why it will be refused though it has arrived; None while all is well.
    """

    def __init__(
        self, group: WeightGroup, header: Header, meta: WeightMeta, image: Image, prepared: T
    ) -> None:
        self.header = header
        self.meta = meta
        self.image = image
        self.prepared = prepared
        self.fault: str | None = None
        self._group = group
        self._digests: list[bytes] = []

    def fill_image(self, content: Tensor) -> None:
        """Receive all of it into one block of host memory, which is laid out as the image is."""
        if self._group.device.type == "cpu":
            for _ in self._buckets(content):
                pass
            return
        try:
            for bucket, arrived in self._buckets():
                content[bucket.begin :][: bucket.size].copy_(arrived, non_blocking=True)
        finally:  # also on an error: the memory may be let go then
            wait_for_copies({self._group.device})

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Each whole tensor when it has arrived, on the group's device; valid until the next."""
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
                none = torch.empty(0, dtype=torch.uint8, device=self._group.device)
                yield spec.name, as_tensor(none, spec)

    def end(self) -> None:
        """Say that the last byte is here, and hear it of all others.

        Raises:
            BroadcastError: it is not, or not everywhere.
        """
        if self.header.has_digests:
            told = _told(self._group, DIGEST * len(self._digests))
            if told != b"".join(self._digests):
                self.fault = "it is not what the trainer says that it has sent"
        if self.fault is not None:
            raise _refused(self._group, f"what has arrived is not taken: {self.fault}")
        _go_on_if_all(self._group)

    def _buckets(self, into: Tensor | None = None) -> Iterator[tuple[Bucket, Tensor]]:
        """Each bucket when it has arrived; without ``into`` it is valid until the next one.

        Args:
            into: memory of the whole image, on the group's device.
        """
        buckets = self.image.buckets
        most = max((bucket.size for bucket in buckets), default=0)
        ahead = AHEAD if into is not None else AT_A_TIME
        kept = [
            torch.empty(most, dtype=torch.uint8, device=self._group.device)
            for _ in buckets[:ahead]
            if into is None
        ]

        def begin(number: int) -> _UnderWay:
            bucket = buckets[number]
            room = kept[number % ahead] if into is None else into[bucket.begin :]
            memory = room[: bucket.size]
            return _UnderWay(bucket, memory, self._group.broadcast(memory))

        coming = deque(begin(number) for number in range(min(ahead, len(buckets))))
        for number in range(len(buckets)):
            one = coming.popleft()
            one.broadcasting.wait()
            if self.header.has_digests:
                self._digests.append(xxhash.xxh3_128_digest(bytes_of(one.memory.cpu())))
            yield one.bucket, one.memory
            if number + ahead < len(buckets):
                coming.append(begin(number + ahead))


def _refused(group: WeightGroup, why: str) -> BroadcastError:
    """Say that all is not well here."""
    refused = BroadcastError(why)
    try:
        group.agree(ok=False)
    except BroadcastError as error:  # what the others do now is not known, and changes nothing
        refused.add_note(str(error))
    return refused


def _go_on_if_all(group: WeightGroup) -> None:
    """Say that all is well here, and return only where it is everywhere."""
    if not group.agree(ok=True):
        raise BroadcastError(
            "another member of the weight group refuses the transfer: its own log says why"
        )


def _told(group: WeightGroup, size: int) -> bytes:
    """So many bytes that rank 0 says."""
    content = torch.empty(size, dtype=torch.uint8, device=group.device)
    group.broadcast(content).wait()
    return bytes(bytes_of(content.cpu()))


def _decoded(told: bytes | None, header: Header) -> WeightMeta:
    """The meta that a header announced.

    Raises:
        BroadcastError: it is not; or all others have it, and this one has not.
        EngineMismatchError: it has a dtype that this torch has not.
    """
    if told is None:
        raise BroadcastError("the meta of the transfer was not sent")
    meta = WeightMeta.decode(told)
    if meta.digest != header.digest:
        raise BroadcastError("the meta of the transfer is not the one that was announced")
    for spec in meta.tensors:
        torch_dtype(spec.dtype)
    return meta


def as_tensor(flat: Tensor, spec: WeightSpec) -> Tensor:
    """Bytes as the tensor that they are; no copy."""
    return flat.view(torch_dtype(spec.dtype)).view(spec.shape)
