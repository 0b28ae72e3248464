"""Copies on this host from which deltas can make a version, and the wait for a delta."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from explorer_hooks.staged_copy import StagedCopy, hold
from syncd.checkpoint.version import read_manifest
from syncd.deltas.ends import NoDeltaError, content_of, find_chain
from syncd.deltas.making import why_not_here
from syncd.deltas.whole_version import WholeVersion
from syncd.protocol.errors import RecordError
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import DELTA, parse_delta_folder
from syncd.protocol.records import Delta, Latest
from syncd.protocol.reports import DELTA_SIGN, DeltaProgress
from syncd.storage.fsio import Storage
from syncd.storage.job import Job
from syncd.storage.record_files import OF_OTHERS

if TYPE_CHECKING:
    from syncd.coordination.leased_version import LeasedVersion

log = logging.getLogger(__name__)
#: A chain of deltas with more than this part of a version's bytes is not read.
_MOST: Final = 0.5
#: Seconds between two looks at a delta that is being made.
_LOOK: Final = 0.25
#: Seconds without a sign of life after which nobody waits for a delta any more.
_SILENCE: Final = 10 * DELTA_SIGN


@dataclass(frozen=True, slots=True)
class DeltaBase:
    """A held copy on this host, and the deltas that make a newer version from it.

    Attributes:
        copy: the hold on the copy.
        version: the copy as a version.
        chain: the deltas in order, each with its folder.
    """

    copy: StagedCopy
    version: WholeVersion
    chain: tuple[tuple[Path, Delta], ...]

    @property
    def bytes(self) -> int:
        """The bytes of the deltas."""
        return sum(delta.bytes for _, delta in self.chain)

    def make(
        self, target: LeasedVersion, to: Storage, draft: Path, cancel: Callable[[], None]
    ) -> None:
        """Make the target's files, except the manifest, in an empty folder, and verify them.

        Raises:
            NoDeltaError: the deltas do not make this version from this copy.
            VerificationError: the target's own folder is not what its manifest says.
            OSError: one of the two storages failed.
        """
        # NumPy is imported once there is a delta to apply.
        from syncd.deltas.applying import Link, apply_chain  # noqa: PLC0415

        apply_chain(
            target.storage,
            WholeVersion(target.folder, target.manifest),
            [Link(*link) for link in self.chain],
            self.version,
            to=to,
            draft=draft,
            cancel=cancel,
        )


class DeltaBases:
    """The copies in one folder of this host, as bases of deltas.

    Args:
        storage: the storage of the copies.
        room: the folder of the copies.
    """

    def __init__(self, storage: Storage, room: Path) -> None:
        self._storage = storage
        self._room = room
        self._known: dict[str, WholeVersion] = {}

    def find(
        self,
        target: LeasedVersion,
        names: Collection[str],
        *,
        patience: float,
        cancel: Callable[[], None],
    ) -> DeltaBase:
        """Hold the copy from which the fewest bytes of deltas lead to a version.

        If the daemon is making a delta from a copy on this host, it waits for that delta.

        Args:
            target: the held version, of kind ``full``.
            names: the names of the copies.
            patience: how long to wait for a delta, in seconds.
            cancel: called often; it raises to stop.

        Raises:
            NoDeltaError: there is none; the message has the reason.
            OSError: one of the two storages failed.
        """
        why = why_not_here()
        content = content_of(target.manifest)
        if why is None and content is None:
            why = f"version {target.sequence} has no digests"
        if why is not None or content is None:
            raise NoDeltaError(why or "")
        here = self._look(names)
        if not here:
            raise NoDeltaError("this host has no copy of an older version")
        chain = self._chain(target, here, content)
        if chain is None:
            self._wait(target, here, patience, cancel)
            chain = self._chain(target, here, content)
        if chain is None:
            raise NoDeltaError(f"no delta leads from a copy on this host to {target.folder.name}")
        name, links = chain
        size = sum(delta.bytes for _, delta in links)
        whole = sum(file.size for file in target.manifest.files)
        if size > _MOST * whole:
            raise NoDeltaError(f"its deltas have {size} bytes, and the whole version {whole}")
        copy = hold(self._storage, self._room / name)
        if copy is None:
            raise NoDeltaError(f"{self._room / name} was removed")
        return DeltaBase(copy, here[name], tuple(links))

    def _look(self, names: Collection[str]) -> dict[str, WholeVersion]:
        """The copies by name; their manifests do not change, so each is read once."""
        for name in names:
            if name not in self._known:
                folder = self._room / name
                try:
                    self._known[name] = WholeVersion(folder, read_manifest(self._storage, folder))
                except (RecordError, OSError) as error:
                    log.debug("%s is no base of a delta: %s", folder, error)
        self._known = {name: one for name, one in self._known.items() if name in names}
        return self._known

    def _chain(
        self, target: LeasedVersion, here: dict[str, WholeVersion], content: str
    ) -> tuple[str, list[tuple[Path, Delta]]] | None:
        """The copy with the fewest bytes of deltas to the target, with these deltas."""
        folders = {delta: folder for folder, delta in _deltas(_job_of(target))}
        found = []
        for name, version in here.items():
            base = content_of(version.manifest)
            chain = find_chain(folders, base, content) if base is not None else None
            if chain is not None:
                found.append((sum(delta.bytes for delta in chain), name, chain))
        if not found:
            return None
        _, name, chain = min(found, key=lambda one: one[:2])
        return name, [(folders[delta], delta) for delta in chain]

    def _wait(
        self,
        target: LeasedVersion,
        here: dict[str, WholeVersion],
        patience: float,
        cancel: Callable[[], None],
    ) -> None:
        """If a delta from a copy here to the target is being made, wait until it is there.

        Raises:
            NoDeltaError: there will be none, or not in time.
        """
        job = _job_of(target)
        latest = job.read(Latest, job.layout.latest, OF_OTHERS)
        which = f"the delta to version {target.sequence}"
        if latest is None or latest.sequence != target.sequence or latest.delta_from is None:
            raise NoDeltaError(f"the daemon makes no delta to version {target.sequence}")
        if latest.delta_from not in {one.manifest.sequence for one in here.values()}:
            raise NoDeltaError(
                f"{which} leads from version {latest.delta_from}, which is not on this host"
            )
        begun = alive = time.monotonic()
        sign: DeltaProgress | None = None
        while True:
            cancel()
            told = job.read(DeltaProgress, job.layout.delta_progress, OF_OTHERS)
            if told is not None and told.sequence >= target.sequence:
                if told.sequence > target.sequence:
                    raise NoDeltaError(
                        f"{which} was given up: the daemon makes the one to version {told.sequence}"
                    )
                if told.state == "made":
                    return
                if told.state == "none":
                    raise NoDeltaError(f"{which} was not made: {told.why}")
            now = time.monotonic()
            if told != sign:
                sign, alive = told, now
            if now >= alive + _SILENCE:
                raise NoDeltaError(f"{which} has shown no sign of life for {_SILENCE:g} s")
            if now >= begun + patience:
                raise NoDeltaError(f"{which} was not made within {patience:.1f} s")
            time.sleep(min(_LOOK, max(begun + patience - now, 0.01)))


def delta_folders(target: LeasedVersion, base: str) -> list[Path]:
    """The deltas that lead to a version from weights with a digest, in order; empty if none do.

    Args:
        target: held; of kind ``full``.
        base: the digest of all tensors (:func:`~syncd.deltas.ends.content_of`).

    Raises:
        OSError: storage failed.
    """
    content = content_of(target.manifest)
    folders = {delta: folder for folder, delta in _deltas(_job_of(target))}
    chain = find_chain(folders, base, content) if content is not None else None
    if chain is None or sum(one.bytes for one in chain) > _MOST * sum(
        file.size for file in target.manifest.files
    ):
        return []
    return [folders[one] for one in chain]


def _job_of(target: LeasedVersion) -> Job:
    return Job(target.storage, JobLayout(target.source.parent.parent))


def _deltas(job: Job) -> Iterator[tuple[Path, Delta]]:
    """The job's deltas that can be read; each may be deleted at any time."""
    for name in job.storage.names(job.layout.deltas):
        if parse_delta_folder(name) is not None:
            folder = job.layout.deltas / name
            delta = job.read(Delta, folder / DELTA, OF_OTHERS)
            if delta is not None:
                yield folder, delta
