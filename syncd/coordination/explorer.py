"""The blocking Synchronizer of an explorer."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncd.coordination.benching import Bench
from syncd.coordination.broadcast.meeting import ExplorerGroup
from syncd.coordination.broadcast.offer import ExplorerSide
from syncd.coordination.leased_version import LeasedVersion
from syncd.coordination.load_turns import LoadTurns
from syncd.coordination.member import Doubles, Member
from syncd.coordination.participant import become
from syncd.coordination.versions import Lead
from syncd.coordination.waiting import Cancellation
from syncd.coordination.weight_waits import WeightWaits
from syncd.protocol.errors import BroadcastError, JobUnavailableError
from syncd.protocol.policy import (
    RunningStatus,
    SyncMethod,
    SyncSettings,
    Version,
    may_produce,
    with_sent,
)
from syncd.protocol.reports import ExplorerReport, Offer, Reload, Rendezvous, SyncTerms, loads_with
from syncd.torch_extra import require_torch

if TYPE_CHECKING:
    import torch

    from syncd.coordination.broadcast.group import WeightGroup


class ExplorerSynchronizer(Member[ExplorerReport]):
    """One explorer of a job; :class:`.Member` has the other arguments.

    Args:
        workers: the explorer's number of ranks in a weight group; 0 to join no transfers.
        hub_names: True if this explorer also accepts the hub's names (``syncd run --names``).
        follows_tip: True if it makes copies of saves that are not published (:meth:`lead`).

    Attributes:
        turns: this explorer's turns to load; what stops an engine belongs in ``turns.one()``.
        on_other_job: called if another job has taken the place of this explorer's job.
    """

    def __init__(
        self,
        job_dir: str | Path,
        name: str,
        *,
        settings: SyncSettings | None = None,
        memory_dir: str | Path | None = None,
        workers: int = 1,
        hub_names: bool = False,
        follows_tip: bool = False,
        doubles: Doubles | None = None,
    ) -> None:
        super().__init__(
            job_dir,
            "explorer",
            name,
            settings=settings,
            memory_dir=memory_dir,
            doubles=doubles,
            first=lambda session: ExplorerReport(
                name=name,
                session=session,
                status=RunningStatus.STOPPED.value,
                workers=workers,
                loads=self._job.previous_loads(name),
                sync=SyncTerms.of(settings),
                hub_names=hub_names,
                follows_deltas=follows_tip,
                follows_tip=follows_tip,
                time=0.0,
            ),
        )
        self._transfer = ExplorerSide(self._offers, self._roster, self._me)
        self._met: Rendezvous | None = None
        self._group = ExplorerGroup(self._offers, name, self._me.session.id)
        self._stack.callback(self._group.close)
        self.turns = LoadTurns(self._job, self._me, self._wait, self._clock)
        self._weights = WeightWaits(
            self._versions, self._transfer, self.turns,
            is_elsewhere=self.is_elsewhere, compare=self._compare_settings,
            terms=SyncTerms.of(self.settings), poll=self._poll,
        )  # fmt: skip
        if (trainer := self._trainer_there()) is not None:
            self._weights.unlike = self._compare_settings(trainer, self._me.record, trainer.session)
        if follows_tip:
            self._versions.passed = 0
        self._is_elsewhere = False
        self.on_other_job: Callable[[], None] = lambda: self.report(None)
        self._counts_loads = memory_dir is None  # else the versions belong to another job
        self._loading = threading.RLock()
        self._bench = Bench(
            self._job, self._versions, self.session_id, hub_names=hub_names, clock=self._clock
        )

    def set_explorer_status(
        self, status: RunningStatus, old_status: RunningStatus | None = None
    ) -> None:
        """Set this explorer's status; ``require_sync`` asks the trainer for another sync.

        Raises:
            InvalidTransitionError: this change is not allowed, or the present status is not
                ``old_status``.
        """
        me = self._me
        asks = status is RunningStatus.REQUIRE_SYNC and me.record.status != status.value
        become(me, status, old_status, requests=me.record.requests + asks, starting=None)

    def set_explorer_version(self, version: Version, refused: str | None = None) -> None:
        """Report the served version, and a newer version that was refused, with the reason."""
        told = self._me.record.reload
        self._serve(version, refused=refused, received=None, bench=None, reload=told)

    def report(
        self,
        version: Version | None,
        *,
        refused: str | None = None,
        reload: Reload | None = None,
        fault: str | None = None,
        received: str | None = None,
        bench: int | None = None,
        workers: int | None = None,
        group: str | None = None,
        starting: str | None = None,
    ) -> None:
        """Set fields of the explorer's report; omitted fields are cleared, except ``workers``.

        Args:
            version: the served version; None before the first version.
            refused: the newer version that was refused, and the reason.
            reload: the times of loading the served version.
            fault: the reason why this explorer counts as faulty.
            received: the save id of the served weights, if a broadcast brought these weights.
            bench: the step that is evaluated instead of a version.
            workers: the new number of ranks in a weight group; None for no change.
            group: the weight group that all ``workers`` ranks have open; only with ``workers``.
            starting: the reason why this explorer is not running yet. Setting a status clears it.
        """
        self._serve(
            version,
            refused=refused,
            reload=reload,
            fault=fault,
            received=received,
            bench=bench,
            starting=starting,
            **({} if workers is None else {"workers": workers, "group": group}),
        )

    def _serve(
        self,
        version: Version | None,
        *,
        received: str | None,
        reload: Reload | None = None,
        **changes: Any,
    ) -> None:
        self._me.check_process()
        loaded = version if self._counts_loads and received is None else None
        if loaded is not None:
            follows = self._versions.passed <= loaded.sequence
            changes |= {"follows_deltas": follows, "follows_tip": follows}
        with self._loading:  # so that no load of another thread is lost
            self._is_elsewhere &= version is None
            loads = loads_with(self._me.record.loads, loaded, self._wall(), reload)
            self._me.update(
                sequence=version.sequence if version else None,
                step=version.step if version else None,
                save_id=version.save_id if version else None,
                of_another_job=self._me.record.of_another_job and version is None,
                received=received,
                reload=reload,
                loads=loads,
                fetching=None,
                **changes,
            )

    def hold_step(
        self,
        step: int,
        *,
        serves: LeasedVersion | None = None,
        timeout: float | None = None,
        cancel: Cancellation | None = None,
    ) -> LeasedVersion:
        """Hold a saved step, so that only this explorer evaluates it; others keep their versions.

        If the step is published, this method leases the published version. Otherwise it builds the
        step once its save is complete; the release deletes the build. If ``serves``, a version that
        the caller holds, is of this step, the method returns ``serves``.

        Returns:
            The version (sequence 0 for a built step). Release it before you close this object.

        Raises:
            SaveNotReadyError: the step is not on disk.
            SaveFailedError: the step cannot be built.
            NoRoomError: the disk has no room for the build.
            InvalidSettingsError: two built steps are already held.
            WaitTimeoutError: the save was not complete within ``timeout``.
            CancelledError: the wait or the build was cancelled.
            JobUnavailableError: the daemon has not reported its settings, or the job is missing.
            VerificationError: the version's manifest is damaged.
        """
        with self._wait(timeout, cancel) as wait:
            if serves is not None and self._bench.is_of(serves.manifest, step):
                return serves
            return self._bench.hold(step, wait)

    def wait_new_model_state_dict(
        self,
        current: Version | None,
        *,
        no_wait: bool = False,
        timeout: float | None = None,
        cancel: Cancellation | None = None,
    ) -> Version | None:
        """Require a sync, and wait until a newer version than ``current`` is published.

        ``current`` is the version that this explorer serves. If ``current`` is None, the method
        first does :meth:`wait_for_trainer`. With ``no_wait`` the method returns the newest
        published version at once, without requiring a sync.

        Returns:
            The newest version, which is never older than ``current``. The result is ``current`` if
            the trainer has stopped or died, or has said that nothing newer than a version will
            come. Before the method returns ``current``, it waits until the trainer's last save was
            published, skipped or quarantined, or until no daemon was alive for a lease time.

        Raises:
            WaitTimeoutError: no newer version was published within ``timeout``.
            CancelledError: the wait was cancelled.
            JobUnavailableError: the job directory is missing, for example unmounted. Wait again.
            InvalidTransitionError: this explorer is not running.
            OSError: storage failed.
        """
        if no_wait:
            return self._weights.newest(current)
        with self._wait(timeout, cancel) as wait:
            found = self._weights.newer(current, wait, ends_with_trainer=True)
        return found if isinstance(found, Version) else current

    def lead(self, version: Version) -> Lead | None:
        """The save to make a copy of, if this version is not published, but the tip.

        The report names a whole save, so that the daemon keeps it meanwhile.
        """
        if (lead := self._versions.lead(version)) and lead.tip.root:
            self._me.update(fetching=lead.tip.root)
        return lead

    def passes(self, sequence: int) -> None:
        """Wait no longer for this save as the tip, but for its version, or for a later save."""
        self._versions.passed = sequence

    def wait_for_newer(
        self,
        current: Version | None,
        *,
        asks: bool = True,
        timeout: float | None = None,
        cancel: Cancellation | None = None,
        look: Callable[[], None] = lambda: None,
    ) -> Version:
        """Wait until a newer version than ``current`` is published, even without a trainer.

        Unlike :meth:`wait_new_model_state_dict`, this wait does not end if the trainer stops or
        says that nothing newer will come, or if the job is unmounted.

        Args:
            current: the wait ends with a version of a higher sequence; None for any version.
            asks: True to require a sync during the wait, and again after each answer that nothing
                newer will come. If storage fails, the request is repeated.
            timeout: seconds; 0 to check once without requiring a sync; None for no limit.
            cancel: ends the wait from another thread.
            look: called after each check that finds nothing newer; its errors end the wait.

        Raises:
            WaitTimeoutError: no newer version was published in time.
            CancelledError: the wait was cancelled.
            InvalidTransitionError: this explorer is not running.
            OSError: LATEST cannot be read.
        """
        patience = math.inf if timeout is None else timeout
        with self._wait(patience, cancel) as wait:
            found = self._weights.newer(current, wait, asks=asks and patience > 0, look=look)
        assert isinstance(found, Version)  # noqa: S101 - it ends only with a version
        return found

    def wait_for_weights(
        self,
        current: Version | None,
        *,
        joins: Callable[[], bool],
        ends_with_trainer: bool,
        timeout: float | None = None,
        cancel: Cancellation | None = None,
        look: Callable[[], None] = lambda: None,
    ) -> Version | Offer | None:
        """Require a sync, and wait until a newer version or a transfer comes.

        ``joins`` is called at each check, and returns True to take part in transfers. With
        ``ends_with_trainer`` the wait begins and ends like :meth:`wait_new_model_state_dict`; else
        it asks again after each answer that nothing newer will come. For ``current``, ``timeout``,
        ``look`` and the errors see :meth:`wait_for_newer`.

        Returns:
            A version; or the offer of an agreed transfer, whose members must then all meet
            (:meth:`rendezvous`); or, with ``ends_with_trainer``, None if nothing newer will come.
        """
        with self._wait(math.inf if timeout is None else timeout, cancel) as wait:
            return self._weights.newer(
                current, wait, joins=joins, ends_with_trainer=ends_with_trainer, look=look
            )

    def wait_for_trainer(
        self,
        current: Version | None,
        *,
        timeout: float | None = None,
        cancel: Cancellation | None = None,
    ) -> None:
        """Wait until a first version is published or a trainer is running.

        The method returns at once if ``current`` is given or a running trainer was seen before.

        Raises:
            WaitTimeoutError: no version or trainer came within ``timeout``.
            CancelledError: the wait was cancelled.
        """
        if current is None and not self._weights.has_seen_trainer:
            with self._wait(timeout, cancel) as wait:
                self._weights.for_trainer(current, wait)

    def current_run(self) -> str | None:
        """The run id of the trainer that is running now; None if no trainer is running."""
        trainer = self._roster.running_trainer()
        return trainer.run_id if trainer else None

    def is_elsewhere(self) -> bool:
        """True if another job is at the job's path, and none of its versions is served yet.

        Its numbers begin anew, so this explorer then takes any version of it.
        """
        with self._loading:
            for is_another in self._changes_of_job():
                with suppress(OSError):  # the next report tells what this explorer serves
                    if is_another:
                        self._is_elsewhere, me = True, self._me.record
                        serves = me.sequence is not None or me.bench is not None
                        moved = {"loads": (), "of_another_job": me.of_another_job or serves}
                        self._me.record = me.model_copy(update=moved)
                        self.on_other_job()
                    else:
                        self._me.update()
        return self._is_elsewhere

    def may_produce(self) -> bool:
        """True if this explorer's weights are fresh enough for producing (``max_staleness``).

        They never are while they belong to a job that was at the path before.
        """
        if self.settings.max_staleness is None:
            return True
        if self.is_elsewhere():
            return False
        me = self._me.record  # before LATEST, which must not be older
        newest, trainer, resumed = self._versions.newest(tip=True), None, None
        with suppress(JobUnavailableError):  # LATEST tells if the storage is not there
            trainer = self._roster.running_trainer()
        if trainer is not None and (found := trainer.resumed_from) is not None:
            resumed = Version(0, found.step, found.save_id)
        if trainer is not None and newest is not None and self.settings.method is SyncMethod.NCCL:
            offer = self._offers.current()
            # Weights that come by the files count once published, as with any other method.
            is_sent = offer is not None and offer.decided in {None, "go"}
            if offer and offer.session == trainer.session and is_sent:
                newest, resumed = with_sent(newest, trainer.run_id, offer.step), None
        held = me.served(newest, trainer.run_id if trainer else None)
        return may_produce(self.settings, held, newest, resumed=resumed)

    # -- transfers, and the weight group -----------------------------------------------------------

    def ready_to_nccl_sync(
        self, *, timeout: float | None = None, cancel: Cancellation | None = None
    ) -> int | None:
        """Wait until the trainer and all other live explorers are ready for a transfer.

        For the promises see :meth:`.TrainerSynchronizer.ready_to_nccl_sync`.

        Returns:
            The trainer's step; None if not all participants are ready in time, the trainer is gone,
            or the trainer announced that these weights come as published files.
        """
        with self._wait(timeout, cancel) as wait:
            return self._transfer.agree(wait)

    def nccl_sync_succeeded(self, step: int) -> None:
        """Record that a step's weights have arrived.

        The next transfer can then use the weight group of :meth:`rendezvous` again.
        """
        met = self._met
        save_id, group = (met.save_id, met.group_name) if met else (None, None)
        self._me.update(step=step, save_id=save_id, received=save_id, group=group)

    def rendezvous(self, *, cancel: Cancellation | None = None) -> tuple[Rendezvous, int]:
        """Wait for the meeting place of the transfer that :meth:`ready_to_nccl_sync` agreed on.

        Returns:
            The meeting place, and the rank of this explorer's first worker.

        Raises:
            BroadcastError: no transfer was agreed, the trainer was late (``broadcast_timeout``), or
                the trainer left this explorer out.
            CancelledError: the wait was cancelled.
            OSError: storage failed.
        """
        self._met = None
        offer = self._transfer.take_agreed()
        with self._wait(self.settings.broadcast_timeout, cancel) as wait:
            self._met, rank = self._group.rendezvous(offer, wait)
        return self._met, rank

    def open_group(
        self, device: torch.device, *, cancel: Cancellation | None = None
    ) -> WeightGroup:
        """Call :meth:`rendezvous`, and join the weight group as this explorer's first worker.

        Received tensors are on ``device``.

        Raises:
            BroadcastError: no transfer was agreed, or a rank was late (``broadcast_timeout``).
        """
        met, rank = self.rendezvous(cancel=cancel)
        return self._group.open(met, rank, deadline=self.settings.broadcast_timeout, device=device)

    def group_failed(self) -> None:
        """Leave the weight group and report this; the next transfer forms a new group."""
        self._group.close()
        self._met = None
        if self._me.record.group is not None:
            self._me.update(group=None)

    def coordinate_weight_sync_setup(
        self,
        timeout: float | None = None,
        *,
        device: str = "cpu",
        cancel: Cancellation | None = None,
    ) -> None:
        """Form the weight group without a transfer; the trainer must call the same method.

        The explorer has one worker, in this process. Received tensors are on ``device``.

        Raises:
            BroadcastError: the trainer was not ready within ``timeout``, or the group cannot be
                formed.
        """
        require_torch("a broadcast of weights")
        import torch  # noqa: PLC0415 # needed for broadcasts only

        if self.ready_to_nccl_sync(timeout=timeout, cancel=cancel) is None:
            raise BroadcastError("the trainer was not ready in time to form a weight group")
        self._me.update(group=self.open_group(torch.device(device), cancel=cancel).name)

    def coordinate_weight_sync_teardown(
        self,
        timeout: float | None = None,  # noqa: ARG002 # only the trainer waits
        *,
        cancel: Cancellation | None = None,  # noqa: ARG002 # likewise
    ) -> None:
        """Leave the weight group at once. The arguments are ignored."""
        self.group_failed()

    def _point(self, step: int) -> None:
        self._roster.check_alone(self.name, step)
        super()._point(step)

    def _worth_a_look(self) -> dict[Path, frozenset[str]]:
        layout = self._job.layout
        return super()._worth_a_look() | {
            layout.offer.parent: frozenset({layout.offer.name, layout.rendezvous.name}),
            layout.state: frozenset({layout.trainer_report.name, layout.latest.name}),
        }
