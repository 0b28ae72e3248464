"""The contents of a weight transfer, and its buckets of bytes. Pure, without torch.

All tensors lie end to end in one image, in the order of the meta, each beginning at a multiple of
:data:`ALIGNED` bytes. The image is cut into buckets; one broadcast moves one of them.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
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

#: Where a tensor begins in the image: a multiple of this, in bytes. More than any dtype needs.
ALIGNED: Final = 64
#: Bytes in a bucket, unless said otherwise.
BUCKET: Final = 256 * 1024 * 1024
#: Buckets that are packed, or looked at, at a time: one is, while the other is under way.
AT_A_TIME: Final = 2
#: Broadcasts under way at a time, where nothing is packed or looked at meanwhile.
AHEAD: Final = 8
#: The most bytes of a meta as text: of a million tensors it has about half of it.
META_LIMIT: Final = 256 * 1024 * 1024
#: Bytes of the digest of a meta, and of a bucket: xxh3-128.
DIGEST: Final = 16
#: Its last byte is the version of the format after it.
_MAGIC: Final = b"syncd-w\x01"
_HEADER: Final = struct.Struct("<8s16sQQ?")
#: Bytes of a header.
HEADER: Final = _HEADER.size


class Described(Protocol):
    """Anything with the name, dtype and shape of a tensor: an entry of a manifest, of a plan."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def dtype(self) -> str:
        """Safetensors' name of its dtype."""

    @property
    def shape(self) -> Shape:
        """Of the whole tensor."""


class WeightSpec(NamedTuple):
    """One tensor of a transfer.

    Attributes:
        name: as in a version that the same model is published as.
        dtype: safetensors' name.
        shape: of the whole tensor.
    """

    name: str
    dtype: str
    shape: Shape

    @property
    def nbytes(self) -> int:
        """Of the whole tensor."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]

    @property
    def digest(self) -> None:
        """As an entry of a manifest has it; of what has not arrived it is not known."""
        return None


@dataclass(frozen=True, slots=True)
class WeightMeta:
    """The names, dtypes and shapes of a transfer, in the order in which they travel."""

    tensors: tuple[WeightSpec, ...]

    @classmethod
    def of(cls, tensors: Iterable[Described]) -> Self:
        """Of tensors as a plan or a manifest describes them, in that order."""
        return cls(tuple(WeightSpec(one.name, one.dtype, one.shape) for one in tensors))

    @property
    def nbytes(self) -> int:
        """Of all tensors, without what lies between them."""
        return sum(one.nbytes for one in self.tensors)

    @property
    def digest(self) -> bytes:
        """16 bytes: equal where the same tensors travel in the same order."""
        return xxhash.xxh3_128_digest(self.encode())

    def encode(self) -> bytes:
        """As text: a JSON list of ``[name, dtype, [size, ...]]``."""
        return json.dumps(self.tensors, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, content: bytes) -> Self:
        """Parse the bytes that :meth:`encode` made, or anybody else.

        Raises:
            BroadcastError: it is not the meta of a transfer.
        """
        try:
            told = json.loads(content) if len(content) <= META_LIMIT else None
        except (ValueError, RecursionError) as error:
            raise BroadcastError(f"the meta of a transfer is no JSON: {error}") from error
        if not isinstance(told, list) or not 0 < len(told) <= TENSOR_LIMIT:
            raise BroadcastError("the meta of a transfer is no list of tensors")
        meta = cls(tuple(map(_spec, told)))
        if len({one.name for one in meta.tensors}) < len(meta.tensors):
            raise BroadcastError("the meta of a transfer has a name twice")
        if meta.nbytes >= NUMBER_LIMIT:
            raise BroadcastError("the meta of a transfer has an impossible number of bytes")
        return meta


def _spec(told: object) -> WeightSpec:
    if isinstance(told, list) and len(told) == 3:
        name, dtype, shape = told[0], told[1], shape_of(told[2])
        is_dtype = isinstance(dtype, str) and dtype in ITEMSIZE
        if name_fault(name) is None and is_dtype and shape is not None:
            return WeightSpec(name, dtype, shape)
        raise BroadcastError(f"the meta of a transfer: {shown(name)} is no tensor that can be sent")
    raise BroadcastError("the meta of a transfer has an entry that is no tensor")


class Header(NamedTuple):
    """The beginning of a transfer: :data:`HEADER` bytes, before anything else.

    Attributes:
        digest: of the meta.
        meta_bytes: of the meta as text.
        bucket_bytes: the image is cut into pieces of this size.
        has_digests: whether the buckets are followed by their digests.
    """

    digest: bytes
    meta_bytes: int
    bucket_bytes: int
    has_digests: bool

    @classmethod
    def of(cls, meta: WeightMeta, bucket_bytes: int, *, has_digests: bool) -> Self:
        """Of a transfer; of a bucket that could hold nothing, the least that can."""
        size = len(meta.encode())
        return cls(meta.digest, size, max(bucket_bytes, ALIGNED), has_digests)

    def encode(self) -> bytes:
        """As it travels."""
        return _HEADER.pack(_MAGIC, *self)

    @classmethod
    def decode(cls, content: bytes) -> Self:
        """Parse the bytes that :meth:`encode` made, or anybody else.

        Raises:
            BroadcastError: it is no header, or one of another syncd.
        """
        magic, *told = _HEADER.unpack(content)
        header = cls(*told)
        if magic != _MAGIC:
            raise BroadcastError(
                "the received bytes do not begin like a transfer: run the same version of syncd "
                "in the trainer and the explorers"
            )
        if not (0 < header.meta_bytes <= META_LIMIT and header.bucket_bytes >= ALIGNED):
            raise BroadcastError("the header of a transfer has impossible sizes")
        return header


class BucketPiece(NamedTuple):
    """Bytes of one tensor in a bucket.

    Attributes:
        tensor: its number in the meta.
        first: where they begin in the tensor, in bytes.
        at: where they begin in the bucket.
        size: how many.
    """

    tensor: int
    first: int
    at: int
    size: int


class Bucket(NamedTuple):
    """The bytes that one broadcast moves.

    Attributes:
        begin: where it begins in the image.
        size: in bytes.
        pieces: its content, in order.
    """

    begin: int
    size: int
    pieces: tuple[BucketPiece, ...]


@dataclass(frozen=True, slots=True)
class Image:
    """All tensors of a transfer, one after the other, and how they are cut.

    Attributes:
        offsets: where each tensor of the meta begins.
        size: of all, in bytes.
        buckets: in the order in which they travel. An empty tensor is in none.
    """

    offsets: tuple[int, ...]
    size: int
    buckets: tuple[Bucket, ...]

    @classmethod
    def of(cls, meta: WeightMeta, bucket_bytes: int) -> Self:
        """Cut a transfer into buckets.

        A tensor of a sixteenth of a bucket's limit, or more, has buckets of its own, one
        if that is enough: they are memory of the tensor itself, so nothing has to be packed.
        Smaller ones are packed together, into a quarter of a bucket's limit, because copying them
        costs less than as many broadcasts.

        Args:
            meta: of the transfer.
            bucket_bytes: the most in a bucket, at least :data:`ALIGNED`, and rounded down to a
                multiple of that.
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
    """A number of bytes, rounded up to a multiple of :data:`ALIGNED`."""
    return -(-size // ALIGNED) * ALIGNED
