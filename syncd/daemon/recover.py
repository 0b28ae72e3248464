"""Recovery after a take-over: reads the previous daemon's records, versions and sequences."""

from __future__ import annotations

import errno
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from syncd.checkpoint.version import read_manifest
from syncd.daemon.chains import DeltaSeen, deltas_to_each, look_at_delta
from syncd.protocol.errors import ProtocolMismatchError, RecordError
from syncd.protocol.events import LeftAlone, RecordMissed
from syncd.protocol.names import MANIFEST, parse_version_folder
from syncd.protocol.records import Latest, Manifest, R, SaveOutcome, SaveOutcomes
from syncd.protocol.reports import DaemonReport, ExplorerReport
from syncd.protocol.version_events import LatestUnusable, VersionDamaged
from syncd.storage.errnos import (
    GONE,
    REFUSED_HERE,
    UNREADABLE,
    Ignoring,
    is_no_record,
    is_refused_here,
)
from syncd.storage.fsio import LONG_RECORD_LIMIT, RECORD_LIMIT
from syncd.storage.job import OF_OTHERS, Job, ReadPolicy, delta_folders, version_folders

log = logging.getLogger(__name__)

#: No daemon counts further above LATEST than this. Larger numbers are mistakes, and are ignored,
#: because otherwise one mistake would use up all numbers.
BELIEVED: Final = 10**15


@dataclass
class FoundVersions:
    """The versions and records that a daemon finds after its take-over.

    Attributes:
        latest: LATEST; None if that file is missing or unreadable.
        served: the manifest of LATEST's version; None if the version is damaged.
        adopted: the manifest of the highest finished version above LATEST, if any.
        unfinished: the incomplete, unleased versions above ``adopted``; above LATEST if ``adopted``
            is None.
        deltas_to: the deltas that lead from ``adopted``, or from LATEST's version if ``adopted`` is
            None, to each save.
        strays: the other deltas above that version; no explorer can use them.
    """

    latest: Latest | None = None
    served: Manifest | None = None
    adopted: Manifest | None = None
    unfinished: list[int] = field(default_factory=list)
    deltas_to: dict[str, tuple[DeltaSeen, ...]] = field(default_factory=dict)
    strays: list[int] = field(default_factory=list)
    outcomes: dict[int, SaveOutcome] = field(default_factory=dict)
    highest: int = 0


def look_back(job: Job) -> FoundVersions:
    """Read all records and versions of a job; changes nothing.

    Raises:
        ProtocolMismatchError: LATEST or ``saves.json`` has a newer protocol version.
        OSError: storage does not answer, so the state of the job is unknown.
    """
    layout = job.layout
    # This client's cache of these folders may be older than the take-over.
    # Also sync: the daemon before may have ended between a rename and its fsync.
    for folder in (layout.root, layout.state, layout.published, layout.leases):
        job.storage.refresh(folder)
        job.storage.sync_folder(folder)
    for folder in (layout.explorers, layout.requests, layout.deltas):
        with Ignoring(GONE | REFUSED_HERE):
            job.storage.refresh(folder)
            job.storage.sync_folder(folder)
    look = _Look(job)
    past = FoundVersions(latest=look.record(Latest, layout.latest))
    saves = look.record(SaveOutcomes, layout.saves, LONG_RECORD_LIMIT)
    past.outcomes = dict(saves.steps) if saves else {}
    known = past.latest.sequence if past.latest else 0
    published = version_folders(job)
    deltas = look.deltas()
    past.highest = look.highest_sequence(past, known, [*published, *deltas])
    for sequence in reversed(published):
        version = layout.version(sequence)
        if sequence <= known:
            break
        if sequence > known + BELIEVED:
            LeftAlone(version, "no daemon made it").tell(log)
            continue
        try:
            past.adopted = look.finished(sequence, past.latest)
        except ProtocolMismatchError as error:
            LeftAlone(version, error).tell(log)
            continue
        if past.adopted is not None:
            break
        if look.has_content(layout.lease_folder(sequence)):
            LeftAlone(version, "it is incomplete, but an explorer has leased it").tell(log)
        else:
            past.unfinished.append(sequence)
    if past.latest is not None:
        try:
            past.served = look.finished(known, past.latest)
        except ProtocolMismatchError as error:
            LatestUnusable(layout.version(known), error).tell(log)
    newest = past.adopted or past.served
    last = newest.sequence if newest else known
    for sequence in (number for number in deltas if number > last + BELIEVED):
        LeftAlone(layout.delta(sequence), "no daemon made it").tell(log)
    above = [look_at_delta(job, number) for number in deltas if last < number <= last + BELIEVED]
    past.deltas_to = deltas_to_each(last, newest.save_id if newest else None, above)
    past.strays = [one.sequence for one in above if one not in past.deltas_to.get(one.target, ())]
    return past


def _lost(path: Path, error: Exception) -> None:
    RecordMissed(path, error).tell(log)


#: For records that only daemons write: a damaged record counts as missing.
_OURS: Final = ReadPolicy(
    absent=lambda error: error.errno == errno.ENOENT, damaged=is_no_record, newer=False, say=_lost
)


@dataclass
class _Look:
    job: Job

    def __post_init__(self) -> None:
        self._storage, self._layout = self.job.storage, self.job.layout

    def record(self, model: type[R], path: Path, limit: int = RECORD_LIMIT) -> R | None:
        self._look_at(path)
        return self.job.read(model, path, _OURS, limit=limit)

    def _look_at(self, path: Path) -> None:
        """Open and close a file, because only the next open surely finds the new content."""
        try:
            self._storage.release(self._storage.open_read(path))
        except OSError as error:
            log.debug("cannot open %s: %s; trying again", path, error)

    def deltas(self) -> list[int]:
        try:
            return delta_folders(self.job)
        except OSError as error:
            if not is_refused_here(error):
                raise
            LeftAlone(self._layout.deltas, error).tell(log)
            return []

    def finished(self, sequence: int, latest: Latest | None) -> Manifest | None:
        """The manifest of a published version.

        None if a file is missing or has a wrong size, or if the version is not what LATEST says.
        """
        folder = self._layout.version(sequence)
        try:
            manifest = read_manifest(self._storage, folder)
        except ProtocolMismatchError:
            raise
        except (OSError, RecordError) as error:
            if isinstance(error, OSError) and not (
                error.errno in {errno.ENOENT, errno.ENOTDIR} or is_no_record(error)
            ):
                raise  # storage that does not answer says nothing about the version
            VersionDamaged(folder, error).tell(log)
            return None
        for file in manifest.files:
            path, size = folder / file.name, None
            with Ignoring({errno.ELOOP, errno.ENAMETOOLONG}):  # other errors say nothing of it
                status = self._storage.status(path)
                size = status and status.st_size
            if size != file.size:
                VersionDamaged(path, f"its size is not {file.size} bytes").tell(log)
                return None
        told = (manifest, latest, latest.tip if latest else None)
        saves = {(one.step, one.save_id) for one in told if one and one.sequence == sequence}
        if manifest.sequence != sequence or len(saves) > 1:
            VersionDamaged(folder, f"{MANIFEST} is of another version").tell(log)
            return None
        return manifest

    def highest_sequence(self, past: FoundVersions, known: int, named: list[int]) -> int:
        """The highest believable sequence in the job's files; new sequences must be higher.

        ``named`` are the sequences of folders.
        """
        storage, layout = self._storage, self._layout
        # If LATEST is known, an empty lease folder above it belongs to a version that was never
        # published: its number is still free.
        leased = (
            parse_version_folder(name) or 0
            for name in storage.names(layout.leases)
            if past.latest is None or self.has_content(layout.leases / name)
        )
        reported = (
            self._reported_sequence(layout.explorers / name, ExplorerReport)
            for name in storage.names(layout.explorers)
        )
        ours = self._reported_sequence(layout.daemon_report, DaemonReport)
        saves = (outcome.sequence or 0 for outcome in past.outcomes.values())
        tip = past.latest.tip if past.latest else None
        numbers = (known, tip.sequence if tip else 0, ours, *named, *leased, *reported, *saves)
        return max(number for number in numbers if number <= known + BELIEVED)

    def has_content(self, folder: Path) -> bool:
        """True if a folder has content, or if it cannot be read."""
        with Ignoring(UNREADABLE):
            return bool(self._storage.names(folder))
        return True

    def _reported_sequence(self, path: Path, model: type[ExplorerReport | DaemonReport]) -> int:
        self._look_at(path)
        report = self.job.read(model, path, OF_OTHERS)
        return 0 if report is None else report.sequence or 0
