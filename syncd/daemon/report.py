"""The daemon's report about itself, ``daemon.json``."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from syncd.daemon.arrival import Arrival
from syncd.daemon.blocks import Obstacle
from syncd.daemon.publish import Publisher
from syncd.daemon.signs import JobNotice
from syncd.daemon.telling.journal import lasting
from syncd.daemon.tenure import Tenure
from syncd.protocol.records import encode
from syncd.protocol.reports import DaemonReport, MergeProgress
from syncd.storage.judge import LOOKS_PER_LEASE
from syncd.storage.reserve import Reserve
from syncd.storage.sessions import this_process

#: The least seconds between two reports of progress.
_OFTEN: Final = 2.0


@dataclass
class Reporter:
    """Writes the report when something has changed, and at least three times per lease time.

    If the disk has no space for a report, the reserve is deleted.

    Attributes:
        arrival: of the announced save.
        pause: the id of the pause in force, if any.
        no_deltas: why the trainer may not save deltas; None if it may.
        fold: the progress of the fold, if any.
    """

    tenure: Tenure
    publisher: Publisher
    notice: JobNotice

    def __post_init__(self) -> None:
        self._clock = self.tenure.clock
        self.arrival = Arrival(self.tenure.session.lease_time, self._clock)
        self.pause: str | None = None
        self.no_deltas: str | None = "the daemon has just begun"
        self.fold: MergeProgress | None = None
        self._reported: DaemonReport | None = None
        self._reported_at = 0.0
        self._took = 0.0

    def report(self, state: str, detail: str = "", merge: MergeProgress | None = None) -> None:
        """Write the report, unless storage refuses it."""
        tenure, config, latest = self.tenure, self.publisher.config, self.publisher.latest
        served = f"v{latest.sequence} of step {latest.step}" if latest else "no version yet"
        self.notice.status(f"{served}; {state}{detail and f': {detail}'}")
        blocked, before, fold = tenure.blocks.current, self._reported, self.fold
        if before is not None and not self._may_say_more():
            merge, fold = merge and before.merge, fold and before.fold
        unpublished = self.arrival.waits(merges=state == "merging")
        tenure.meter.waits(blocked, unpublished.seconds if unpublished else 0)
        report = DaemonReport.model_validate(
            {
                "session": tenure.session.id,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "epoch": tenure.epoch.number,
                "state": state,
                "detail": detail,
                "sequence": latest.sequence if latest else None,
                "step": latest.step if latest else None,
                "paused": self.pause,
                "memory_dir": str(config.memory_dir) if config.memory_dir else None,
                "counters": tenure.journal.counters,
                "merge": merge,
                "builds": config.model_dump(),
                "names": self.publisher.naming.newest,
                "takes_deltas": self.no_deltas is None,
                "no_deltas": self.no_deltas,
                "fold": fold,
                "max_loading": config.max_loading,
                "pointer": config.pointer,
                "process": this_process(),
                "blocked": blocked,
                "unpublished": unpublished,
                "time": 0.0,
            }
        )
        now, path = self._clock(), tenure.job.layout.daemon_report
        often = tenure.session.lease_time / LOOKS_PER_LEASE
        if report == self._reported and now - self._reported_at < often:
            return
        self._reported, self._reported_at = report, now
        stamped = report.model_copy(update={"time": tenure.wall()})
        try:
            tenure.epoch.replace_file(path, encode(stamped))
        except OSError as error:
            what = lasting(f"cannot write {path}: {error}")
            tenure.blocks.meet("report", Obstacle.of(what, error))
            self._reported = None
            Reserve(tenure.job).relieve(error)
            with suppress(OSError):  # in place, for people: what is blocked is told nowhere else
                tenure.job.storage.write_over(path, encode(stamped))
        finally:
            self._took = self._clock() - now

    def _may_say_more(self) -> bool:
        """True if progress may be told again; reports take at most about 5% of the time."""
        return self._clock() - self._reported_at >= max(_OFTEN, 20 * self._took)
