"""The methods that trainers and explorers share: registration, statuses, versions, closing."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NamedTuple

from syncd.checkpoint.tensor_rules import DTYPES
from syncd.closing import Closing
from syncd.coordination.broadcast.offer import Offers
from syncd.coordination.leased_version import LeasedVersion, read_latest
from syncd.coordination.participant import FirstReport, Participant, Report, StateFile, become
from syncd.coordination.roster import Roster
from syncd.coordination.versions import Versions
from syncd.coordination.waiting import Cancellation, Wait, Waits
from syncd.protocol.errors import (
    EngineMismatchError,
    InvalidSettingsError,
    SaveFailedError,
    SyncdError,
    WaitTimeoutError,
)
from syncd.protocol.events import JobReplaced
from syncd.protocol.mirrored import Mirroring
from syncd.protocol.names import checked_name, printable
from syncd.protocol.policy import RunningStatus, SyncSettings, Version, given_or_default
from syncd.protocol.reports import ExplorerReport, SavedState, TrainerReport
from syncd.storage.fsio import Storage
from syncd.storage.job import Identity, Job, check_on_disk, registering
from syncd.storage.judge import Clock
from syncd.torch_extra import require_torch

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

Role = Literal["trainer", "explorer"]
#: safetensors' name of a dtype → torch's.
_TORCH_NAMES: Final = {name: f"torch.{torch_name}" for torch_name, (name, _) in DTYPES.items()}
#: The most seconds between two checks for changed files.
POLL: Final = 0.5


@dataclass(frozen=True, slots=True)
class Module:
    """A participant as other participants see it."""

    role: Role
    name: str
    status: RunningStatus
    alive: bool


class Doubles(NamedTuple):
    """Substitutes that tests use for the real storage, clocks and poll interval."""

    storage: Storage | None = None
    clock: Clock = time.monotonic
    wall: Clock = time.time
    poll: float = POLL


class Member(Closing, Generic[Report]):
    """One participant of a job. It communicates with the other participants only through files.

    Promised:

    - A participant counts as live until it is closed, or until one lease time after its process
      died. Nobody else writes its status.
    - When a wait ends, the wait restores the participant's status.
    - A participant never gets an older version after a newer version.

    Not promised: that others see a change at once. They look again after at most :data:`POLL`
    seconds, and storage can then still show them the old content.

    Methods block. Several threads may call them, but only one wait runs at a time. A fork of the
    process is not a participant: it must register itself.

    The ``timeout`` of a wait is in seconds, and includes the time until earlier waits end. The
    default is the settings' ``sync_timeout``. Another thread can end a wait with ``cancel``; the
    wait then raises CancelledError.

    Args:
        job_dir: the job directory.
        name: unique among the live participants of the role.
        settings: who syncs when, and how long to wait.
        memory_dir: the second job directory, which has the versions (sync method ``memory``).
        first: makes the participant's first report from the session's id.

    Raises:
        NameTakenError: a live participant has the name. This check can take one lease time.
        JobUnavailableError: the job directory is missing or cannot be written.
        NoRoomError: the disk of the job directory is full.
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
        doubles: Doubles | None,
        first: FirstReport[Report],
    ) -> None:
        self.role: Role = role
        self.name = checked_name(name, f"the {role}'s name")
        self.settings = given_or_default("settings", SyncSettings, settings)
        doubles = doubles or Doubles()
        self._clock = doubles.clock
        self._wall = doubles.wall
        self._compared: set[str | None] = set()
        self._job = job = Job.at(Path(job_dir).absolute(), doubles.storage)
        layout = job.layout
        lease_time = job.open().lease_time
        self._poll = min(doubles.poll, lease_time / 4)
        self._waits = Waits(name, self._worth_a_look, poll=self._poll, clock=doubles.clock)
        self._offers = Offers(job)
        self._state = StateFile(job, layout.saved_state(role, name))
        with registering(layout), ExitStack() as stack:
            job.storage.make_folder(layout.offer.parent, below=layout.state)
            self._me: Participant[Report] = Participant(
                job, role, name, lease_time,
                path=layout.trainer_report if role == "trainer" else layout.explorer(name),
                first=first,
                clock=doubles.clock, wall=doubles.wall,
            )  # fmt: skip
            stack.callback(self._me.close)
            self._roster = Roster(job, lease_time, clock=doubles.clock)
            stack.callback(self._roster.close)
            if memory_dir is None:
                self._versions = Versions(job, name, self._me.session, clock=doubles.clock)
            else:
                self._versions = Versions(
                    Job.at(Path(memory_dir).absolute()), name, None, clock=doubles.clock
                )
            stack.callback(self._versions.close)
            jobs = dict.fromkeys((job, self._versions.job))
            self._identities = [Identity(one) for one in jobs]
            self._stack = stack.pop_all()

    @property
    def session_id(self) -> str:
        """The id of this participant's session in the job."""
        return self._me.session.id

    @property
    def is_ours(self) -> bool:
        """True if this process registered this participant; False in a fork."""
        return self._me.is_ours

    # -- participants -------------------------------------------------------------------------

    def add_module(self) -> None:
        """Register again after this process was paused for longer than a lease time.

        Raises:
            NameTakenError: another participant has taken the name meanwhile.
        """
        self._me.update()

    def modules(self) -> list[Module]:
        """The live participants, and the participants whose status is ``stopped``."""
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
        """True if no other participant is live."""
        us = (self.role, self.name)
        return not any(one.alive for one in self.modules() if (one.role, one.name) != us)

    def _lives(self, report: ExplorerReport | TrainerReport) -> bool:
        if report.session is None:
            return report.status != RunningStatus.STOPPED.value
        return self._roster.is_alive(report.session)

    # -- statuses ------------------------------------------------------------------------------

    def get_trainer_status(self) -> RunningStatus:
        """The trainer's status; ``stopped`` if no trainer has registered or the trainer died."""
        return self._roster.trainer_status()

    def trainer_requires_weight_sync(self) -> bool | None:
        """True if the trainer waits for a transfer; None if the trainer has stopped."""
        status = self._roster.trainer_status()
        return None if status is RunningStatus.STOPPED else status is RunningStatus.REQUIRE_SYNC

    def get_explorer_status_counts(self) -> dict[RunningStatus, int]:
        """The number of explorers by status; dead explorers are not counted."""
        found = [report.status for report in self._roster.explorers()]
        return {status: found.count(status.value) for status in RunningStatus}

    # -- versions ------------------------------------------------------------------------------

    def get_latest_model_version(self) -> Version | None:
        """The version that explorers should serve; None before the first version."""
        return self._versions.newest()

    def get_latest_model_path(self, *, use_huggingface: bool = False) -> Path | str | None:
        """The location of the newest weights; None if no version is published.

        With ``use_huggingface`` this is the version's folder, a complete Hugging Face model.
        Otherwise it is the folder of the trainer's shards, or None if the shards were pruned. For a
        version of kind ``remote`` it is always the remote path, a string.
        """
        job = self._versions.job
        newest = read_latest(job)
        if newest is None:
            return None
        if newest.kind == "remote":
            with self._versions.held() as version:
                return version.remote_path if version else None
        if use_huggingface:
            return job.layout.version(newest.sequence)
        actor = job.layout.actor(newest.step)
        return actor if job.storage.exists(actor) else None

    def get_model_state_dict_iterator(
        self, version: Version | None = None
    ) -> Generator[tuple[str, Tensor], None, None]:
        """The tensors of a version, by default the newest, one at a time and in host memory.

        The version is leased until the last tensor, or until the iterator is closed.

        Raises:
            VersionGoneError: the version was pruned. Wait for a newer version.
            VerificationError: a tensor differs from the manifest.
            EngineMismatchError: the version's folder contains no weights.
        """
        require_torch("reading a version's tensors")
        # Only callers that want tensors import torch.
        from syncd.coordination.tensors import stream  # noqa: PLC0415

        with self._versions.held(version) as held:
            if held is None:
                return
            if not held.manifest.tensors:
                raise EngineMismatchError(
                    f"v{held.sequence} (step {held.step}) is {held.kind}: its weights are "
                    "not in its folder. Load the weights from its remote_path"
                )
            yield from stream(held)

    def get_state_dict_meta(
        self, version: Version | None = None
    ) -> list[tuple[str, str, tuple[int, ...]]]:
        """Name, dtype (for example ``torch.bfloat16``) and shape of each tensor of a version.

        By default this is the newest version. The list is empty if no version exists.

        Raises:
            VersionGoneError: the version was pruned.
        """
        with self._versions.held(version) as held:
            return [
                (entry.name, _TORCH_NAMES.get(entry.dtype, entry.dtype), entry.shape)
                for entry in (held.manifest.tensors if held else ())
            ]

    def tell_mirror(self, state: Mirroring, fault: str | None) -> None:
        """Report that this participant is a mirror.

        Args:
            state: what it does.
            fault: the reason why it cannot go on; None if it can.

        Raises:
            SyncdError, OSError: the report was not written.
        """
        self._me.update(mirror=state, fault=fault)

    def hold(self, version: Version | LeasedVersion) -> LeasedVersion:
        """Hold a version: its files stay until the caller releases it.

        Release the version before you close this participant. To hold a held version once more,
        pass its :class:`LeasedVersion`.

        Raises:
            VersionGoneError: the version was pruned, or is not visible yet. Hold the newest.
            VerificationError: the version's manifest is damaged.
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
        """Request the publication of a step on disk; wait for it, and return the version.

        If ``step`` is None, the method returns the newest version without waiting. If LATEST
        already names the step, the method returns that version at once, even if the step was saved
        again since. Otherwise the method waits until the save is complete and published.
        ``world_size`` is the number of shards that must already be in the step folder; None skips
        this check.

        Raises:
            SaveNotReadyError: a shard or the step's folder is missing. The pointer was not changed.
            SaveFailedError: the daemon has refused the save.
            WaitTimeoutError: the step was not published within ``timeout``.
            InvalidSettingsError: the daemon follows another pointer (``syncd run --pointer``). An
                explorer also gets this error while a trainer runs or another explorer follows the
                job.
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
                    check_on_disk(self._versions.job, step)
                    is_on_disk = True
                if self._versions.pointed() != step:
                    self._versions.check_may_point(step)
                    self._point(step)
                if self._versions.is_refused(step):
                    raise SaveFailedError(
                        f"step {step} was quarantined; its file in "
                        f"{self._versions.job.layout.quarantine} gives the reason"
                    )
                if not wait.more():
                    raise WaitTimeoutError(
                        f"step {step} was not published in {self._versions.job.layout.root} in "
                        f"time; {self._versions.daemon_hint()}"
                    )

    def _point(self, step: int) -> None:
        self._versions.point(step)

    # -- the state to resume from ----------------------------------------------------------------

    def save_state(self, iteration: int, state: Mapping[str, Any]) -> None:
        """Save this participant's latest iteration and state (JSON), atomically.

        Raises:
            InvalidSettingsError: the state is not JSON, is nested too deep, or is too long.
            NameTakenError: another participant has taken the name meanwhile. Nothing was saved.
            CancelledError: this participant is closed.
            OSError: storage failed. The previous state is kept.
        """
        self._me.check()
        self._state.save(iteration, state)

    def load_state(self, role: Role | None = None, name: str | None = None) -> SavedState | None:
        """The newest state that a participant saved; None if it saved no state.

        By default this is the participant's own state. For another participant's state, give its
        ``role``, and for an explorer also its ``name``. A state outlives its participant.

        Raises:
            InvalidSettingsError: role and name do not identify a participant, or the name cannot be
                part of a file name.
            RecordError: a state was saved, but neither it nor the previous state can be read.
            ProtocolMismatchError: a newer protocol wrote the file.
            OSError: storage failed.
        """
        if role is None and name is None:
            return self._state.load()
        if role == "explorer" and name is not None:
            checked_name(name, "the explorer's name")
        elif role != "trainer":
            raise InvalidSettingsError(
                f"no saved state can have role {role!r} and name {name!r}. For your own state, "
                "call load_state(). For the state of another participant, call "
                "load_state('trainer') or load_state('explorer', NAME)"
            )
        return StateFile(self._job, self._job.layout.saved_state(role, name or "")).load()

    # -- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        """End all waits, report that this participant has stopped, and give its name up.

        Safe to call twice; does nothing in a fork. Without this call, others notice the end of the
        process one lease time later.
        """
        if not self.is_ours:
            return
        with self._waits.ended():
            starts = getattr(self._me.record, "starting", None) is not None
            if starts or self._me.record.status != RunningStatus.STOPPED.value:
                try:
                    become(self._me, RunningStatus.STOPPED, starting=None)
                    if isinstance(self._me.record, TrainerReport):
                        self._versions.copy_report(self._me.record)
                except (OSError, SyncdError) as error:
                    log.warning("%s cannot report that it has stopped: %s", self.name, error)
            try:
                self._stack.close()
            except OSError as error:
                log.warning(
                    "%s cannot end its session, and will count as dead after one lease time: %s",
                    self.name,
                    error,
                )

    def _wait(
        self, timeout: float | None, cancel: Cancellation | None
    ) -> AbstractContextManager[Wait]:
        self._me.check_process()
        return self._waits.one(self.settings.sync_timeout if timeout is None else timeout, cancel)

    def _is_there(self, session: str) -> bool:
        """True if a session has a heartbeat file, which a killed process leaves behind."""
        return self._job.storage.exists(self._job.layout.session(session))

    def _trainer_there(self) -> TrainerReport | None:
        with suppress(OSError, SyncdError):  # each wait looks again
            report = self._job.read(TrainerReport, self._job.layout.trainer_report)
            stopped = report is None or report.status == RunningStatus.STOPPED.value
            if report is not None and not stopped and self._is_there(report.session or ""):
                return report
        return None

    def _compare_settings(
        self, trainer: TrainerReport, explorer: ExplorerReport, other: str | None
    ) -> str:
        """Return the differences between the settings; warn once for each ``other`` session."""
        if trainer.sync is None or explorer.sync is None:
            return ""
        unlike = trainer.sync.unlike(explorer.sync)
        if unlike and other not in self._compared:
            log.warning(
                "trainer %s and explorer %s have different SyncSettings, and may wait for each "
                "other in vain: %s. Give trainer and explorer the same settings",
                printable(trainer.name or ""),
                printable(explorer.name),
                unlike,
            )
        self._compared.add(other)
        return unlike

    def _changes_of_job(self) -> Iterator[bool]:
        """Go on in the job that is at the path now, with its lease time.

        Yields True, once, if it is another job, and False for a restored one.
        """
        for identity in self._identities:
            if (change := identity.changed()) is None:
                continue
            found, is_another = change
            if is_another:
                JobReplaced(identity.job.layout.root, self.name).tell(log)
            if identity.job is self._versions.job:
                self._versions.begin_again(found.lease_time, is_another=is_another)
            if identity.job is self._job:
                self._me.begin_again(found.lease_time)
                self._roster.begin_again(found.lease_time)
            yield is_another

    def _worth_a_look(self) -> dict[Path, frozenset[str]]:
        return {self._versions.job.layout.state: frozenset({self._versions.job.layout.latest.name})}
