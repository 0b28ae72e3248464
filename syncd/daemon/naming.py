"""The names of tensors in versions: the hub's names, or the names of the trainer's module.

A job keeps the names of its newest version, because its explorers were started for these names.
LATEST records the choice, because adapters and remote versions do not show it. A new job gets the
hub's names if all its live explorers accept them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from syncd.protocol.amounts import few
from syncd.protocol.names import NAME_MAP, printable
from syncd.protocol.records import Latest, Manifest, Names
from syncd.protocol.tensor_names import EMPTY_MAP
from syncd.protocol.version_events import TrainerNames, VersionNames
from syncd.storage.job import OF_OTHERS, Job
from syncd.storage.judge import LOOKS_PER_LEASE, Clock, Judge, Liveness, Lookout


@dataclass
class Naming:
    """Chooses the names of a job's next version.

    :meth:`look` and :meth:`choose` raise OSError if storage does not answer.

    Attributes:
        newest: the names of the newest version; None before the first version, or if its hub names
            and trainer names are equal.
        change: the change of names that came with the newest version, if any.
    """

    job: Job
    lease_time: float
    clock: Clock

    def __post_init__(self) -> None:
        judge = Judge(self.job.storage, self.lease_time, self.clock, counts_pauses=True)
        self._often = self.lease_time / LOOKS_PER_LEASE
        self._lookout = Lookout(judge, self.job.layout, tick=self._often, clock=self.clock)
        self._looked_at = -math.inf
        self._kept: Names | None = None
        self._is_new = True
        self._why = ""
        self.newest: Names | None = None
        self.change: VersionNames | None = None

    def look(self) -> None:
        """Before the first version, find dead explorers, so that :meth:`choose` ignores them."""
        if self._is_new and self.clock() >= self._looked_at + self._often:
            self._without()

    def choose(self, told: Names | None) -> Names:
        """The names in the next version; ``told`` is the setting. If None, the daemon chooses."""
        self._why = ""
        if told is not None:
            return told
        if self._kept is not None or not self._is_new:
            return self._kept or "trainer"
        without = self._without()
        if not without:
            return "hub"
        shown = few([printable(name) for name in without])
        self._why = f"{shown} did not report support for the hub's names"
        return "trainer"

    def kept_with(self, manifest: Manifest) -> Names | None:
        """The names that later versions keep if the version of ``manifest`` is published."""
        return manifest.names if _differ(manifest) else self._kept

    def takes_over(self, latest: Latest | None) -> None:
        """Adopt the names from the LATEST that the previous daemon wrote."""
        if latest is not None:
            self._kept = latest.names

    def serves(self, manifest: Manifest) -> None:
        """Record that this version is LATEST now."""
        self._is_new, self.change, self.newest = False, None, None
        if not _differ(manifest):
            return
        self.newest = manifest.names
        before, self._kept = self._kept, self.newest
        if before != self.newest:
            kind = TrainerNames if self._why else VersionNames
            self.change = kind(
                manifest.sequence, manifest.step, self.newest, before, self._why or None
            )
        self._why = ""

    def _without(self) -> list[str]:
        self._looked_at = self.clock()
        names = self.job.storage.names(self.job.layout.explorers)
        reports = [
            report for report in self.job.explorer_reports(names, OF_OTHERS) if not report.hub_names
        ]
        living = self._lookout.look({report.session for report in reports})
        return sorted(report.name for report in reports if living[report.session] is Liveness.ALIVE)


def _differ(manifest: Manifest) -> bool:
    """True if the hub's names and the trainer's names differ."""
    return any(file.name == NAME_MAP and file.size > EMPTY_MAP for file in manifest.files)
