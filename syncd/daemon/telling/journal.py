"""The journal: for each event a log line, a count, a metric, and often a line in a file.

``syncd status`` and ``syncd history`` read the file.
"""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from syncd.checkpoint.save import Save
from syncd.daemon.delta_maker import DeltaOutcome
from syncd.daemon.naming import NewNames
from syncd.daemon.telling.going_live import SeenLive
from syncd.daemon.telling.meter import Meter
from syncd.protocol.amounts import size
from syncd.protocol.events import Event
from syncd.protocol.journal_lines import JournalLine
from syncd.protocol.names import printable
from syncd.protocol.records import Delta, Manifest, encode
from syncd.protocol.reports import DaemonCounters
from syncd.protocol.requests import RollbackRequest
from syncd.storage.append import LIMIT, append, last_lines
from syncd.storage.job import Job
from syncd.storage.judge import Clock
from syncd.storage.record_files import readable_lines
from syncd.storage.repeats import Repeats

log = logging.getLogger(__name__)

#: How many lines wait if storage does not take them; then the oldest are lost.
_MOST_WAITING: Final = 4000
#: The random part of a temporary name, which changes at each attempt.
_RANDOM: Final = re.compile(r"-[0-9a-f]{12}(?![0-9a-f])")
#: For how many versions the time of the update of LATEST is kept, as explorers may load late.
_REMEMBERED: Final = 16


class Journal:
    """Writes a log line, a count and a metric for each event in a job.

    Attributes:
        counters: the counts of events since the take-over.
        waiting_for: the last logged reason why the daemon waits; empty if it does not wait.
    """

    def __init__(self, meter: Meter, file: JournalFile, *, clock: Clock = time.monotonic) -> None:
        self.meter = meter
        self._file = file
        self._clock = clock
        self._named_at: dict[int, float] = {}
        self.counters = DaemonCounters()
        self.waiting_for = ""
        self._no_delta_said = ""
        self._no_room = Repeats(clock=clock)

    def began(self, root: Path, epoch: int) -> None:
        """This daemon has taken over."""
        extra = Event.DAEMON_ACTIVE(job=root, epoch=epoch)
        log.info("working on %s in epoch %d", root, epoch, extra=extra)
        self._file.note("active")

    def adopted(self, manifest: Manifest) -> None:
        """This daemon has adopted a previous daemon's version."""
        self._named(manifest)
        self._file.note(
            "adopted", version=manifest.sequence, step=manifest.step, kind=manifest.kind
        )

    def live(self, seen: SeenLive) -> None:
        """An explorer has loaded a version."""
        named_at, ago, seconds = self._named_at.get(seen.version), seen.ago, None
        if named_at is not None:
            since = self._clock() - named_at
            ago = min(ago, since)  # no explorer was earlier than LATEST
            seconds = round(since - ago, 3)
        # An explorer may have joined long after the publication of its first version.
        self.meter.live(seconds=None if seen.is_first else seconds, pause=seen.pause)
        self._file.note(
            "live",
            ago=ago,
            version=seen.version,
            explorer=seen.explorer,
            seconds=seconds,
            pause=None if seen.pause is None else round(seen.pause, 3),
            delta_bytes=seen.delta_bytes,
        )

    def write(self) -> None:
        """Write the new lines to the file."""
        self._file.write()

    def waiting(self, why: str, *, no_room: bool = False) -> None:
        """Log a new reason why the daemon waits; repeat the warning of a full disk now and then."""
        changed, self.waiting_for = why != self.waiting_for, why
        level = logging.WARNING if no_room and self._no_room.due("no room") else logging.INFO
        if why and (changed or level == logging.WARNING):
            log.log(level, "waiting: %s", why, extra=Event.WAITING(reason=why))

    def published(self, manifest: Manifest, *, seconds: float, latency: float) -> None:
        """A save has become LATEST; :meth:`Meter.published` explains the times."""
        merged = sum(file.size for file in manifest.files)
        found = manifest.nonfinite if manifest.nonfinite and manifest.nonfinite.count else None
        self._count(published=1, merged_bytes=merged)
        self.meter.published(manifest, seconds=seconds, latency=latency)
        self._no_room.forget("no room")
        self._named(manifest)
        self._file.note(
            "published",
            version=manifest.sequence,
            step=manifest.step,
            kind=manifest.kind,
            bytes=merged,
            seconds=round(seconds, 3),
            latency=round(latency, 3),
            why=None if found is None else str(found),
        )
        log.info(
            "published step %d as version %d: %s in %.2f s",
            manifest.step,
            manifest.sequence,
            size(merged),
            seconds,
            extra=Event.VERSION_PUBLISHED(
                step=manifest.step,
                version=manifest.sequence,
                kind=manifest.kind,
                bytes=merged,
                seconds=round(seconds, 3),
                latency_seconds=round(latency, 3),
            ),
        )
        if found is not None:
            log.warning(
                "version %d of step %d has %s in the weights that the trainer saved. Check the "
                "training. 'syncd rollback' serves an older version again",
                manifest.sequence,
                manifest.step,
                found,
                extra=Event.VERSION_NONFINITE(
                    version=manifest.sequence,
                    step=manifest.step,
                    count=found.count,
                    tensors=list(found.names),
                ),
            )

    def model_config_changed(self, manifest: Manifest, before: int, changes: list[str]) -> None:
        """The model settings of a new version differ from those of version ``before``."""
        log.warning(
            "config.json of version %d differs from the config.json of version %d: %s. "
            "Engines that reload only the weights keep the old settings. Restart these "
            "engines if the settings matter",
            manifest.sequence,
            before,
            "; ".join(changes),
            extra=Event.MODEL_CONFIG_CHANGED(
                version=manifest.sequence, step=manifest.step, before=before, changes=changes
            ),
        )

    def named_anew(self, manifest: Manifest, change: NewNames) -> None:
        """The names of tensors have changed."""
        of = {"hub": "of the hub", "trainer": "of the trainer's module"}
        told = f"tensors have the names {of[change.names]}"
        if change.before is not None:
            told += f"; in the previous version they had the names {of[change.before]}"
        if change.why:
            told += f", because {change.why}; 'syncd run --names hub' chooses the hub's names"
        self._file.note(
            "names",
            version=manifest.sequence,
            step=manifest.step,
            names=change.names,
            why=change.why or None,
        )
        log.log(
            logging.WARNING if change.why else logging.INFO,
            "version %d: %s",
            manifest.sequence,
            told,
            extra=Event.VERSION_NAMES(
                version=manifest.sequence,
                step=manifest.step,
                names=change.names,
                before=change.before,
                reason=change.why or None,
            ),
        )

    def skipped(self, step: int) -> None:
        """A save will not be published, because the pointer names a newer step."""
        self._count(skipped=1)
        self._file.note("skipped", step=step)
        extra = Event.SAVE_SKIPPED(step=step)
        log.info("skipping step %d: the pointer names a newer step", step, extra=extra)

    def quarantined(self, save: Save, error: Exception, path: Path) -> None:
        """A save cannot be published; the record at ``path`` has the reason."""
        self._count(quarantined=1)
        self.meter.failed(error)
        self._file.note("quarantined", step=save.step, why=str(error))
        log.error(
            "step %d cannot be published: %s (recorded in %s)",
            save.step,
            error,
            path,
            extra=Event.SAVE_QUARANTINED(step=save.step, reason=error, path=path),
        )

    def ended_late(self, save: Save, error: Exception) -> None:
        """A late merge was ended."""
        log.warning(
            "step %d: %s", save.step, error, extra=Event.MERGE_ENDED(step=save.step, reason=error)
        )

    def fault(self, save: Save, error: Exception, path: Path) -> None:
        """A save was quarantined because of a bug in syncd; call this inside the except block."""
        self._count(quarantined=1)
        self.meter.failed(error)
        why = f"a bug in syncd: {type(error).__name__}: {error}"
        self._file.note("quarantined", step=save.step, why=why)
        log.exception(
            "step %d cannot be published: a bug in syncd (recorded in %s)",
            save.step,
            path,
            extra=Event.FAULT(step=save.step, path=path),
        )

    def rolled_back(self, request: RollbackRequest, manifest: Manifest) -> None:
        """A rollback has made an old version LATEST again."""
        self._count(rolled_back=1)
        self._named(manifest)
        self._file.note(
            "rolled_back",
            version=manifest.sequence,
            step=manifest.step,
            kind=manifest.kind,
            of=request.sequence,
            by=printable(request.by),
        )
        log.info(
            "version %d is served again, as version %d, requested by %s",
            request.sequence,
            manifest.sequence,
            printable(request.by),
            extra=Event.VERSION_ROLLED_BACK(
                of=request.sequence,
                version=manifest.sequence,
                step=manifest.step,
                by=printable(request.by),
            ),
        )

    def rollback_refused(self, request: RollbackRequest, error: Exception) -> None:
        """A rollback was refused."""
        self.meter.failed(error)
        self._file.note("refused", of=request.sequence, by=printable(request.by), why=str(error))
        log.error(
            "version %d cannot be served again: %s",
            request.sequence,
            error,
            extra=Event.ROLLBACK_REFUSED(version=request.sequence, reason=error),
        )

    def delta_made(self, outcome: DeltaOutcome, delta: Delta) -> None:
        """A delta to LATEST's version was made."""
        changed = delta.changed / delta.elements if delta.elements else 0.0
        self._no_delta_said = ""
        self._count(deltas_made=1)
        self.meter.delta_made(delta.bytes, changed=changed, seconds=outcome.seconds)
        self._file.note(
            "delta",
            version=outcome.sequence,
            of=outcome.base,
            delta_bytes=delta.bytes,
            changed=changed,
            seconds=round(outcome.seconds, 3),
        )
        log.info(
            "made the delta to version %d from version %d: %s, %.2f %% of the elements, in %.2f s",
            outcome.sequence,
            outcome.base,
            size(delta.bytes),
            100 * changed,
            outcome.seconds,
            extra=Event.DELTA_MADE(
                version=outcome.sequence,
                base=outcome.base,
                bytes=delta.bytes,
                changed=changed,
                seconds=round(outcome.seconds, 3),
            ),
        )

    def no_delta(self, outcome: DeltaOutcome) -> None:
        """A delta to LATEST's version was wanted, but was not made."""
        if outcome.error is not None:
            self.meter.failed(outcome.error)
        self.meter.no_delta()
        self._file.note("no_delta", version=outcome.sequence, of=outcome.base, why=outcome.why)
        is_news = not outcome.is_overtaken and outcome.why != self._no_delta_said
        if is_news:
            self._no_delta_said = outcome.why
        log.log(
            logging.WARNING if is_news else logging.DEBUG,
            "no delta to version %d from version %d: %s; explorers read the whole version",
            outcome.sequence,
            outcome.base,
            outcome.why,
            extra=Event.NO_DELTA(version=outcome.sequence, base=outcome.base, reason=outcome.why),
        )

    def pruned(self, **more: int) -> None:
        """Count a deletion that is already logged."""
        self._count(**more)

    def lease_dropped(self) -> None:
        """Count a removed lease."""
        self.meter.counted(leases_dropped=1)

    def cleanup_delayed(self, error: OSError) -> None:
        """Leftovers cannot be removed now."""
        self.meter.failed(error)
        log.warning(
            "cannot remove leftovers now: %s",
            error,
            extra=Event.CLEANUP_DELAYED(reason=error),
        )

    def reserve_short(self, error: OSError) -> None:
        """Space for pruning cannot be reserved."""
        self.meter.failed(error)
        log.warning(
            "cannot reserve disk space for pruning: %s",
            error,
            extra=Event.RESERVE_SHORT(reason=error),
        )

    def _named(self, manifest: Manifest) -> None:
        self._named_at[manifest.sequence] = self._clock()
        if len(self._named_at) > _REMEMBERED:
            del self._named_at[min(self._named_at)]

    def _count(self, **more: int) -> None:
        self.meter.counted(**more)
        self.counters = self.counters.model_copy(
            update={name: getattr(self.counters, name) + by for name, by in more.items()}
        )


class JournalFile:
    """Appends lines to the journal's file, several lines at a time.

    Storage errors are logged, not raised. Waiting lines are lost if the daemon is killed before
    :meth:`write`. The oldest waiting lines are lost if the disk is full for long. Written lines may
    be lost at a power loss. After ``limit`` bytes a new file is begun.
    """

    def __init__(
        self,
        job: Job,
        *,
        wall: Callable[[], float] = time.time,
        limit: int = LIMIT,
    ) -> None:
        self._job = job
        self._wall = wall
        self._limit = limit
        self._waiting: deque[bytes] = deque(maxlen=_MOST_WAITING)
        self._repeats = Repeats()

    def note(self, event: str, *, ago: float = 0.0, **fields: Any) -> None:
        """Add a line for an event that happened ``ago`` seconds ago; :meth:`write` writes the line.

        ``fields`` are other fields of :class:`JournalLine`.
        """
        line = JournalLine.model_validate({"time": self._wall() - ago, "event": event, **fields})
        self._waiting.append(encode(line))

    def write(self) -> None:
        """Write the waiting lines."""
        if not self._waiting:
            return
        path = self._job.layout.journal
        try:
            # If a daemon was killed while it wrote a line, that line has no end.
            lines = b"\n" + b"".join(self._waiting)
            append(self._job.storage, path, lines, durable=False, limit=self._limit)
        except OSError as error:
            if self._repeats.due("refused"):
                log.warning(
                    "cannot write the journal: %s",
                    error,
                    extra=Event.RECORD_UNWRITTEN(path=path, reason=error),
                )
        else:
            self._waiting.clear()
            self._repeats.forget("refused")


def read_journal(job: Job, limit: int = 2 * LIMIT) -> list[JournalLine]:
    """The readable lines in the last ``limit`` bytes of the journal, oldest first.

    Raises:
        OSError: storage does not answer.
    """
    path = job.layout.journal
    return list(readable_lines(JournalLine, last_lines(job.storage, path, limit), path))


def lasting(why: str) -> str:
    """The text of an error without the random parts of names, which differ at each attempt."""
    return _RANDOM.sub("-…", why)
