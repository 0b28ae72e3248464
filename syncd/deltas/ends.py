"""The two ends of a delta, called base and target. No I/O."""

from __future__ import annotations

import json
import math
from typing import Final

import xxhash

from syncd.checkpoint.tensor_rules import ITEMSIZE, shown
from syncd.protocol.records import DeltaEnd, Manifest, TensorEntry

#: The most links in a chain.
LONGEST_CHAIN: Final = 64


class NoDeltaError(Exception):
    """Raised when a delta cannot be made or used; the message has the reason.

    The version itself can still be whole: the caller should read it without the delta.
    """


def in_order(manifest: Manifest) -> list[TensorEntry]:
    """The tensors of a version, sorted by name. A delta refers to them by index in this list."""
    return sorted(manifest.tensors, key=lambda tensor: tensor.name)


def content_of(manifest: Manifest) -> str | None:
    """The digest of all tensors of a version: xxh3-128, as 32 hexadecimal digits.

    The hashed text is one line of ASCII JSON for each tensor, sorted by name (by code point):
    ``["name","dtype",[shape],"digest"]``, without spaces. The result is None if a tensor has no
    digest.
    """
    hasher = xxhash.xxh3_128()
    for tensor in in_order(manifest):
        if tensor.digest is None:
            return None
        line = json.dumps(
            (tensor.name, tensor.dtype, tensor.shape, tensor.digest), separators=(",", ":")
        )
        hasher.update(line.encode() + b"\n")
    return hasher.hexdigest()


def delta_end(manifest: Manifest) -> DeltaEnd | None:
    """A version as an end of a delta; None if it has no digests, or was never published."""
    content = content_of(manifest)
    if content is None or manifest.sequence == 0:
        return None
    return DeltaEnd(sequence=manifest.sequence, save_id=manifest.save_id, content=content)


def why_no_delta(base: Manifest, target: Manifest) -> str | None:
    """The reason, as a clause, why no delta is possible; None if it is possible."""
    for manifest in (base, target):
        which = f"version {manifest.sequence}"
        if manifest.kind != "full":
            return f"{which} is of kind {manifest.kind}"
        if manifest.sequence == 0:
            return f"the folder of save {shown(manifest.save_id)} was never published"
        if manifest.digests == "off" or any(t.digest is None for t in manifest.tensors):
            return f"{which} has no digests"
        if len({tensor.name for tensor in manifest.tensors}) != len(manifest.tensors):
            return f"the manifest of {which} names a tensor twice"
    for tensor in target.tensors:
        if tensor.dtype not in ITEMSIZE:
            return f"the dtype {shown(tensor.dtype)} of {shown(tensor.name)} is unknown"
    return _unlike(base, target)


def _unlike(base: Manifest, target: Manifest) -> str | None:
    before = {tensor.name: tensor for tensor in base.tensors}
    after = {tensor.name: tensor for tensor in target.tensors}
    for these, those, one, other in ((after, before, target, base), (before, after, base, target)):
        for name in these:
            if name not in those:
                return (
                    f"version {one.sequence} has the tensor {shown(name)}, but version "
                    f"{other.sequence} does not"
                )
    for name, new in after.items():
        old = before[name]
        if (old.dtype, old.shape) != (new.dtype, new.shape):
            return (
                f"{shown(name)} is {shown(old.dtype)} {list(old.shape)} in version "
                f"{base.sequence}, but {shown(new.dtype)} {list(new.shape)} in version "
                f"{target.sequence}"
            )
    return None


def elements_of(tensor: TensorEntry) -> int:
    """The number of elements of a tensor; 1 for a tensor of rank 0."""
    return math.prod(tensor.shape)
