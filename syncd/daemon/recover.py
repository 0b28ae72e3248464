"""What the daemon before us left: its records, its versions, and every number it ever gave out."""

from __future__ import annotations

import errno
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from syncd.checkpoint.version import read_manifest
from syncd.protocol.errors import ProtocolMismatchError, RecordError
from syncd.protocol.events import Event
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import parse_version_folder
from syncd.protocol.records import Latest, Manifest, R, SaveOutcome, Saves, parse
from syncd.protocol.reports import DaemonReport, ExplorerReport
from syncd.storage.errnos import is_gone, is_no_record, is_refused_here
from syncd.storage.fsio import LONG_RECORD_LIMIT, RECORD_LIMIT, Storage

log = logging.getLogger(__name__)

#: A number that lies further above LATEST was not come to by counting: it is not believed, or one
#: mistake would use up all numbers.
_BELIEVED: Final = 10**15


@dataclass(slots=True)
class Found:
    """What a daemon finds after its take-over.

    Attributes:
        latest: LATEST; None where there is none, or none that can be read.
        served: the manifest of the version that LATEST names; None where that is damaged.
        adopted: a finished version that LATEST does not name yet: the highest one.
        unfinished: the versions above LATEST, and above ``adopted``, that are not whole.
        outcomes: step → what became of its last save.
        highest: the highest sequence that anything in the job has ever named.
    """

    latest: Latest | None = None
    served: Manifest | None = None
    adopted: Manifest | None = None
    unfinished: list[int] = field(default_factory=list)
    outcomes: dict[int, SaveOutcome] = field(default_factory=dict)
    highest: int = 0


def look_back(storage: Storage, layout: JobLayout) -> Found:
    """Read all of it; nothing is changed.

    Raises:
        ProtocolMismatchError: LATEST or the saves on record are of a newer protocol.
        OSError: storage does not answer, which says nothing about what is there.
    """
    # What this client remembers of these may be older than the take-over.
    for folder in (layout.state, layout.published, layout.leases):
        storage.refresh(folder)
    for folder in (layout.explorers, layout.requests):
        _refresh_of_others(storage, folder)
    look = _Look(storage, layout)
    found = Found(latest=look.record(Latest, layout.latest))
    saves = look.record(Saves, layout.saves, LONG_RECORD_LIMIT)
    found.outcomes = dict(saves.steps) if saves else {}
    found.highest = look.highest_sequence(found)
    known = found.latest.sequence if found.latest else 0
    for sequence in sorted(look.published(), reverse=True):
        if sequence <= known:
            break
        if sequence > known + _BELIEVED:
            _let_be(layout.version(sequence), "no daemon made it")
            continue
        try:
            found.adopted = look.finished(sequence)
        except ProtocolMismatchError as error:
            _let_be(layout.version(sequence), error)
            continue
        if found.adopted is not None:
            break
        if look.has_content(layout.lease_folder(sequence)):
            _let_be(layout.version(sequence), "it is not whole, but held")
        else:
            found.unfinished.append(sequence)
    if found.latest is not None:
        try:
            found.served = look.finished(found.latest.sequence)
        except ProtocolMismatchError as error:
            log.error(
                "%s: what is pointed to is published again",
                error,
                extra=Event.VERSION_DAMAGED(
                    path=layout.version(found.latest.sequence), reason=error
                ),
            )
    return found


def _let_be(path: Path, why: object) -> None:
    log.error("%s is let be: %s", path, why, extra=Event.LEFT_ALONE(path=path, reason=why))


def _refresh_of_others(storage: Storage, folder: Path) -> None:
    """One that this user may not touch keeps nobody from taking over."""
    try:
        storage.refresh(folder)
    except OSError as error:
        if not (is_gone(error) or is_refused_here(error)):
            raise


class _Look:
    def __init__(self, storage: Storage, layout: JobLayout) -> None:
        self._storage = storage
        self._layout = layout

    def record(self, model: type[R], path: Path, limit: int = RECORD_LIMIT) -> R | None:
        """A record that daemons alone write; a lost or damaged one is like none."""
        try:
            return parse(model, self._read_now(path, limit), path)
        except ProtocolMismatchError:
            raise
        except RecordError as error:
            self._lost(path, error)
            return None
        except OSError as error:
            if error.errno == errno.ENOENT:
                return None
            if is_no_record(error):
                self._lost(path, error)
                return None
            raise

    def _lost(self, path: Path, error: Exception) -> None:
        log.error(
            "%s: going on as if it were lost",
            error,
            extra=Event.RECORD_LOST(path=path, reason=error),
        )

    def _read_now(self, path: Path, limit: int = RECORD_LIMIT) -> bytes:
        """A file as it is now: a first open may be of what was replaced, the second is not."""
        try:
            self._storage.release(self._storage.open_read(path))
        except OSError as error:
            log.debug("%s: %s; the second look counts", path, error)
        return self._storage.read(path, limit)

    def published(self) -> list[int]:
        found = (parse_version_folder(n) for n in self._storage.names(self._layout.published))
        return [sequence for sequence in found if sequence is not None]

    def finished(self, sequence: int) -> Manifest | None:
        """The manifest of a published version, if every file that it lists has its size."""
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
            log.warning(
                "%s has no manifest that can be read: %s",
                folder,
                error,
                extra=Event.VERSION_DAMAGED(path=folder, reason=error),
            )
            return None
        for file in manifest.files:
            status = self._status(folder / file.name)
            if status is None or status.st_size != file.size:
                log.warning(
                    "%s is not %d bytes",
                    folder / file.name,
                    file.size,
                    extra=Event.VERSION_DAMAGED(
                        path=folder / file.name, reason=f"it is not {file.size} bytes"
                    ),
                )
                return None
        return manifest if manifest.sequence == sequence else None

    def highest_sequence(self, found: Found) -> int:
        """The highest sequence that anything in the job has ever named: it never goes back."""
        named = [0, *self.published()]
        if found.latest is not None:
            named.append(found.latest.sequence)
        # With LATEST at hand, an empty one above it is of a version that was never published: its
        # number is still free.
        named.extend(
            parse_version_folder(name) or 0
            for name in self._storage.names(self._layout.leases)
            if found.latest is None or self.has_content(self._layout.leases / name)
        )
        named.extend(
            self._told_sequence(self._layout.explorers / name, ExplorerReport)
            for name in self._storage.names(self._layout.explorers)
        )
        named.append(self._told_sequence(self._layout.daemon_report, DaemonReport))
        named.extend(outcome.sequence or 0 for outcome in found.outcomes.values())
        known = found.latest.sequence if found.latest else 0
        return max(number for number in named if number <= known + _BELIEVED)

    def has_content(self, folder: Path) -> bool:
        """Whether a folder has anything in it, as far as this user may know."""
        try:
            return bool(self._storage.names(folder))
        except OSError as error:
            if is_refused_here(error):
                return True
            raise

    def _status(self, path: Path) -> os.stat_result | None:
        try:
            return self._storage.status(path)
        except OSError as error:
            if is_refused_here(error):
                return None
            raise

    def _told_sequence(self, path: Path, model: type[ExplorerReport | DaemonReport]) -> int:
        try:
            return parse(model, self._read_now(path), path).sequence or 0
        except RecordError as error:
            log.debug("%s says no sequence: %s", path, error)
        except OSError as error:
            if not (is_gone(error) or is_no_record(error) or is_refused_here(error)):
                raise
        return 0
