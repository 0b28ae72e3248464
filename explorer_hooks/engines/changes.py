"""Find the elements in which two versions differ, and write only these elements into tensors.

Both versions are read and compared. The positions in a delta are not used, because nothing would
detect an element that a delta left out.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from explorer_hooks.engines.in_place import cut_box, is_plain, synchronize
from explorer_hooks.engines.targets import Target
from explorer_hooks.reader import LeasedVersion
from explorer_hooks.weights import WeightsReader
from syncd.checkpoint.boxes import Box
from syncd.checkpoint.parallel import Check, run_side_by_side, threads_here
from syncd.checkpoint.version import read_manifest
from syncd.coordination.tensors import bytes_of
from syncd.protocol.errors import SyncdError
from syncd.protocol.records import TensorEntry

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: The most bytes of changed values and their positions, as a fraction of the targets' bytes.
_MOST: Final = 0.5
#: Maps the size of a value in bytes to the integer types that values are compared and copied as.
_BITS: Final = {
    1: (np.uint8, torch.uint8),
    2: (np.int16, torch.int16),
    4: (np.int32, torch.int32),
    8: (np.int64, torch.int64),
}
_CPU: Final = torch.device("cpu")


class CannotCompareError(Exception):
    """Two versions cannot be compared, or differ in too many elements."""


class Change(NamedTuple):
    """The changed elements of one target.

    Attributes:
        positions: int64, ascending: the index of each changed element in the flattened target.
        values: the new values in the target's dtype, as integers with the same bits.
    """

    positions: Tensor
    values: Tensor


class Changes(NamedTuple):
    """The changes of each target, and the numbers of changed and of all elements."""

    each: list[Change]
    changed: int
    elements: int


def find_changes(
    base: LeasedVersion, version: LeasedVersion, targets: Sequence[Target], threads: int
) -> Changes:
    """Compare the parts of two versions that fill the targets.

    The targets must hold ``base``, and are not read. ``version`` must be verified.

    Raises:
        CannotCompareError: ``base`` was deleted, its tensors do not match, or too many elements
            differ.
        VerificationError, ShardFormatError, OSError: ``version`` cannot be read.
    """
    told = {entry.name: entry for entry in version.manifest.tensors}
    before = {entry.name: entry for entry in base.manifest.tensors}
    for target in targets:
        _check_alike(before.get(target.name), told[target.name], base)
    room = _Room(int(_MOST * sum(target.nbytes for target in targets)))
    with WeightsReader(base) as old, WeightsReader(version) as new:
        differing = [
            (number, box)
            for number, target in enumerate(targets)
            if before[target.name].digest is None
            or before[target.name].digest != told[target.name].digest
            for box in cut_box(target.box, target.dtype.itemsize)
        ]
        names = {targets[number].name for number, _ in differing}
        new.open(names)
        try:
            # If the job was deleted and created again, the folder may hold another version.
            if read_manifest(base.storage, base.folder) != base.manifest:
                raise CannotCompareError(f"{base.folder} now holds another version")
            old.open(names)
        except (OSError, SyncdError) as error:
            raise CannotCompareError(f"{base.folder} cannot be read any more: {error}") from error
        tasks = [
            partial(_compare, old, new, targets[number], box, room) for number, box in differing
        ]
        compared = run_side_by_side(tasks, threads=threads_here(threads), look=lambda: None)
    found: list[list[Change]] = [[] for _ in targets]
    for (number, _), change in zip(differing, compared, strict=True):
        found[number].append(change)
    each = [_joined(target, parts) for target, parts in zip(targets, found, strict=True)]
    count = sum(change.positions.numel() for change in each)
    return Changes(each, count, sum(target.box.size for target in targets))


@torch.no_grad()
def write_changes(targets: Sequence[Target], changes: Changes) -> None:
    """Write changes into the targets, and wait until every device has the changes.

    ``targets`` must be those of :func:`find_changes`, and must still hold its ``base``.
    """
    devices = {target.tensor.device for target in targets} - {_CPU}
    synchronize(devices)
    for target, (positions, values) in zip(targets, changes.each, strict=True):
        if not positions.numel():
            continue
        bits, as_torch = _BITS[target.tensor.dtype.itemsize]
        if is_plain(target._replace(dtype=target.tensor.dtype)):
            np.frombuffer(bytes_of(target.tensor), bits)[positions.numpy()] = values.numpy()
            continue
        device = target.tensor.device
        here = positions.to(device, non_blocking=True), values.to(device, non_blocking=True)
        whole = target.tensor.view(as_torch)
        if whole.is_contiguous():
            whole.view(-1).index_copy_(0, *here)
        else:
            whole.index_put_(torch.unravel_index(here[0], whole.shape), here[1])
    synchronize(devices)


def _check_alike(before: TensorEntry | None, now: TensorEntry, base: LeasedVersion) -> None:
    if before is None or (before.dtype, before.shape) != (now.dtype, now.shape):
        raise CannotCompareError(
            f"version {base.sequence} has tensors with other names, shapes or dtypes than the new "
            "version"
        )


class _Room:
    def __init__(self, size: int) -> None:
        self._left = size
        self._lock = threading.Lock()

    def take(self, size: int) -> None:
        with self._lock:
            self._left -= size
            if self._left < 0:
                raise CannotCompareError("too many elements differ")


def _compare(
    old: WeightsReader, new: WeightsReader, target: Target, box: Box, room: _Room, check: Check
) -> Change:
    bits, _ = _BITS[target.dtype.itemsize]
    one, other = np.empty(box.size, bits), np.empty(box.size, bits)
    try:
        _read(old, target.name, box, one, check)
    except (OSError, SyncdError) as error:
        raise CannotCompareError(f"the base version cannot be read any more: {error}") from error
    _read(new, target.name, box, other, check)
    positions = np.flatnonzero(one != other)
    values = torch.from_numpy(other[positions]).view(target.dtype).to(target.tensor.dtype)
    room.take(positions.nbytes + values.nbytes)
    return Change(torch.from_numpy(positions + _ahead(target.box, box)), _as_bits(values))


def _read(
    reader: WeightsReader, name: str, box: Box, into: NDArray[np.integer], check: Check
) -> None:
    for span in reader.spans(name, box, into.view(np.uint8).data):
        check()
        span.read()


def _as_bits(values: Tensor) -> Tensor:
    return values.view(_BITS[values.dtype.itemsize][1])


def _ahead(box: Box, part: Box) -> int:
    """Count the elements of a box before ``part``, which must be a slice of whole rows."""
    if not box.size or not box.shape:
        return 0
    return (part.offsets[0] - box.offsets[0]) * (box.size // box.shape[0])


def _joined(target: Target, parts: Sequence[Change]) -> Change:
    bits = _BITS[target.tensor.dtype.itemsize][1]
    positions = torch.cat([torch.empty(0, dtype=torch.int64), *(part.positions for part in parts)])
    values = torch.cat([torch.empty(0, dtype=bits), *(part.values for part in parts)])
    if target.tensor.device.type == "cuda":
        return Change(positions.pin_memory(), values.pin_memory())
    return Change(positions, values)
