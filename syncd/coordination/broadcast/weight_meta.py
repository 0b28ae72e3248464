"""The contents of a weight transfer, and its buckets of bytes. Pure, without torch.

The *meta* lists the tensors of a transfer. The *image* holds all tensors, in the order of the meta;
each tensor begins at a multiple of :data:`ALIGNED` bytes. Each broadcast transfers one *bucket* of
the image.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable
from typing import Final, NamedTuple, Protocol, Self

import xxhash

from syncd.checkpoint.placement import Shape
from syncd.checkpoint.tensor_rules import (
    ITEMSIZE,
    NUMBER_LIMIT,
    TENSOR_LIMIT,
    name_fault,
    shape_of,
    shown,
)
from syncd.protocol.errors import BroadcastError

#: Alignment of tensors in the image, in bytes; more than any dtype needs.
ALIGNED: Final = 64
#: The default size of a bucket, in bytes.
BUCKET: Final = 256 * 1024 * 1024
#: Buckets in memory at a time: one is packed or checked while the other is transferred.
AT_A_TIME: Final = 2
#: Broadcasts in progress at a time, if nothing is packed or checked meanwhile.
AHEAD: Final = 8
#: The most bytes of an encoded meta; a million tensors take about 128 MiB.
META_LIMIT: Final = 256 * 1024 * 1024
#: Bytes of the digest of a meta, and of a bucket: xxh3-128.
DIGEST: Final = 16
#: The last byte is the version of the format that follows.
_MAGIC: Final = b"syncd-w\x01"
_HEADER: Final = struct.Struct("<8s16sQQ?")
#: Bytes of a header.
HEADER: Final = _HEADER.size


class Described(Protocol):
    """A tensor's name, dtype and shape, for example an entry of a manifest."""

    @property
    def name(self) -> str:
        """The tensor's name."""

    @property
    def dtype(self) -> str:
        """Safetensors' name of the dtype."""

    @property
    def shape(self) -> Shape:
        """The shape of the whole tensor."""


class WeightSpec(NamedTuple):
    """One tensor of a transfer, with its name in a published version."""

    name: str
    dtype: str
    shape: Shape

    @property
    def nbytes(self) -> int:
        """The tensor's number of bytes."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]

    @property
    def digest(self) -> None:
        """None, because a tensor's digest is unknown before its transfer."""
        return None


class WeightMeta(NamedTuple):
    """The tensors of a transfer, in the order of the transfer."""

    tensors: tuple[WeightSpec, ...]

    @classmethod
    def of(cls, tensors: Iterable[Described]) -> Self:
        """The meta of the tensors of a plan or a manifest."""
        return cls(tuple(WeightSpec(one.name, one.dtype, one.shape) for one in tensors))

    @property
    def nbytes(self) -> int:
        """The number of bytes in all tensors, without padding."""
        return sum(one.nbytes for one in self.tensors)

    @property
    def digest(self) -> bytes:
        """The xxh3-128 digest of :meth:`encode`, 16 bytes."""
        return xxhash.xxh3_128_digest(self.encode())

    def encode(self) -> bytes:
        """The meta as a JSON list of ``[name, dtype, [size, ...]]``."""
        return json.dumps(self.tensors, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, content: bytes) -> Self:
        """Parse untrusted bytes of :meth:`encode`; raise BroadcastError if they are no meta."""
        try:
            entries = json.loads(content) if len(content) <= META_LIMIT else None
        except (ValueError, RecursionError) as error:
            raise BroadcastError(f"the tensor list of a transfer is not JSON: {error}") from error
        if not isinstance(entries, list) or not 0 < len(entries) <= TENSOR_LIMIT:
            raise BroadcastError("the tensor list of a transfer is not a list of tensors")
        meta = cls(tuple(map(_spec, entries)))
        if len({tensor.name for tensor in meta.tensors}) < len(meta.tensors):
            raise BroadcastError("the tensor list of a transfer has the same tensor name twice")
        if meta.nbytes >= NUMBER_LIMIT:
            raise BroadcastError("the tensor list of a transfer has an impossible number of bytes")
        return meta


def _spec(entry: object) -> WeightSpec:
    if isinstance(entry, list) and len(entry) == 3:
        name, dtype, shape = entry[0], entry[1], shape_of(entry[2])
        is_dtype = isinstance(dtype, str) and dtype in ITEMSIZE
        if name_fault(name) is None and is_dtype and shape is not None:
            return WeightSpec(name, dtype, shape)
        raise BroadcastError(
            f"the tensor list of a transfer has {shown(name)} with an invalid name, dtype or shape"
        )
    raise BroadcastError("the tensor list of a transfer has an entry that is not a tensor")


class Header(NamedTuple):
    """The first :data:`HEADER` bytes of a transfer.

    Attributes:
        has_digests: True if the digests of the buckets follow the buckets.
    """

    digest: bytes
    meta_bytes: int
    bucket_bytes: int
    has_digests: bool

    @classmethod
    def of(cls, meta: WeightMeta, bucket_bytes: int, *, has_digests: bool) -> Self:
        """The header of a transfer; ``bucket_bytes`` become at least :data:`ALIGNED`."""
        size = len(meta.encode())
        return cls(meta.digest, size, max(bucket_bytes, ALIGNED), has_digests)

    def encode(self) -> bytes:
        """The header as bytes."""
        return _HEADER.pack(_MAGIC, *self)

    @classmethod
    def decode(cls, content: bytes) -> Self:
        """Parse untrusted bytes of :meth:`encode`; raise BroadcastError if they are no header."""
        magic, *fields = _HEADER.unpack(content)
        header = cls(*fields)
        if magic != _MAGIC:
            raise BroadcastError(
                "the received bytes do not begin like a transfer. Run the same version of syncd "
                "in the trainer and the explorers"
            )
        if not (0 < header.meta_bytes <= META_LIMIT and header.bucket_bytes >= ALIGNED):
            raise BroadcastError("the header of a transfer has impossible sizes")
        return header


class BucketPiece(NamedTuple):
    """A run of ``size`` bytes of one tensor in a bucket.

    Attributes:
        tensor: the tensor's index in the meta.
        first: the byte offset in the tensor.
        at: the byte offset in the bucket.
    """

    tensor: int
    first: int
    at: int
    size: int


class Bucket(NamedTuple):
    """The bytes that one broadcast transfers; ``begin`` is their offset in the image."""

    begin: int
    size: int
    pieces: tuple[BucketPiece, ...]


class Image(NamedTuple):
    """The image of a transfer, and its buckets.

    Attributes:
        offsets: the offset of each tensor of the meta, in bytes.
        buckets: the buckets in the order of the transfer. An empty tensor is in no bucket.
    """

    offsets: tuple[int, ...]
    size: int
    buckets: tuple[Bucket, ...]

    @classmethod
    def of(cls, meta: WeightMeta, bucket_bytes: int) -> Self:
        """Cut a transfer into buckets of at most ``bucket_bytes``.

        A tensor of at least ``bucket_bytes / 16`` has its own buckets, so it need not be packed.
        Smaller tensors are packed together into buckets of at most ``bucket_bytes / 4``, because
        packing costs less than one broadcast for each tensor.

        ``bucket_bytes`` must be at least :data:`ALIGNED`; it is rounded down to a multiple of that.
        """
        most = bucket_bytes // ALIGNED * ALIGNED
        packed, alone = max(most // 4, ALIGNED), most // 16
        offsets: list[int] = []
        buckets: list[Bucket] = []
        begin = at = 0
        pieces: list[BucketPiece] = []

        def close() -> None:
            nonlocal begin, pieces
            if pieces:
                size = pieces[-1].at + pieces[-1].size
                buckets.append(Bucket(begin, size, tuple(pieces)))
            begin, pieces = at, []

        for number, tensor in enumerate(meta.tensors):
            offsets.append(at)
            length = tensor.nbytes
            is_alone = length >= alone
            for first in range(0, length, most):
                size = min(most, length - first)
                if is_alone or at + size - begin > packed:
                    close()
                pieces.append(BucketPiece(number, first, at - begin, size))
                at += padded(size)
            if is_alone:
                close()
        close()
        return cls(tuple(offsets), at, tuple(buckets))


def padded(size: int) -> int:
    """Round a size up to a multiple of :data:`ALIGNED`."""
    return -(-size // ALIGNED) * ALIGNED
