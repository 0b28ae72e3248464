"""Find a copy on this host that deltas can turn into a newer version."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from explorer_hooks.staged_copy import StagedCopy, hold
from syncd.checkpoint.version import read_manifest
from syncd.deltas.ends import NoDeltaError, content_of, delta_end, find_chain
from syncd.deltas.making import why_not_here
from syncd.deltas.whole_version import WholeVersion
from syncd.protocol.errors import RecordError
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import DELTA, parse_delta_folder
from syncd.protocol.records import Delta
from syncd.storage.errnos import is_gone
from syncd.storage.fsio import Storage
from syncd.storage.job import OF_OTHERS, Job

if TYPE_CHECKING:
    from syncd.coordination.leased_version import LeasedVersion

log = logging.getLogger(__name__)
#: Deltas are not read if they have more than this fraction of the version's bytes.
_MOST: Final = 0.5


@dataclass(frozen=True, slots=True)
class DeltaBase:
    """A held copy on this host, and the deltas, in order, that make a newer version from it."""

    copy: StagedCopy
    version: WholeVersion
    chain: tuple[tuple[Path, Delta], ...]

    @property
    def bytes(self) -> int:
        """The size of all deltas, in bytes."""
        return sum(delta.bytes for _, delta in self.chain)

    def make(
        self, target: LeasedVersion, to: Storage, draft: Path, cancel: Callable[[], None]
    ) -> None:
        """Make and verify the target's files, except the manifest, in the empty folder ``draft``.

        Raises:
            NoDeltaError: the deltas do not make this version from this copy.
            VerificationError: the target's own folder does not match its manifest.
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
    """Finds a base for deltas among this host's copies, in the folder ``room``."""

    def __init__(self, storage: Storage, room: Path) -> None:
        self._storage = storage
        self._room = room
        self._known: dict[str, WholeVersion] = {}

    def find(self, target: LeasedVersion, names: Collection[str]) -> DeltaBase:
        """Find and hold the copy that becomes ``target`` with the fewest bytes of deltas.

        Raises:
            NoDeltaError: the version cannot be made from a copy and deltas.
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
        job = Job(target.storage, JobLayout(target.source.parent.parent))
        chain = _chain(job, here, content)
        if chain is None:
            raise NoDeltaError(f"no deltas lead to version {target.sequence}")
        name, links = chain
        size = sum(delta.bytes for _, delta in links)
        whole = sum(file.size for file in target.manifest.files)
        if size > _MOST * whole:
            raise NoDeltaError(
                f"the deltas have {size} bytes in total, too many for a version of {whole} bytes"
            )
        copy = hold(self._storage, self._room / name)
        if copy is None:
            raise NoDeltaError(f"{self._room / name} was removed")
        return DeltaBase(copy, here[name], tuple(links))

    def _look(self, names: Collection[str]) -> dict[str, WholeVersion]:
        for name in names:
            if name not in self._known:
                folder = self._room / name
                try:
                    self._known[name] = WholeVersion(folder, read_manifest(self._storage, folder))
                except (RecordError, OSError) as error:
                    log.debug("%s cannot be the base of a delta: %s", folder, error)
        self._known = {name: one for name, one in self._known.items() if name in names}
        # A step that was only evaluated is no version, and no base of a delta.
        return {n: one for n, one in self._known.items() if delta_end(one.manifest) is not None}


def _chain(
    job: Job, here: Mapping[str, WholeVersion], content: str
) -> tuple[str, list[tuple[Path, Delta]]] | None:
    folders = {delta: folder for folder, delta in _deltas(job)}
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


def _refreshed(job: Job, folder: Path) -> bool:
    """Refresh this host's cached list of the folder's files; False if the folder is missing."""
    try:
        job.storage.refresh(folder)
    except OSError as error:
        log.debug("cannot refresh the cached list of the files in %s: %s", folder, error)
        return not is_gone(error)
    return True


def _deltas(job: Job) -> Iterator[tuple[Path, Delta]]:
    """The readable deltas of a job. The daemon can delete any of them at any time."""
    if not _refreshed(job, job.layout.deltas):
        _refreshed(job, job.layout.root)  # before the first delta there is no such folder
    for name in job.storage.names(job.layout.deltas):
        if parse_delta_folder(name) is not None:
            folder = job.layout.deltas / name
            delta = job.read(Delta, folder / DELTA, OF_OTHERS)
            if delta is not None:
                yield folder, delta
