"""The links above LATEST, and the way back from the pointer's save."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace

from syncd.checkpoint.save import Links, Remote, Save, SavedWeights, Unfinished
from syncd.deltas.limits import LONGEST_CHAIN
from syncd.deltas.link_index import LinkRecord
from syncd.protocol.names import DELTA
from syncd.protocol.records import SaveId
from syncd.storage.job import OF_OTHERS, Job


@dataclass(frozen=True)
class LinkSeen:
    """A link on disk, from the save ``base`` to the save ``target``.

    ``sequence`` is that of its version to come. One whose record cannot be read has neither save.
    """

    sequence: int
    bytes: int
    base: str | None = None
    target: str = ""


@dataclass(frozen=True)
class Way:
    """The way back from the pointer's save, newest first.

    Attributes:
        joins: True if links can lead along the way from LATEST's version to the pointer's save.
        full: the newest save on the way that can be merged, if any.
        is_seen: False if a save on the way cannot be seen, perhaps only now.
    """

    saves: tuple[SavedWeights, ...] = ()
    joins: bool = False
    full: SavedWeights | None = None
    is_seen: bool = True


def look_at_link(job: Job, sequence: int) -> LinkSeen:
    """A link on disk. No content of its folder causes an exception."""
    folder, seen = job.layout.link(sequence), LinkSeen(sequence, 0)
    with suppress(OSError):  # a fold says why
        files = [job.storage.status(folder / name) for name in job.storage.names(folder)]
        seen = replace(seen, bytes=sum(file.st_size for file in files if file is not None))
        if link := job.read(LinkRecord, folder / DELTA, OF_OTHERS):
            seen = replace(seen, base=link.base, target=link.target)
    return seen


def chains_from(
    version: int, save_id: str | None, links: Iterable[LinkSeen]
) -> dict[str, tuple[LinkSeen, ...]]:
    """The links above a version that lead from its save to each other save, oldest first."""
    chains: dict[str, tuple[LinkSeen, ...]] = {}
    # A link comes after the link to its base, so links from a save to itself are no loop.
    for link in sorted(links, key=lambda link: link.sequence):
        if link.base and link.sequence > version and link.target != save_id:
            before = () if link.base == save_id else chains.get(link.base)
            if before is not None:
                chains.setdefault(link.target, (*before, link))
    return chains


def way_back(
    save: Save | None,
    known: Collection[str],
    refused: Collection[str],
    look: Callable[[int], Save],
) -> Way:
    """Find the way back from the pointer's save.

    Args:
        save: the pointer's save, if any.
        known: LATEST's save, and those to which links lead from it.
        refused: the saves that cannot be merged.
        look: finds the save in the folder of a step.
    """
    if save is None or isinstance(save, Unfinished | Remote):
        return Way(is_seen=not isinstance(save, Unfinished))
    way, is_seen = [save], True
    while way[-1].identity not in known and (base := way[-1].base) not in {None, *known}:
        if (saved := SaveId.parse(base or "")) is None:
            break
        earlier = look(saved.step)
        is_seen = earlier.identity == base and len(way) < LONGEST_CHAIN
        if not is_seen or isinstance(earlier, Unfinished | Remote):
            break
        way.append(earlier)
    joins = way[-1].identity in known or way[-1].base in known
    fulls = (one for one in way if not isinstance(one, Links) and one.identity not in refused)
    return Way(tuple(way), joins, next(fulls, None), is_seen)
