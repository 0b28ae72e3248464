"""What trainers and explorers have in common: registration, statuses, versions, the end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, Self

from syncd.coordination.leased_version import LeasedVersion
from syncd.coordination.participant import FirstReport, Participant, Report, become
from syncd.coordination.roster import Roster
from syncd.coordination.saved_state import StateFile
from syncd.coordination.transfer import Offers
from syncd.coordination.versions import Versions
from syncd.coordination.waiting import Cancellation, Wait, Waits
from syncd.coordination.weight_sync import Meetings
from syncd.protocol.errors import SaveFailedError, SyncdError, WaitTimeoutError
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import checked_name
from syncd.protocol.participants import SavedState
from syncd.protocol.policy import RunningStatus, SyncSettings, Version
from syncd.protocol.reports import ExplorerReport, TrainerReport
from syncd.storage.fsio import Storage
from syncd.storage.job import open_job
from syncd.storage.judge import Clock

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

Role = Literal["trainer", "explorer"]
#: Seconds between two looks where the filesystem sends no events, at most.
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
    """What tests put in place of the real thing.

    Attributes:
        storage: the shared storage; that of the job directory by default.
        clock: seconds, monotonic.
        wall: seconds since the epoch, for people.
        poll: seconds between two looks where the filesystem sends no events, at most.
    """

    storage: Storage | None = None
    clock: Clock = time.monotonic
    wall: Clock = time.time
    poll: float = POLL


class Member(Generic[Report]):
    """One participant of a job, and what it knows of the others; over files alone.

    Promised: it counts as live until it is closed or its process dies, and a lease time after that
    as dead, without having said so; its name is nobody else's; its status is its own to write; a
    wait puts the status back, however it ends; no version ever goes back. Not promised: that others
    see a change at once: storage that caches is asked again each :data:`POLL` seconds.

    Methods block. They may be called from several threads; of the waits, one goes on at a time: the
    time that it takes counts for the next one, and if it takes all of it that is WaitTimeoutError.
    A fork of the process has no part in it, and registers by itself.

    Args:
        job_dir: the job directory.
        role: what it is.
        name: its own, unique among the live ones of its role.
        settings: when who syncs, and how long a wait takes.
        memory_dir: the second job directory, where versions are (method ``memory``).
        seams: for tests.
        path: gives the path of its report.
        first: makes its first report from its session.

    Raises:
        NameTakenError: a live participant has the name; to know may take a lease time.
        JobUnavailableError: the job directory is missing or cannot be written.
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
        self.settings = settings or SyncSettings()
        seams = seams or Seams()
        self._clock = seams.clock
        self._layout = layout = JobLayout(Path(job_dir).absolute())
        self._storage = storage = seams.storage or Storage(layout.root)
        lease_time = open_job(storage, layout).lease_time
        storage.make_folder(layout.offer.parent, below=layout.state)
        self._poll = min(seams.poll, lease_time / 4)
        self._waits = Waits(name, self._worth_a_look, poll=self._poll, clock=seams.clock)
        self._offers = Offers(storage, layout)
        self._meetings = Meetings(storage, layout)
        self._state = StateFile(storage, layout, layout.saved_state(role, name))
        with ExitStack() as stack:
            self._me: Participant[Report] = Participant(
                storage, layout, role, name, lease_time, path=path(layout), first=first,
                clock=seams.clock, wall=seams.wall,
            )  # fmt: skip
            stack.callback(self._me.close)
            self._roster = Roster(storage, layout, lease_time, clock=seams.clock)
            stack.callback(self._roster.close)
            if memory_dir is None:
                self._versions = Versions(storage, layout, name, self._me.session)
            else:
                memory = JobLayout(Path(memory_dir).absolute())
                self._versions = Versions(Storage(memory.root), memory, name, None)
            stack.callback(self._versions.close)
            self._stack = stack.pop_all()

    @property
    def session_id(self) -> str:
        """This process's heartbeat in the job, which leases may name."""
        return self._me.session.id

    @property
    def is_ours(self) -> bool:
        """Whether this process made it: a fork has no part in it."""
        return self._me.is_ours

    # -- who there is --------------------------------------------------------------------------

    def add_module(self) -> None:
        """Register again: construction did it first.

        For a participant that was paused for longer than a lease.

        Raises:
            NameTakenError: another has taken the name meanwhile.
        """
        self._me.update()

    def modules(self) -> list[Module]:
        """All that have registered and are not collected, and whether they live."""
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
        """Whether no other participant lives."""
        us = (self.role, self.name)
        return not any(one.alive for one in self.modules() if (one.role, one.name) != us)

    def _lives(self, report: ExplorerReport | TrainerReport) -> bool:
        if report.session is None:
            return report.status != RunningStatus.STOPPED.value
        return self._roster.is_alive(report.session)

    # -- statuses ------------------------------------------------------------------------------

    def get_trainer_status(self) -> RunningStatus:
        """What the trainer does; stopped before the first one, and when it has died."""
        return self._roster.trainer_status()

    def trainer_requires_weight_sync(self) -> bool | None:
        """Whether the trainer waits for a transfer; None where it has stopped."""
        status = self._roster.trainer_status()
        return None if status is RunningStatus.STOPPED else status is RunningStatus.REQUIRE_SYNC

    def get_explorer_status_counts(self) -> dict[RunningStatus, int]:
        """How many explorers have which status; the dead are not counted."""
        return self._roster.explorer_counts()

    # -- versions ------------------------------------------------------------------------------

    def get_latest_model_version(self) -> Version | None:
        """The version that explorers should serve; None before the first."""
        return self._versions.newest()

    def get_latest_model_path(self, *, use_huggingface: bool = False) -> Path | str | None:
        """Where the newest weights are.

        Args:
            use_huggingface: the folder of the version, which is a complete Hugging Face model;
                without, that of the trainer's shards, or None where they are pruned. Of a version
                of kind ``remote`` both are its remote path, a string.
        """
        return self._versions.path(use_huggingface=use_huggingface)

    def get_model_state_dict_iterator(
        self, version: Version | None = None
    ) -> Generator[tuple[str, Tensor], None, None]:
        """A version's tensors, one at a time and in host memory.

        It is leased from the first one to the last, or until the iterator is closed.

        Args:
            version: the one that a wait has returned, say; None for the newest by then.

        Raises:
            VersionGoneError: that version was retired: there is a newer one to wait for.
            VerificationError: a tensor is not what the manifest says.
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

    def hold(self, version: Version) -> LeasedVersion:
        """Hold a version: its files stay until it is released, before this is closed.

        Raises:
            VersionGoneError: it was retired, or is not visible here yet: take the newer one.
            VerificationError: its manifest is damaged.
        """
        return self._versions.hold(version.sequence)

    def set_model_state_dict_with_step_num(
        self,
        step: int | None = None,
        world_size: int | None = None,
        *,
        timeout: float | None = None,
        cancel: Cancellation | None = None,
    ) -> Version | None:
        """Let a step that is on disk be published, wait for that, and return its version.

        Where LATEST is of that step already, that version is returned, also when the step has been
        saved again since.

        Args:
            step: the step; None for the newest version, without waiting.
            world_size: how many shards there must be; None for a save that is whole for certain.
            timeout: seconds; the settings' ``sync_timeout`` by default.
            cancel: ends the wait from another thread.

        Raises:
            SaveNotReadyError: a shard is missing.
            SaveFailedError: the daemon has refused the save.
            WaitTimeoutError: it was not published in time.
            InvalidSettingsError: an explorer asks for another step than the trainer's, which works.
        """
        if step is None:
            return self._versions.newest()
        if world_size is not None:
            self._versions.check_shards(step, world_size)
        with self._wait(timeout, cancel) as wait:
            while True:
                newest = self._versions.newest()
                if newest is not None and newest.step == step:
                    return newest
                if self._versions.pointed() != step:
                    self._point(step)
                if self._versions.is_refused(step):
                    raise SaveFailedError(
                        f"step {step} cannot be published: see {self._versions.layout.quarantine}"
                    )
                if not wait.more():
                    raise WaitTimeoutError(
                        f"step {step} was not published in {self._versions.layout.root} in time; "
                        "see `syncd status` whether a daemon works, and what it waits for"
                    )

    def _point(self, step: int) -> None:
        """Let the pointer name a step."""
        self._versions.point(step)

    # -- what is needed to resume ----------------------------------------------------------------

    def save_state(self, iteration: int, state: Mapping[str, Any]) -> None:
        """Save this participant's latest iteration and state (JSON), atomically.

        Raises:
            NameTakenError: another has taken the name meanwhile; what it saved stays.
        """
        self._me.check()
        self._state.save(iteration, state)

    def load_state(self) -> SavedState | None:
        """What it saved last; None before the first."""
        return self._state.load()

    # -- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        """End all waits, say that this participant has stopped, and give its name up.

        Safe to call twice, and in a fork, where it does nothing. Not called, its death is noticed a
        lease time later.
        """
        if not self.is_ours:
            return
        with self._waits.ended():
            if self._me.record.status != RunningStatus.STOPPED.value:
                try:
                    become(self._me, RunningStatus.STOPPED)
                except (OSError, SyncdError) as error:
                    log.warning("%s cannot say that it stops: %s", self.name, error)
            try:
                self._stack.close()
            except OSError as error:
                log.warning("%s counts as dead a lease time from now: %s", self.name, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(
        self, timeout: float | None, cancel: Cancellation | None
    ) -> AbstractContextManager[Wait]:
        """One wait, of at most the settings' ``sync_timeout`` where no other time is said."""
        self._me.check_process()
        return self._waits.one(self.settings.sync_timeout if timeout is None else timeout, cancel)

    def _worth_a_look(self) -> dict[Path, frozenset[str]]:
        """Folder → names in it whose change may end a wait."""
        return {self._versions.layout.state: frozenset({self._versions.layout.latest.name})}
