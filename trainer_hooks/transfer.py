"""One outgoing transfer: the handshake, the buckets, and the confirmation of all receivers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
import xxhash
from torch import Tensor

from syncd.checkpoint.merging.plan import PlannedTensor
from syncd.checkpoint.tensor_rules import shown
from syncd.coordination.broadcast.weight_meta import (
    AHEAD,
    AT_A_TIME,
    Bucket,
    BucketPiece,
    Header,
    Image,
    WeightMeta,
)
from syncd.coordination.host_memory import HostMemory, wait_for_copies
from syncd.coordination.tensors import bytes_of
from syncd.protocol.errors import BroadcastError
from syncd.protocol.records import NonFinite
from trainer_hooks.state.finite import Looked
from trainer_hooks.state.gather import flat_bytes

if TYPE_CHECKING:
    from syncd.coordination.broadcast.group import Broadcasting, WeightGroup

#: The most bytes to copy to the host at a time for their digest.
_HASHED: Final = 16 * 1024 * 1024


class _Sending(NamedTuple):
    """A bucket that is being sent. If ``is_buffer``, later buckets reuse its memory."""

    memory: Tensor
    is_buffer: bool
    broadcasting: Broadcasting


@dataclass
class Outgoing:
    """Rank 0's side of one transfer. An error is kept until :meth:`end` raises it.

    ``tensors`` are in the order of the :meth:`put` calls.
    """

    group: WeightGroup
    tensors: Sequence[PlannedTensor]
    buffers: Buffers
    bucket_bytes: int
    has_digests: bool

    def __post_init__(self) -> None:
        self._meta = WeightMeta.of(self.tensors)
        self._header = Header.of(self._meta, self.bucket_bytes, has_digests=self.has_digests)
        self.image = Image.of(self._meta, self._header.bucket_bytes)
        self.error: BroadcastError | None = None
        self._fault: str | None = None
        self._pieces = ((bucket, one) for bucket in self.image.buckets for one in bucket.pieces)
        self._room = torch.empty(0)
        self._sources: set[torch.device] = set()
        self._under_way: deque[_Sending] = deque()
        self._digests: list[bytes] = []
        self._tied: dict[int, bytes] = {}
        self._looked = Looked()

    def greet(self) -> None:
        """Announce the tensors, and wait until all receivers are ready."""
        self._unless_failed(self._greet)

    def put(self, number: int, whole: Tensor) -> None:
        """Send the tensor with this number. It must not change before :meth:`end`."""
        self._unless_failed(lambda: self._put(number, flat_bytes(whole)))
        if whole.device.type in {"cpu", "cuda"}:  # other devices may lack aminmax for some dtype
            self._unless_failed(lambda: self._looked.add(self.tensors[number].name, whole))

    def compare(self, number: int, name: str, whole: Tensor) -> None:
        """Check that a tied tensor equals the tensor that was sent in its place."""
        self._unless_failed(lambda: self._compare(number, name, flat_bytes(whole)))

    def end(self) -> None:
        """Wait until all receivers have the last byte.

        Raises:
            BroadcastError: some receivers may lack some of the bytes.
        """
        self._unless_failed(self._end)
        if self.error is not None:
            raise self.error

    def nonfinite(self) -> NonFinite:
        """The tensors that were sent with NaN or Inf; call it once, after :meth:`end`."""
        wait_for_copies(self._looked.fetch())
        found = self._looked.nonfinite()
        return NonFinite.of([one.name for one in self.tensors if one.name in found])

    def _greet(self) -> None:
        self._say(self._header.encode())
        if not self.group.agree(ok=True):
            self._say(self._meta.encode())
        if not self.group.agree(ok=True):
            raise BroadcastError("an explorer cannot receive the weights. See the explorer's log")

    def _put(self, number: int, flat: Tensor) -> None:
        if self.tensors[number].copies:
            self._tied[number] = _digest(flat)
        for bucket, piece in self._pieces if flat.numel() else ():
            part = flat[piece.first :][: piece.size]
            if len(bucket.pieces) == 1 and part.device == self.group.device:
                self._send(part, is_buffer=False)
            else:
                self._pack(bucket, piece, part)
            if piece.first + piece.size == flat.numel():
                break
        if flat.numel() > self._header.bucket_bytes:
            self._wait_while(lambda: True)  # free this tensor before the next one is gathered

    def _compare(self, number: int, name: str, flat: Tensor) -> None:
        if _digest(flat) != self._tied[number]:
            self._fault = (
                f"{shown(name)} differs from {shown(self.tensors[number].name)}, but config.json "
                "has tie_word_embeddings. Tie these tensors, or set tie_word_embeddings to false"
            )

    def _end(self) -> None:
        self._wait_while(lambda: True)
        if self._header.has_digests:
            self._say(b"".join(self._digests))
        if not self.group.agree(self._fault is None):
            raise BroadcastError(
                self._fault or "an explorer did not receive the weights. See the explorer's log"
            )

    def _pack(self, bucket: Bucket, piece: BucketPiece, part: Tensor) -> None:
        if piece is bucket.pieces[0]:
            self._wait_while(lambda: sum(one.is_buffer for one in self._under_way) == AT_A_TIME)
            self._room = self.buffers.next(bucket.size, self.group.device, part.device)
            self._sources.clear()
        self._room[piece.at :][: piece.size].copy_(part, non_blocking=True)
        self._sources.add(part.device)
        if piece is bucket.pieces[-1]:
            if self.group.device.type == "cpu":
                wait_for_copies(self._sources)
            self._send(self._room, is_buffer=True)

    def _send(self, memory: Tensor, *, is_buffer: bool) -> None:
        """Send memory, which must not change until its broadcast has ended."""
        if self._header.has_digests:
            self._digests.append(_digest(memory))
        room = self._header.bucket_bytes - memory.numel()
        self._wait_while(
            lambda: (
                len(self._under_way) == AHEAD
                or sum(one.memory.numel() for one in self._under_way) > room
            )
        )
        self._under_way.append(_Sending(memory, is_buffer, self.group.broadcast(memory)))

    def _wait_while(self, true: Callable[[], bool]) -> None:
        """Wait for broadcasts, the oldest first, while the condition is true."""
        while self._under_way and true():
            self._under_way[0].broadcasting.wait()
            self._under_way.popleft()

    def _say(self, content: bytes) -> None:
        told = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(self.group.device)
        self.group.broadcast(told).wait()

    def _unless_failed(self, work: Callable[[], None]) -> None:
        """Keep an error until :meth:`end`, because the other ranks still gather."""
        if self.error is not None:
            return
        try:
            work()
        except BroadcastError as error:
            self.error = error
        except Exception as error:  # noqa: BLE001 - any error, because the other ranks gather
            self.error = BroadcastError(f"a transfer could not be sent: {error}")
            self.error.__cause__ = error


class Buffers:
    """Memory for two packed buckets, reused by later transfers."""

    def __init__(self) -> None:
        self._made: deque[_BucketBuffer] = deque()

    def next(self, size: int, device: torch.device, source: torch.device) -> Tensor:
        """Return ``size`` bytes on ``device``, for data from ``source``."""
        buffer = self._made.popleft() if len(self._made) == AT_A_TIME else None
        if buffer is None or buffer.like != (device, source.type) or buffer.size < size:
            buffer = _BucketBuffer(size, device, source)
        self._made.append(buffer)
        return buffer.content[:size]

    def close(self) -> None:
        """Release the buffers, except if torch is still sending them."""
        self._made.clear()


class _BucketBuffer:
    """Memory for a bucket; zeroed, because the gaps between tensors are sent, too."""

    def __init__(self, size: int, device: torch.device, source: torch.device) -> None:
        self.like = (device, source.type)
        self.size = size
        # Kept, because the memory stays pinned only as long as this object exists.
        self._memory = HostMemory(size, source) if device.type == "cpu" else None
        self.content = (
            torch.zeros(size, dtype=torch.uint8, device=device)
            if self._memory is None
            else self._memory.content.zero_()
        )


def _digest(flat: Tensor) -> bytes:
    hasher = xxhash.xxh3_128()
    for part in torch.split(flat, _HASHED):
        hasher.update(bytes_of(part.cpu()))
    return hasher.digest()
