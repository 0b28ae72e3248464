"""Recovery after a take-over: reads the previous daemon's records, versions and sequences."""

from __future__ import annotations

import errno
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from syncd.checkpoint.version import read_manifest
from syncd.protocol.errors import ProtocolMismatchError, RecordError
from syncd.protocol.events import LeftAlone, RecordMissed
from syncd.protocol.names import parse_delta_folder, parse_version_folder
from syncd.protocol.records import Latest, Manifest, R, SaveOutcome, SaveOutcomes
from syncd.protocol.reports import DaemonReport, ExplorerReport
from syncd.protocol.version_events import LatestUnusable, VersionDamaged
from syncd.storage.errnos import is_gone, is_no_record, is_refused_here
from syncd.storage.fsio import LONG_RECORD_LIMIT, RECORD_LIMIT, Storage
from syncd.storage.job import OF_OTHERS, Job, ReadPolicy

log = logging.getLogger(__name__)

#: No daemon counts further above LATEST than this. Larger numbers are mistakes, and are ignored,
#: because otherwise one mistake would use up all numbers.
_BELIEVED: Final = 10**15


@dataclass(slots=True)
class FoundVersions:
    """The versions and records that a daemon finds after its take-over.

    Attributes:
        latest: LATEST; None if that file is missing or unreadable.
        served: the manifest of LATEST's version; None if the version is damaged.
        adopted: the manifest of the highest finished version above LATEST, if any.
        unfinished: the incomplete, unleased versions above ``adopted``; above LATEST if ``adopted``
            is None.
        deltas_above: the deltas to versions above ``adopted``; above LATEST if ``adopted`` is None.
            A delta is made after LATEST names its version. So such deltas show that LATEST was lost
            or replaced by an older copy.
    """

    latest: Latest | None = None
    served: Manifest | None = None
    adopted: Manifest | None = None
    unfinished: list[int] = field(default_factory=list)
    deltas_above: list[int] = field(default_factory=list)
    outcomes: dict[int, SaveOutcome] = field(default_factory=dict)
    highest: int = 0


def look_back(job: Job) -> FoundVersions:
    """Read all records and versions of a job; changes nothing.

    Raises:
        ProtocolMismatchError: LATEST or ``saves.json`` has a newer protocol version.
        OSError: storage does not answer, so the state of the job is unknown.
    """
    # This client's cache of these folders may be older than the take-over.
    for folder in (job.layout.state, job.layout.published, job.layout.leases):
        job.storage.refresh(folder)
    for folder in (job.layout.explorers, job.layout.requests, job.layout.deltas):
        _refresh_of_others(job.storage, folder)
    look = _Look(job)
    found = FoundVersions(latest=look.record(Latest, job.layout.latest))
    saves = look.record(SaveOutcomes, job.layout.saves, LONG_RECORD_LIMIT)
    found.outcomes = dict(saves.steps) if saves else {}
    found.highest = look.highest_sequence(found)
    known = found.latest.sequence if found.latest else 0
    for sequence in sorted(look.published(), reverse=True):
        if sequence <= known:
            break
        if sequence > known + _BELIEVED:
            _let_be(job.layout.version(sequence), "no daemon made it")
            continue
        try:
            found.adopted = look.finished(sequence)
        except ProtocolMismatchError as error:
            _let_be(job.layout.version(sequence), error)
            continue
        if found.adopted is not None:
            break
        if look.has_content(job.layout.lease_folder(sequence)):
            _let_be(job.layout.version(sequence), "it is incomplete, but an explorer has leased it")
        else:
            found.unfinished.append(sequence)
    found.deltas_above = look.deltas_above(found.adopted.sequence if found.adopted else known)
    if found.latest is not None:
        try:
            found.served = look.finished(found.latest.sequence)
        except ProtocolMismatchError as error:
            folder = job.layout.version(found.latest.sequence)
            LatestUnusable(folder, error).tell(log)
    return found


def _let_be(path: Path, why: object) -> None:
    LeftAlone(path, why).tell(log)


def _refresh_of_others(storage: Storage, folder: Path) -> None:
    try:
        storage.refresh(folder)
    except OSError as error:
        if not (is_gone(error) or is_refused_here(error)):
            raise


def _lost(path: Path, error: Exception) -> None:
    RecordMissed(path, error).tell(log)


#: For records that only daemons write: a damaged record counts as missing.
_OURS: Final = ReadPolicy(
    absent=lambda error: error.errno == errno.ENOENT, damaged=is_no_record, newer=False, say=_lost
)


class _Look:
    def __init__(self, job: Job) -> None:
        self._job = job

    def record(self, model: type[R], path: Path, limit: int = RECORD_LIMIT) -> R | None:
        self._look_at(path)
        return self._job.read(model, path, _OURS, limit=limit)

    def _look_at(self, path: Path) -> None:
        """Open and close a file, because only the next open surely finds the new content."""
        try:
            self._job.storage.release(self._job.storage.open_read(path))
        except OSError as error:
            log.debug("cannot open %s: %s; trying again", path, error)

    def published(self) -> list[int]:
        found = (
            parse_version_folder(n) for n in self._job.storage.names(self._job.layout.published)
        )
        return [sequence for sequence in found if sequence is not None]

    def deltas(self) -> list[int]:
        folder = self._job.layout.deltas
        try:
            found = (parse_delta_folder(name) for name in self._job.storage.names(folder))
        except OSError as error:
            if not is_refused_here(error):
                raise
            _let_be(folder, error)
            return []
        return [sequence for sequence in found if sequence is not None]

    def deltas_above(self, latest: int) -> list[int]:
        found = []
        for sequence in self.deltas():
            if sequence > latest + _BELIEVED:
                _let_be(self._job.layout.delta(sequence), "no daemon made it")
            elif sequence > latest:
                found.append(sequence)
        return found

    def finished(self, sequence: int) -> Manifest | None:
        """The manifest of a published version; None if a file is missing or has a wrong size."""
        folder = self._job.layout.version(sequence)
        try:
            manifest = read_manifest(self._job.storage, folder)
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
            status = self._status(folder / file.name)
            if status is None or status.st_size != file.size:
                why = f"its size is not {file.size} bytes"
                VersionDamaged(folder / file.name, why).tell(log)
                return None
        return manifest if manifest.sequence == sequence else None

    def highest_sequence(self, found: FoundVersions) -> int:
        """The highest believable sequence in the job's files; new sequences must be higher."""
        named = [0, *self.published(), *self.deltas()]
        if found.latest is not None:
            named.append(found.latest.sequence)
        # If LATEST is known, an empty lease folder above it belongs to a version that was never
        # published: its number is still free.
        named.extend(
            parse_version_folder(name) or 0
            for name in self._job.storage.names(self._job.layout.leases)
            if found.latest is None or self.has_content(self._job.layout.leases / name)
        )
        named.extend(
            self._told_sequence(self._job.layout.explorers / name, ExplorerReport)
            for name in self._job.storage.names(self._job.layout.explorers)
        )
        named.append(self._told_sequence(self._job.layout.daemon_report, DaemonReport))
        named.extend(outcome.sequence or 0 for outcome in found.outcomes.values())
        known = found.latest.sequence if found.latest else 0
        return max(number for number in named if number <= known + _BELIEVED)

    def has_content(self, folder: Path) -> bool:
        """True if a folder has content, or if this user may not read it."""
        try:
            return bool(self._job.storage.names(folder))
        except OSError as error:
            if is_refused_here(error):
                return True
            raise

    def _status(self, path: Path) -> os.stat_result | None:
        try:
            return self._job.storage.status(path)
        except OSError as error:
            if is_refused_here(error):
                return None
            raise

    def _told_sequence(self, path: Path, model: type[ExplorerReport | DaemonReport]) -> int:
        self._look_at(path)
        report = self._job.read(model, path, OF_OTHERS)
        return 0 if report is None else report.sequence or 0
