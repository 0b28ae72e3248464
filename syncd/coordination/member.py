"""The methods that trainers and explorers share: registration, statuses, versions, the end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, Self

from syncd.coordination.broadcast.meeting import Meetings
from syncd.coordination.broadcast.offer import Offers
from syncd.coordination.leased_version import LeasedVersion
from syncd.coordination.participant import FirstReport, Participant, Report, become
from syncd.coordination.roster import Roster
from syncd.coordination.saved_state import StateFile
from syncd.coordination.versions import Versions
from syncd.coordination.waiting import Cancellation, Wait, Waits
from syncd.protocol.errors import (
    InvalidSettingsError,
    SaveFailedError,
    SyncdError,
    WaitTimeoutError,
)
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import checked_name, printable
from syncd.protocol.participants import SavedState
from syncd.protocol.policy import RunningStatus, SyncSettings, Version, given_or_default
from syncd.protocol.reports import ExplorerReport, TrainerReport
from syncd.storage.fsio import Storage
from syncd.storage.job import Job, registering
from syncd.storage.judge import Clock

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

Role = Literal["trainer", "explorer"]
#: The most seconds between two looks if the filesystem sends no events.
POLL: Final = 0.5


@dataclass(frozen=True, slots=True)
class Module:
    """A participant as others see it."""

    role: Role
    name: str
    status: RunningStatus
    alive: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Seams:
    """Substitutes that tests put in place of the real thing.

    Attributes:
        storage: the shared storage; by default the job directory's.
        clock: seconds, monotonic.
        wall: seconds since the epoch, for people.
        poll: the most seconds between two looks if the filesystem sends no events.
    """

    storage: Storage | None = None
    clock: Clock = time.monotonic
    wall: Clock = time.time
    poll: float = POLL


class Member(Generic[Report]):
    """One participant of a job, and its knowledge of the others; through files alone.

    Promised: it counts as live until it is closed or its process dies; after a death it counts as
    dead a lease time later. No other live participant has its name, and only it writes its status.
    A wait always restores the status at its end. No version ever goes back. Not promised: that
    others see a change at once: storage that caches is asked again each :data:`POLL` seconds.

    Methods block. They may be called from several threads, but only one wait runs at a time: a
    wait's timeout includes the time that it queues, and it may end as WaitTimeoutError. A fork of
    the process is no participant, and must register itself.

    Args:
        job_dir: the job directory.
        role: its role.
        name: its name, unique among the live participants of its role.
        settings: who syncs when, and how long to wait.
        memory_dir: the second job directory, which has the versions (method ``memory``).
        seams: for tests.
        path: gives the path of its report.
        first: makes its first report from its session.

    Raises:
        NameTakenError: a live participant has the name; finding out may take a lease time.
        JobUnavailableError: the job directory is missing or cannot be written.
        NoRoomError: its disk is full.
        InvalidSettingsError: the name cannot be part of a file name.
    """

    def __init__(
        self,
        job_dir: str | Path,
        role: Role,
        name: str,
        *,
        settings: SyncSettings | None,
        memory_dir: str | Path | None,
        seams: Seams | None,
        path: Callable[[JobLayout], Path],
        first: FirstReport[Report],
    ) -> None:
        self.role: Role = role
        self.name = checked_name(name, f"the {role}'s name")
        self.settings = given_or_default("settings", SyncSettings, settings)
        seams = seams or Seams()
        self._clock = seams.clock
        self._wall = seams.wall
        self._compared: set[str | None] = set()
        self._job = job = Job.at(Path(job_dir).absolute(), seams.storage)
        layout = job.layout
        lease_time = job.open().lease_time
        self._poll = min(seams.poll, lease_time / 4)
        self._waits = Waits(name, self._worth_a_look, poll=self._poll, clock=seams.clock)
        self._offers = Offers(job)
        self._meetings = Meetings(job)
        self._state = StateFile(job, layout.saved_state(role, name))
        with registering(layout), ExitStack() as stack:
            job.storage.make_folder(layout.offer.parent, below=layout.state)
            self._me: Participant[Report] = Participant(
                job, role, name, lease_time, path=path(layout), first=first,
                clock=seams.clock, wall=seams.wall,
            )  # fmt: skip
            stack.callback(self._me.close)
            self._roster = Roster(job, lease_time, clock=seams.clock)
            stack.callback(self._roster.close)
            if memory_dir is None:
                self._versions = Versions(job, name, self._me.session, clock=seams.clock)
            else:
                self._versions = Versions(
                    Job.at(Path(memory_dir).absolute()), name, None, clock=seams.clock
                )
            stack.callback(self._versions.close)
            self._stack = stack.pop_all()

    @property
    def session_id(self) -> str:
        """This process's heartbeat in the job, which leases may name."""
        return self._me.session.id

    @property
    def is_ours(self) -> bool:
        """True if this process registered it; False in a fork."""
        return self._me.is_ours

    # -- participants -------------------------------------------------------------------------

    def add_module(self) -> None:
        """Register again: construction did it first.

        For a participant that was paused for longer than a lease.

        Raises:
            NameTakenError: another participant has taken the name meanwhile.
        """
        self._me.update()

    def modules(self) -> list[Module]:
        """All registered participants whose reports are still there, and whether they live."""
        found = [
            Module("explorer", one.name, RunningStatus(one.status), self._lives(one))
            for one in self._roster.explorers()
        ]
        trainer = self._roster.trainer()
        if trainer is not None:
            status = RunningStatus(trainer.status)
            name = trainer.name or "trainer"
            found.append(Module("trainer", name, status, self._lives(trainer)))
        return found

    def all_modules_gone(self) -> bool:
        """True if no other participant lives."""
        us = (self.role, self.name)
        return not any(one.alive for one in self.modules() if (one.role, one.name) != us)

    def _lives(self, report: ExplorerReport | TrainerReport) -> bool:
        if report.session is None:
            return report.status != RunningStatus.STOPPED.value
        return self._roster.is_alive(report.session)

    # -- statuses ------------------------------------------------------------------------------

    def get_trainer_status(self) -> RunningStatus:
        """The trainer's status; stopped before the first trainer, and after the trainer died."""
        return self._roster.trainer_status()

    def trainer_requires_weight_sync(self) -> bool | None:
        """True if the trainer waits for a transfer; None if it has stopped."""
        status = self._roster.trainer_status()
        return None if status is RunningStatus.STOPPED else status is RunningStatus.REQUIRE_SYNC

    def get_explorer_status_counts(self) -> dict[RunningStatus, int]:
        """The number of explorers by status; the dead are not counted."""
        return self._roster.explorer_counts()

    # -- versions ------------------------------------------------------------------------------

    def get_latest_model_version(self) -> Version | None:
        """The version that explorers should serve; None before the first."""
        return self._versions.newest()

    def get_latest_model_path(self, *, use_huggingface: bool = False) -> Path | str | None:
        """The location of the newest weights.

        Args:
            use_huggingface: True for the version's folder, a complete Hugging Face model; False for
                the folder of the trainer's shards, or None if they are pruned. For a version of
                kind ``remote`` both are its remote path, a string.
        """
        return self._versions.path(use_huggingface=use_huggingface)

    def get_model_state_dict_iterator(
        self, version: Version | None = None
    ) -> Generator[tuple[str, Tensor], None, None]:
        """A version's tensors, one at a time and in host memory.

        The version is leased from the first tensor to the last, or until the iterator is closed.

        Args:
            version: for example a wait's result; None for the newest version at the call.

        Raises:
            VersionGoneError: that version was retired: there is a newer one to wait for.
            VerificationError: a tensor differs from the manifest.
            EngineMismatchError: the version has no weights here.
        """
        yield from self._versions.stream(version)

    def get_state_dict_meta(
        self, version: Version | None = None
    ) -> list[tuple[str, str, tuple[int, ...]]]:
        """Name, dtype (``torch.bfloat16``) and shape of each tensor of a version.

        Args:
            version: None for the newest.

        Raises:
            VersionGoneError: that version was retired.
        """
        return self._versions.metadata(version)

    def hold(self, version: Version | LeasedVersion) -> LeasedVersion:
        """Hold a version: its files stay until it is released, before this is closed.

        Args:
            version: the version; or one that this participant holds already, to hold it once more.

        Raises:
            VersionGoneError: it was retired, or is not visible here yet: take the newer one.
            VerificationError: its manifest is damaged.
        """
        if isinstance(version, LeasedVersion):
            return self._versions.holds.hold_again(version)
        return self._versions.holds.hold(version.sequence)

    def set_model_state_dict_with_step_num(
        self,
        step: int | None = None,
        world_size: int | None = None,
        *,
        timeout: float | None = None,
        cancel: Cancellation | None = None,
    ) -> Version | None:
        """Have a step that is on disk published, wait for that, and return its version.

        If LATEST already has that step, it returns that version, even if the step was saved again
        since. If the save in the step folder is not complete yet, it waits for it.

        Args:
            step: the step; None for the newest version, without waiting.
            world_size: how many shards there must be; None if the save is certainly whole.
            timeout: seconds; the settings' ``sync_timeout`` by default.
            cancel: ends the wait from another thread.

        Raises:
            SaveNotReadyError: a shard is missing; or the step has no folder, and the pointer is as
                it was.
            SaveFailedError: the daemon has refused the save.
            WaitTimeoutError: it was not published in time.
            InvalidSettingsError: an explorer asks for this while a trainer works, or while other
                explorers follow the job, which would get the step too.
        """
        if step is None:
            return self._versions.newest()
        if world_size is not None:
            self._versions.check_shards(step, world_size)
        with self._wait(timeout, cancel) as wait:
            is_on_disk = False
            while True:
                newest = self._versions.newest()
                if newest is not None and newest.step == step:
                    return newest
                if not is_on_disk:
                    self._versions.check_on_disk(step)
                    is_on_disk = True
                if self._versions.pointed() != step:
                    self._point(step)
                if self._versions.is_refused(step):
                    raise SaveFailedError(
                        f"step {step} cannot be published: see "
                        f"{self._versions.job.layout.quarantine}"
                    )
                if not wait.more():
                    raise WaitTimeoutError(
                        f"step {step} was not published in {self._versions.job.layout.root} in "
                        f"time; {self._versions.daemon_hint()}"
                    )

    def _point(self, step: int) -> None:
        """Make the pointer name a step."""
        self._versions.point(step)

    # -- the state to resume from ----------------------------------------------------------------

    def save_state(self, iteration: int, state: Mapping[str, Any]) -> None:
        """Save this participant's latest iteration and state (JSON), atomically.

        Raises:
            InvalidSettingsError: the state is not JSON, or could not be read again: it is nested
                too deep, or too long.
            NameTakenError: another participant has taken the name meanwhile; its saved state stays.
            CancelledError: this participant is closed.
            OSError: storage failed; the previous state stays.
        """
        self._me.check()
        self._state.save(iteration, state)

    def load_state(self, role: Role | None = None, name: str | None = None) -> SavedState | None:
        """The state that a participant saved last; by default this participant's own.

        A state outlives its participant. You may read another participant's state while it works;
        it may save a newer one at any time.

        Args:
            role: another participant's role; ``trainer`` is the job's trainer, under any name.
            name: the explorer's name, if the role is ``explorer``.

        Returns:
            Its iteration and its state; None before the first save, or if nobody had the name.

        Raises:
            InvalidSettingsError: a name without a role, an explorer without a name, no such role,
                or a name that cannot be part of a file name.
            RecordError: the file is torn, and so is its previous copy.
            ProtocolMismatchError: a newer protocol wrote it.
            OSError: storage failed.
        """
        if role is None and name is None:
            return self._state.load()
        if role == "explorer" and name is not None:
            checked_name(name, "the explorer's name")
        elif role != "trainer":
            raise InvalidSettingsError(
                f"role {role!r} and name {name!r} name no saved state: load_state() is for your "
                "own, load_state('trainer') and load_state('explorer', NAME) are for others'"
            )
        path = self._job.layout.saved_state(role, name or "")
        return StateFile(self._job, path).load()

    # -- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        """End all waits, report that this participant has stopped, and give its name up.

        Safe to call twice; in a fork it does nothing. Without it, others notice the participant's
        end only a lease time later.
        """
        if not self.is_ours:
            return
        with self._waits.ended():
            if self._me.record.status != RunningStatus.STOPPED.value:
                try:
                    become(self._me, RunningStatus.STOPPED)
                except (OSError, SyncdError) as error:
                    log.warning("%s cannot announce its stop: %s", self.name, error)
            try:
                self._stack.close()
            except OSError as error:
                log.warning("%s will count as dead after one lease time: %s", self.name, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(
        self, timeout: float | None, cancel: Cancellation | None
    ) -> AbstractContextManager[Wait]:
        """One wait, of at most the settings' ``sync_timeout`` by default."""
        self._me.check_process()
        return self._waits.one(self.settings.sync_timeout if timeout is None else timeout, cancel)

    def _is_there(self, session: str) -> bool:
        """True if a session has a heartbeat file, as a process that was just killed still has."""
        return self._job.storage.exists(self._job.layout.session(session))

    def _trainer_there(self) -> TrainerReport | None:
        """The trainer's report, without the roster, which would watch its heartbeat from now on."""
        try:
            found = self._job.read(TrainerReport, self._job.layout.trainer_report)
            stopped = found is None or found.status == RunningStatus.STOPPED.value
            if found is None or stopped or not self._is_there(found.session or ""):
                return None
        except (OSError, SyncdError) as error:
            log.debug("the trainer cannot be looked at yet: %s", error)  # each wait looks again
            return None
        return found

    def _compare_settings(
        self, trainer: TrainerReport, explorer: ExplorerReport, other: str | None
    ) -> str:
        """Warn once, as soon as both are there, if the two sides have different sync settings.

        Args:
            trainer: the trainer's report.
            explorer: the explorer's report; one of the two is this participant's own.
            other: the session of the other participant.

        Returns:
            The differences; empty if there are none, or one side has no settings.
        """
        if trainer.sync is None or explorer.sync is None:
            return ""
        unlike = trainer.sync.unlike(explorer.sync)
        if unlike and other not in self._compared:
            log.warning(
                "trainer %s and explorer %s have different SyncSettings, and may wait for each "
                "other in vain: %s; give both the same",
                printable(trainer.name or ""),
                printable(explorer.name),
                unlike,
            )
        self._compared.add(other)
        return unlike

    def _worth_a_look(self) -> dict[Path, frozenset[str]]:
        """Folder → names in it whose change may end a wait."""
        return {self._versions.job.layout.state: frozenset({self._versions.job.layout.latest.name})}
