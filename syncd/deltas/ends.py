"""The two versions that a delta joins, and the chains that deltas make. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Final

import xxhash

from syncd.checkpoint.tensor_rules import ITEMSIZE, shown
from syncd.protocol.records import Delta, DeltaEnd, Manifest, TensorEntry

#: The most deltas of a chain. By default the daemon keeps 16.
LONGEST_CHAIN: Final = 64


class NoDeltaError(Exception):
    """Raised with the reason when a delta cannot be made or used.

    It says nothing about the two versions: read the full version.
    """


def in_order(manifest: Manifest) -> list[TensorEntry]:
    """The tensors of a version by name. A delta names a tensor by its number in this list."""
    return sorted(manifest.tensors, key=lambda tensor: tensor.name)


def content_of(manifest: Manifest) -> str | None:
    """The digest of all tensors of a version: xxh3-128, as 32 hexadecimal digits.

    It hashes lines of JSON in ASCII, one for each tensor in the order of the names (by code point):
    ``["name","dtype",[shape],"digest"]``, without spaces. File names, headers and small files are
    not hashed.

    Returns:
        None if a tensor has no digest.
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
    """A version as an end of deltas; None if it has no digests, or was never published."""
    content = content_of(manifest)
    if content is None or manifest.sequence == 0:
        return None
    return DeltaEnd(sequence=manifest.sequence, save_id=manifest.save_id, content=content)


def why_no_delta(base: Manifest, target: Manifest) -> str | None:
    """The reason why two versions can have no delta, as a clause; None if they can."""
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
                return f"version {one.sequence} has {shown(name)} and version {other.sequence} not"
    for name, new in after.items():
        old = before[name]
        if (old.dtype, old.shape) != (new.dtype, new.shape):
            return (
                f"{shown(name)} is {shown(old.dtype)} {list(old.shape)} in version {base.sequence} "
                f"and {shown(new.dtype)} {list(new.shape)} in version {target.sequence}"
            )
    return None


def elements_of(tensor: TensorEntry) -> int:
    """The elements of a tensor: 1 if it has rank 0."""
    return math.prod(tensor.shape)


def find_chain(deltas: Iterable[Delta], base: str, target: str) -> list[Delta] | None:
    """The deltas that lead from one content to another, with the fewest bytes in all.

    A chain has at most :data:`LONGEST_CHAIN` deltas: a reader opens two files of each, in the
    engine's process. Each delta goes from its own base's content to its own target's: sequence
    numbers may have gaps, and after a rollback a content may occur again.

    Args:
        deltas: those that exist, in any order.
        base: the content to begin with, as :func:`content_of` says it.
        target: the content to end with.

    Returns:
        The deltas in the order in which they are applied, none if both contents are equal; None if
        no chain leads there.
    """
    links: dict[str, list[Delta]] = {}
    for delta in deltas:
        links.setdefault(delta.base.content, []).append(delta)
    best: dict[str, tuple[int, list[Delta]]] = {base: (0, [])}
    nearer = dict(best)
    for _ in range(LONGEST_CHAIN):  # after each round, the best of all chains of so many deltas
        reached: dict[str, tuple[int, list[Delta]]] = {}
        for content, (size, chain) in nearer.items():
            for delta in links.get(content, ()):
                end, longer = delta.target.content, size + delta.bytes
                known = reached.get(end) or best.get(end)
                if known is None or longer < known[0]:
                    reached[end] = longer, [*chain, delta]
        best |= reached
        nearer = reached
    return best[target][1] if target in best else None


def why_no_chain(chain: Sequence[Delta], base: Manifest, target: Manifest) -> str | None:
    """The reason why a chain does not make one version of another, as a clause; None if it does."""
    why = why_no_delta(base, target)
    if why is not None:
        return why
    at = content_of(base)
    for delta in chain:
        if delta.base.content != at:
            return (
                f"the delta to version {delta.target.sequence} begins with other bytes than "
                "the chain has there"
            )
        at = delta.target.content
    if at != content_of(target):
        return f"the chain does not end with the bytes of version {target.sequence}"
    return None
