"""The saves and deltas above LATEST, and the chain back from the pointer's save."""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from syncd.checkpoint.save import Delta, Remote, Save, SavedWeights, Unfinished
from syncd.checkpoint.tip_folder import TipRecord
from syncd.deltas.delta_index import DeltaRecord
from syncd.deltas.limits import LONGEST_CHAIN
from syncd.protocol.names import DELTA, SHARDS, TIP
from syncd.protocol.records import SaveId
from syncd.storage.errnos import REFUSED_HERE, Ignoring
from syncd.storage.fsio import Storage
from syncd.storage.job import OF_OTHERS, Job


@dataclass(frozen=True)
class DeltaSeen:
    """A delta on disk, from the save ``base`` to the save ``target``; or all of that save.

    ``sequence`` is that of its version to come. One whose record cannot be read has neither save.
    """

    sequence: int
    bytes: int
    base: str | None = None
    target: str = ""
    is_whole: bool = False


@dataclass(frozen=True)
class Chain:
    """The chain back from the pointer's save, newest first.

    Attributes:
        joins: True if deltas can lead along it from LATEST's version to the pointer's save.
        full: the newest save in it that can be merged, if any.
        is_seen: False if a save in it cannot be seen, perhaps only now.
    """

    saves: tuple[SavedWeights, ...] = ()
    joins: bool = False
    full: SavedWeights | None = None
    is_seen: bool = True


def look_at_delta(job: Job, sequence: int) -> DeltaSeen:
    """A delta on disk. No content of its folder causes an exception.

    Raises:
        OSError: storage does not answer, which says nothing about the delta.
    """
    folder, seen = job.layout.delta(sequence), DeltaSeen(sequence, 0)
    with Ignoring(REFUSED_HERE | {errno.ENOENT, errno.ENOTDIR}):  # a fold says why
        seen = replace(seen, bytes=_size(job.storage, folder))
        if delta := job.read(DeltaRecord, folder / DELTA, OF_OTHERS):
            seen = replace(seen, base=delta.base, target=delta.target)
        elif tip := job.read(TipRecord, folder / TIP, OF_OTHERS):
            size = _size(job.storage, folder / SHARDS)
            seen = DeltaSeen(sequence, size, target=tip.target, is_whole=True)
    return seen


def _size(storage: Storage, folder: Path) -> int:
    files = [storage.status(folder / name) for name in storage.names(folder)]
    return sum(file.st_size for file in files if file is not None)


def deltas_to_each(
    version: int, save_id: str | None, deltas: Iterable[DeltaSeen]
) -> dict[str, tuple[DeltaSeen, ...]]:
    """The deltas above a version that lead to each save, oldest first.

    They lead from the version's save, or begin with a whole save.
    """
    chains: dict[str, tuple[DeltaSeen, ...]] = {}
    # A delta comes after the delta to its base, so deltas from a save to itself are no loop.
    for delta in sorted(deltas, key=lambda delta: delta.sequence):
        if delta.sequence <= version:
            continue
        if delta.is_whole:
            chains[delta.target] = (delta,)  # the newest, because the trainer may have gone back
        elif delta.base and delta.target != save_id:
            before = () if delta.base == save_id else chains.get(delta.base)
            if before is not None:
                chains.setdefault(delta.target, (*before, delta))
    return chains


def chain_to(
    save: Save | None,
    known: Collection[str],
    refused: Collection[str],
    look: Callable[[int], Save],
) -> Chain:
    """Find the chain back from the pointer's save.

    Args:
        save: the pointer's save, if any.
        known: LATEST's save, and those to which deltas lead from it.
        refused: the saves that cannot be merged.
        look: finds the save in the folder of a step.
    """
    if save is None or isinstance(save, Unfinished | Remote):
        return Chain(is_seen=not isinstance(save, Unfinished))
    chain, is_seen = [save], True
    while chain[-1].identity not in known and (base := chain[-1].base) not in {None, *known}:
        if (saved := SaveId.parse(base or "")) is None:
            break
        earlier = look(saved.step)
        is_seen = earlier.identity == base and len(chain) < LONGEST_CHAIN
        if not is_seen or isinstance(earlier, Unfinished | Remote):
            break
        chain.append(earlier)
    joins = chain[-1].identity in known or chain[-1].base in known
    fulls = (one for one in chain if not isinstance(one, Delta) and one.identity not in refused)
    return Chain(tuple(chain), joins, next(fulls, None), is_seen)
