"""What the active daemon tells of what it did: in the log, in its counters, to its meter."""

from __future__ import annotations

import logging
import re
import time
from pathlib import Path
from typing import Final

from syncd.checkpoint.save import Save
from syncd.daemon.journal_file import JournalFile
from syncd.daemon.meter import Meter
from syncd.protocol.events import Event
from syncd.protocol.names import printable
from syncd.protocol.records import Manifest
from syncd.protocol.reports import DaemonCounters
from syncd.protocol.requests import RollbackRequest
from syncd.storage.judge import Clock

log = logging.getLogger(__name__)

#: What keeps a temporary name apart from all others: a new one at each attempt.
_RANDOM: Final = re.compile(r"-[0-9a-f]{12}(?![0-9a-f])")

#: Of how many versions it is known when LATEST began to name them: explorers may be late.
_REMEMBERED: Final = 16


def lasting(why: str) -> str:
    """What an error says, without the names that are new at each attempt."""
    return _RANDOM.sub("-…", why)


class Journal:
    """One line, one count and one metric for each thing that happens in a job.

    And a line of the journal's file, for what ``syncd status`` and ``syncd history`` show.

    Args:
        meter: hears of all of it.
        file: the journal's file.
        clock: seconds, monotonic.

    Attributes:
        counters: what was done since the take-over.
        waiting_for: what was said last of what keeps the daemon from going on; empty for nothing.
    """

    def __init__(self, meter: Meter, file: JournalFile, *, clock: Clock = time.monotonic) -> None:
        self.meter = meter
        self._file = file
        self._clock = clock
        self._named_at: dict[int, float] = {}
        self.counters = DaemonCounters()
        self.waiting_for = ""

    def began(self, root: Path, epoch: int) -> None:
        """This daemon has taken over."""
        extra = Event.DAEMON_ACTIVE(job=root, epoch=epoch)
        log.info("working on %s in epoch %d", root, epoch, extra=extra)
        self._file.note("active")

    def adopted(self, manifest: Manifest) -> None:
        """A version that a daemon before this one had finished is LATEST, and logged already."""
        self._named(manifest)
        self._file.note(
            "adopted", version=manifest.sequence, step=manifest.step, kind=manifest.kind
        )

    def live(self, explorer: str, version: int) -> None:
        """An explorer was seen to serve a version for the first time."""
        named_at = self._named_at.get(version)
        seconds = None if named_at is None else round(self._clock() - named_at, 3)
        self._file.note("live", version=version, explorer=explorer, seconds=seconds)

    def write(self) -> None:
        """Let the file have what happened since the last time."""
        self._file.write()

    def waiting(self, why: str) -> None:
        """Something keeps the daemon from going on, or nothing does; said when it changes."""
        if why != self.waiting_for:
            self.waiting_for = why
            if why:
                log.info("waiting: %s", why, extra=Event.WAITING(reason=why))

    def published(self, manifest: Manifest, *, seconds: float, latency: float) -> None:
        """A save has become LATEST; seconds as :meth:`Meter.published` has them."""
        merged = sum(file.size for file in manifest.files)
        self._count(published=1, merged_bytes=merged)
        self.meter.published(manifest, seconds=seconds, latency=latency)
        self._named(manifest)
        self._file.note(
            "published",
            version=manifest.sequence,
            step=manifest.step,
            kind=manifest.kind,
            bytes=merged,
            seconds=round(seconds, 3),
            latency=round(latency, 3),
        )
        log.info(
            "published step %d as version %d: %.1f MB in %.2f s",
            manifest.step,
            manifest.sequence,
            merged / 1e6,
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

    def skipped(self, step: int) -> None:
        """A save will never be published: a newer one was."""
        self._count(skipped=1)
        self._file.note("skipped", step=step)
        extra = Event.SAVE_SKIPPED(step=step)
        log.info("step %d is skipped: a newer one is out", step, extra=extra)

    def quarantined(self, save: Save, error: Exception, path: Path) -> None:
        """A save cannot be published, for the reason in the record at ``path``."""
        self._count(quarantined=1)
        self.meter.failed(error)
        self._file.note("quarantined", step=save.step, why=str(error))
        log.error(
            "step %d cannot be published: %s (kept in %s)",
            save.step,
            error,
            path,
            extra=Event.SAVE_QUARANTINED(step=save.step, reason=error, path=path),
        )

    def fault(self, save: Save, error: Exception, path: Path) -> None:
        """A save was quarantined by a fault of ours; called where the error is handled."""
        self._count(quarantined=1)
        self.meter.failed(error)
        why = f"a fault of syncd: {type(error).__name__}: {error}"
        self._file.note("quarantined", step=save.step, why=why)
        log.exception(
            "step %d cannot be published: a fault of syncd (%s)",
            save.step,
            path,
            extra=Event.FAULT(step=save.step, path=path),
        )

    def rolled_back(self, request: RollbackRequest, manifest: Manifest) -> None:
        """An old version is LATEST again."""
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
            "version %d is served again, as version %d, asked for by %s",
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
        """An old version cannot be LATEST again."""
        self.meter.failed(error)
        self._file.note("refused", of=request.sequence, by=printable(request.by), why=str(error))
        log.error(
            "version %d cannot be served again: %s",
            request.sequence,
            error,
            extra=Event.ROLLBACK_REFUSED(version=request.sequence, reason=error),
        )

    def pruned(self, **more: int) -> None:
        """Something was deleted; the pruner has logged it."""
        self._count(**more)

    def lease_dropped(self) -> None:
        """The lease of a dead explorer was taken away; the pruner has logged it."""
        self.meter.counted(leases_dropped=1)

    def cleanup_delayed(self, error: OSError) -> None:
        """What was left behind stays for now."""
        self.meter.failed(error)
        log.warning(
            "what was left behind cannot be removed now: %s",
            error,
            extra=Event.CLEANUP_DELAYED(reason=error),
        )

    def reserve_short(self, error: OSError) -> None:
        """No room can be kept back."""
        self.meter.failed(error)
        log.warning(
            "no room can be kept back for pruning: %s",
            error,
            extra=Event.RESERVE_SHORT(reason=error),
        )

    def _named(self, manifest: Manifest) -> None:
        """LATEST names a version from now on."""
        self._named_at[manifest.sequence] = self._clock()
        if len(self._named_at) > _REMEMBERED:
            del self._named_at[min(self._named_at)]

    def _count(self, **more: int) -> None:
        self.meter.counted(**more)
        self.counters = self.counters.model_copy(
            update={name: getattr(self.counters, name) + by for name, by in more.items()}
        )
