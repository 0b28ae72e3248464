"""The trainer's waits until explorers serve a step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from syncd.coordination.leased_version import read_latest
from syncd.coordination.participant import Participant
from syncd.coordination.roster import Roster
from syncd.coordination.versions import Versions
from syncd.coordination.waiting import Wait
from syncd.protocol.errors import SyncdError
from syncd.protocol.policy import RunningStatus, Version
from syncd.protocol.records import SaveId
from syncd.protocol.reports import ResumedFrom, TrainerReport


@dataclass(frozen=True, slots=True)
class ServedStep:
    """The answer of ``wait_served``.

    Attributes:
        step: the step that was waited for.
        serving: the explorers that serve it, or a later step of this trainer; name → step.
        missing: the other ones; name → the reason. Empty if all serve it.
    """

    step: int
    serving: Mapping[str, int]
    missing: Mapping[str, str]


@dataclass
class ServedWaits:
    """The waits of one trainer, which remember the explorers that they have seen."""

    me: Participant[TrainerReport]
    roster: Roster
    versions: Versions
    _seen: set[str] = field(default_factory=set)

    def until_served(
        self,
        step: int,
        names: Collection[str],
        wait: Wait,
        save_id: SaveId | None,
        is_announced: Callable[[], bool | None],
    ) -> ServedStep:
        """See :meth:`.TrainerSynchronizer.wait_served`."""

        def serves(version: Version) -> bool:
            me, saved = self.me.record, SaveId.parse(version.save_id or "")
            if saved is None or saved.run != me.run_id:
                return me.resumed_from == ResumedFrom(step=step, save_id=version.save_id)
            return not save_id.is_newer_than(saved) if save_id else saved.step >= step

        while True:
            reason = None
            try:
                serving, missing, late = self._look(serves, names)
                if late:
                    reason = self._why_never(step, serves, is_announced())
            except (OSError, SyncdError) as error:  # the next look may succeed
                serving, missing, late = {}, dict.fromkeys(names, str(error)), [*names]
            if late and reason is None and not wait.more():
                reason = f"step {step} is not served in time; {self.versions.daemon_hint()}"
            if reason is not None or not late:
                missing |= {name: f"{missing[name]}; {reason}" for name in late}
                return ServedStep(step, serving, missing)
            self.versions.warn_without_daemon(f"waits until explorers serve step {step}")

    def _look(
        self, serves: Callable[[Version], bool], names: Collection[str]
    ) -> tuple[dict[str, int], dict[str, str], list[str]]:
        """Return those that serve the step, those that do not, and which of these may later."""
        stopped, reports = RunningStatus.STOPPED.value, self.roster.explorers()
        live = {one.name: one for one in reports if one.status != stopped or one.starting}
        self._seen |= live.keys()
        latest = read_latest(self.versions.job)
        serving: dict[str, int] = {}
        missing: dict[str, str] = {}
        late = []
        for name in names:
            report, failure = live.get(name), None
            if report is None:
                failure = "has ended" if name in self._seen else None
                missing[name] = failure or "has not started"
            else:
                newest = Version.of(report.newest(latest)) if latest else None
                held = report.served(None, None)
                if newest and held and held.save_id is None and held.sequence == newest.sequence:
                    held = newest  # as a Reader reports it
                if held and serves(held) and not report.fault:
                    serving[name] = held.step
                    continue
                failure, refused = report.fault, report.refused or ""
                # What it refused can be older.
                if newest and serves(newest):
                    of_newest = (f"v{newest.sequence}:", f"version {newest.sequence}:")  # 0.3's
                    failure = failure or (refused if refused.startswith(of_newest) else None)
                missing[name] = failure or report.starting or f"serves {held or 'no version yet'}"
            if failure is None:
                late.append(name)
        return serving, missing, late

    def _why_never(
        self, step: int, serves: Callable[[Version], bool], is_announced: bool | None
    ) -> str | None:
        """Why nobody will serve the step, unless the trainer saves again."""
        versions, resumed = self.versions, self.me.record.resumed_from
        if is_announced is False and (resumed is None or resumed.step != step):
            return f"step {step} is not saved for explorers"
        newest = versions.newest(tip=True)
        if not is_announced or (newest and serves(newest)) or versions.on_its_way() is not None:
            return None
        # The daemon may have published it just now.
        newest, outcome = versions.newest(sure=True, tip=True), versions.job.outcome(step)
        if newest and serves(newest):
            return None
        if outcome is not None and outcome.outcome == "quarantined":
            return f"step {step} is quarantined: {versions.job.refusal(step, outcome.identity)}"
        return f"LATEST names {newest} in place of step {step}"
