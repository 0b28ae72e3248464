"""The daemon's report about itself, ``daemon.json``."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path
from typing import Final

from syncd.daemon.notify import JobNotice
from syncd.daemon.publish import Publisher
from syncd.daemon.telling.journal import Journal
from syncd.protocol.events import StateUnwritten
from syncd.protocol.layout import JobLayout
from syncd.protocol.records import encode
from syncd.protocol.reports import DaemonReport, MergeProgress
from syncd.storage.epoch import Epoch
from syncd.storage.judge import LOOKS_PER_LEASE, Clock
from syncd.storage.repeats import Repeats
from syncd.storage.reserve import Reserve
from syncd.storage.sessions import Session

log = logging.getLogger(__name__)

#: The least seconds between two reports of progress.
_OFTEN: Final = 2.0


class Reporter:
    """Writes the report when something has changed, and at least three times per lease time.

    If the disk has no space for a report, ``reserve`` is deleted.

    Attributes:
        pause: the id of the pause in force, if any.
    """

    def __init__(
        self,
        layout: JobLayout,
        epoch: Epoch,
        session: Session,
        publisher: Publisher,
        journal: Journal,
        notice: JobNotice,
        reserve: Reserve,
        memory_dir: Path | None,
        *,
        clock: Clock,
        wall: Clock,
    ) -> None:
        self._layout = layout
        self._epoch = epoch
        self._session = session
        self._publisher = publisher
        self._journal = journal
        self._notice = notice
        self._reserve = reserve
        self._memory_dir = memory_dir
        self._clock = clock
        self._wall = wall
        self.pause: str | None = None
        self._reported: DaemonReport | None = None
        self._reported_at = 0.0
        self._took = 0.0
        self._repeats = Repeats(clock=clock)

    def report(self, state: str, detail: str = "", merge: MergeProgress | None = None) -> None:
        """Write the report; if storage refuses it, log the error."""
        latest = self._publisher.latest
        served = f"version {latest.sequence} of step {latest.step}" if latest else "no version yet"
        self._notice.status(f"{served}; {state}{detail and f': {detail}'}")
        report = DaemonReport.model_validate(
            {
                "session": self._session.id,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "epoch": self._epoch.number,
                "state": state,
                "detail": detail,
                "sequence": latest.sequence if latest else None,
                "step": latest.step if latest else None,
                "paused": self.pause,
                "memory_dir": str(self._memory_dir) if self._memory_dir else None,
                "counters": self._journal.counters,
                "merge": merge,
                "builds": self._publisher.config.model_dump(),
                "names": self._publisher.naming.newest,
                "pointer": self._publisher.config.pointer,
                "time": 0.0,
            }
        )
        now = self._clock()
        often = self._session.lease_time / LOOKS_PER_LEASE
        if report == self._reported and now - self._reported_at < often:
            return
        self._reported, self._reported_at = report, now
        stamped = report.model_copy(update={"time": self._wall()})
        try:
            self._epoch.replace_file(self._layout.daemon_report, encode(stamped))
        except OSError as error:
            if self._repeats.due("report"):  # a full disk, for example, fails at each round
                StateUnwritten(self._layout.daemon_report, error).tell(log)
            self._reported = None
            self._reserve.relieve(error)
        else:
            self._repeats.forget("report")
        finally:
            self._took = self._clock() - now

    def may_say_more(self) -> bool:
        """True if progress may be reported again; reports take at most about 5% of the time."""
        return self._clock() - self._reported_at >= max(_OFTEN, 20 * self._took)
