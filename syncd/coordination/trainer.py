"""The blocking Synchronizer of the trainer."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncd.coordination.broadcast.meeting import MeetingPlace, TrainerGroup
from syncd.coordination.broadcast.offer import Takers, TrainerSide
from syncd.coordination.leased_version import read_latest
from syncd.coordination.member import Doubles, Member
from syncd.coordination.participant import become
from syncd.coordination.served_waits import ServedStep, ServedWaits
from syncd.coordination.waiting import Cancellation
from syncd.protocol.errors import BroadcastError, InvalidSettingsError, SyncdError
from syncd.protocol.names import REMOTE_PATH
from syncd.protocol.policy import (
    RunningStatus,
    SyncMethod,
    SyncSettings,
    Version,
    may_produce,
    must_wait_for_explorers,
    unanswered,
    with_sent,
)
from syncd.protocol.records import SaveId
from syncd.protocol.reports import (
    DaemonReport,
    ExplorerReport,
    ResumedFrom,
    SyncTerms,
    TrainerReport,
)
from syncd.storage.job import IF_ANY, make_step_folder
from syncd.torch_extra import require_torch

if TYPE_CHECKING:
    import torch

    from syncd.coordination.broadcast.group import WeightGroup

log = logging.getLogger(__name__)

#: Writes a complete save of a step and moves the pointer, as trainer_hooks does.
WriteStateDict = Callable[[Mapping[str, Any], int], object]


class TrainerSynchronizer(Member[TrainerReport]):
    """The only trainer of a job; :class:`.Member` has the other arguments.

    Args:
        run_id: the run id for the trainer's report; the id of its session by default.
        world_size: the number of ranks that write a save.
        writer: writes the state dicts that are passed to :meth:`set_model_state_dict`.
        resumed_from: the save that the model holds, for the report.
    """

    def __init__(
        self,
        job_dir: str | Path,
        name: str = "trainer",
        *,
        settings: SyncSettings | None = None,
        memory_dir: str | Path | None = None,
        run_id: str | None = None,
        world_size: int = 1,
        writer: WriteStateDict | None = None,
        resumed_from: ResumedFrom | None = None,
        doubles: Doubles | None = None,
    ) -> None:
        super().__init__(
            job_dir,
            "trainer",
            name,
            settings=settings,
            memory_dir=memory_dir,
            doubles=doubles,
            first=lambda session: TrainerReport(
                run_id=run_id or session,
                world_size=world_size,
                status=RunningStatus.STOPPED.value,
                name=name,
                session=session,
                sync=SyncTerms.of(settings),
                deltas=settings is not None and settings.deltas,
                resumed_from=resumed_from,
                time=0.0,
            ),
        )
        self._writer = writer
        self._versions.passed = 0  # see _must_wait
        self._versions.alone_since = math.inf  # a daemon may be starting, too
        self._transfer = TrainerSide(self._offers, self._roster, self._me)
        self._group = TrainerGroup(
            self._offers, self._me.session.id, MeetingPlace(self.settings.master_address)
        )
        self._stack.callback(self._group.close)
        self._asked: dict[tuple[str, str], int] = {}
        self._answered: dict[tuple[str, str], int] = {}
        self._served = ServedWaits(self._me, self._roster, self._versions)
        self._saved_step: int | None = None
        self._taking: frozenset[str] = frozenset()
        self._taken_by = -math.inf
        with suppress(OSError, SyncdError):  # each look tries again
            # Read without the roster, which would watch the explorers' heartbeats from now on.
            names = self._job.storage.names(self._job.layout.explorers)
            found = self._job.explorer_reports(names, IF_ANY)
            self._compare_all([one for one in found if self._is_there(one.session)])

    def _compare_all(self, explorers: list[ExplorerReport]) -> list[ExplorerReport]:
        for one in explorers:
            if one.status != RunningStatus.STOPPED.value:
                self._compare_settings(self._me.record, one, one.session)
        return explorers

    def set_trainer_status(self, status: RunningStatus) -> None:
        """Set this trainer's status; ``stopped`` wakes all explorers that wait for this trainer.

        Raises:
            InvalidTransitionError: the new status cannot follow the present status.
        """
        become(self._me, status)

    def explorer_requires_sync(self) -> bool:
        """True if a live explorer waits for a sync that this trainer has not answered yet.

        The next :meth:`set_model_state_dict`, transfer, or :meth:`notify_no_new_model_state_dict`
        answers the requests that this call has seen.
        """
        self._asked = {
            # An explorer without a count of requests has asked once while it has this status.
            (explorer.name, explorer.session): max(1, explorer.requests)
            for explorer in self._compare_all(self._roster.explorers())
            if explorer.status == RunningStatus.REQUIRE_SYNC.value
        }
        # Forget explorers that have left.
        self._answered = {who: n for who, n in self._answered.items() if who in self._asked}
        return bool(unanswered(self._asked, self._answered))

    def begin_save(
        self, step: int, save_id: SaveId | None = None, base: SaveId | None = None
    ) -> None:
        """Announce a save before its first byte is written.

        The pruner then keeps the folders of this step and of higher steps, because a trainer that
        resumed at a lower step will write these folders again. Writers without a process group
        learn the ``save_id``, and the ``base`` of a delta, from the report.
        """
        saving, relative_to = (None if one is None else str(one) for one in (save_id, base))
        self._me.update(step=step, saving=saving, base=relative_to)
        self._versions.copy_report(self._me.record)
        self._versions.warn_without_daemon(f"saves in {self._job.layout.root}")

    def set_model_state_dict(
        self, model_state_dict: Mapping[str, Any] | str | None, trainer_step: int
    ) -> None:
        """Announce new weights for the daemon to publish; answer the explorers' sync requests.

        Args:
            model_state_dict: a state dict for the ``writer``, or the remote path of a Tinker-style
                trainer; None if the save is on disk and the pointer names its step.
            trainer_step: the step of the weights.

        Raises:
            InvalidSettingsError: a state dict was given, but there is no writer.
            OSError: storage failed; nothing was announced.
        """
        asked = dict(self._asked)
        self.begin_save(trainer_step)
        if isinstance(model_state_dict, str):
            job = self._versions.job
            make_step_folder(job, trainer_step)
            path = job.layout.step(trainer_step) / REMOTE_PATH
            job.storage.replace(path, f"{model_state_dict}\n".encode())
            self._versions.point(trainer_step)
        elif model_state_dict is not None:
            if self._writer is None:
                raise InvalidSettingsError(
                    "this Synchronizer has no writer, so it cannot write a state dict. Give the "
                    "Synchronizer a writer, or write the save with trainer_hooks and pass None"
                )
            self._writer(model_state_dict, trainer_step)
        self._saved_step = trainer_step
        self._answered |= asked
        self._holds_own_weights()

    def serve_resumed(self, is_here: Callable[[ResumedFrom], bool]) -> bool:
        """Make the save that this trainer resumed from the served one.

        The pointer goes back to it, unless LATEST names it already. Then this method waits at most
        a lease time for LATEST, if a daemon is live. ``is_here`` returns False if the job does not
        have the save.

        Returns:
            False if explorers may serve other weights than those that the trainer begins with.
        """
        versions, resumed = self._versions, self._me.record.resumed_from
        if resumed is None:
            return versions.pointed() is None and read_latest(versions.job) is None
        step, was_served = resumed.step, versions.serves(resumed.save_id)
        if not versions.follows(self._job) or versions.is_refused(step) or not is_here(resumed):
            return was_served
        # A save of the lost run that is not published yet would replace the served one.
        is_next = not was_served or versions.on_its_way() is not None
        if is_next and versions.pointed() != step:
            log.info("%s names step %d again", versions.job.layout.state_pointer, step)
            versions.point(step)
        with self._wait(min(versions.lease_time, self.settings.sync_timeout), None) as wait:
            while not versions.serves(resumed.save_id) or versions.is_merging():
                if not versions.daemon_lives() or not wait.more():
                    hint = versions.daemon_hint()
                    log.warning(
                        "step %d is not served again, so the next is synced: %s", step, hint
                    )
                    return False
        # Explorers may have received a later step of the lost run since that version.
        return not (was_served and self.settings.method is SyncMethod.NCCL)

    def save_is_on_its_way(self) -> bool:
        """True if the daemon has neither published nor refused the last announced save.

        If this step was saved before, the older save's outcome can make the result False too early.
        """
        if self._saved_step is None:
            return False
        newest = self._versions.newest()
        published = newest is not None and newest.step == self._saved_step
        return not published and self._versions.job.outcome(self._saved_step) is None

    def say_no_deltas(self, reason: str) -> None:
        """Report why all saves are full although the settings ask for deltas."""
        self._me.update(no_deltas=reason)

    def takes_deltas(self, root: SaveId) -> bool:
        """True if the daemon can use a delta that leads from ``root``, a full save of this run."""
        daemon = self._job.read(DaemonReport, self._job.layout.daemon_report)
        if daemon is None or not daemon.takes_deltas or not self._roster.is_alive(daemon.session):
            return False
        latest = read_latest(self._job)
        if latest is not None and latest.no_deltas is not None:
            return False
        published = SaveId.parse((latest.tip or latest).save_id) if latest else None
        if published is not None and published.run == root.run:
            return True
        outcome = self._job.outcome(root.step)  # the root may still be merged
        return outcome is None or outcome.identity != str(root)

    def notify_no_new_model_state_dict(self) -> None:
        """Tell waiting explorers that nothing newer than the published version will come."""
        me = self._me
        me.update(nothing_new=me.record.nothing_new + 1)
        self._answered |= self._asked

    def wait_for_explorers(
        self, timeout: float | None = None, *, cancel: Cancellation | None = None
    ) -> bool:
        """Wait while the slowest live explorer lags by more than ``max_explorer_lag`` steps.

        Explorers that evaluate a step (``explorer_hooks.bench``) do not count. Explorers that
        refused a version do not count either, because they need a newer version from the trainer;
        nor do mirrors.

        Returns:
            False if the slowest explorer still lags at the timeout; continue the training then.
        """
        if self.settings.max_explorer_lag is None:
            return True
        with self._wait(timeout, cancel) as wait:
            while self._must_wait():
                if not wait.more():
                    log.warning(
                        "the slowest explorer still lags by more than max_explorer_lag; "
                        "training continues"
                    )
                    return False
        return True

    def _must_wait(self) -> bool:
        waited_for = [
            explorer
            for explorer in self._roster.working()
            if explorer.refused is None and explorer.bench is None and explorer.mirror is None
        ]
        latest, run = read_latest(self._versions.job), self._me.record.run_id
        held: dict[Version | None, list[Version | None]] = {}
        for explorer in waited_for:
            newest = Version.of(explorer.newest(latest)) if latest else None
            held.setdefault(newest, []).append(explorer.served(newest, run))
        return any(must_wait_for_explorers(self.settings, *each) for each in held.items())

    def wait_served(
        self,
        step: int,
        explorers: Collection[str],
        timeout: float | None = None,
        *,
        save_id: SaveId | None = None,
        is_announced: Callable[[], bool | None] = lambda: True,
        cancel: Cancellation | None = None,
    ) -> ServedStep:
        """Wait until the named explorers serve a step; see :meth:`.TrainerHook.wait_served`.

        Args:
            step: the step; without ``is_announced`` its save must be announced.
            explorers: their names.
            timeout: after it, the answer tells what is missing.
            save_id: earlier saves do not count, whatever their step.
            is_announced: returns None while the step's save may still be announced, and False if it
                never will be.
            cancel: ends the wait from another thread.
        """
        with self._wait(timeout, cancel) as wait:
            return self._served.until_served(step, explorers, wait, save_id, is_announced)

    def ready_to_nccl_sync(
        self, step: int, *, timeout: float | None = None, cancel: Cancellation | None = None
    ) -> int | None:
        """Wait until all live explorers are ready for a transfer of a step's weights.

        If one participant returns the step, all live participants return the step, as long as their
        storage works. A participant can still die before the transfer, so the transfer needs its
        own timeout. Each explorer reports the new weights by its ``nccl_sync_succeeded``.

        Returns:
            The step; None if not all explorers are ready within ``timeout``, or if no explorer is
            running.
        """
        with self._wait(timeout, cancel) as wait:
            found = self._transfer.agree(step, wait)
        if (agreed := self._transfer.agreed) is not None:
            self._taking = frozenset(one.session for one in agreed.offer.members)
            # One timeout each for meeting, for the transfer, and for loading and reporting.
            self._taken_by = self._clock() + 3 * self.settings.broadcast_timeout
        return found

    def nccl_sync_succeeded(self) -> None:
        """Record that the weights were sent, which answers the requests for a sync."""
        self._answered |= self._asked

    def takers(self) -> Takers:
        """The number of running explorers, and how many of them take part in broadcasts."""
        return self._transfer.takers()

    def have_received(self, save_id: SaveId) -> bool:
        """True if explorers take part in broadcasts, and all of these serve the sent weights."""
        return {one.received for one in self._roster.working() if one.workers} == {str(save_id)}

    def has_missed(self, save_id: SaveId) -> bool:
        """True if an explorer has missed the sent weights and is too stale (``max_staleness``).

        Members of the last transfer can still be receiving or loading the weights, so they do not
        count until three times ``broadcast_timeout`` after the agreement.
        """
        working = self._roster.working()  # before LATEST, which must not be older
        newest = self._versions.newest()
        if newest is None:
            return False  # nobody could have taken part
        sent = with_sent(newest, save_id.run, save_id.step)
        taking = self._taking if self._clock() < self._taken_by else frozenset()
        return any(
            not may_produce(self.settings, one.served(sent, save_id.run), sent)
            for one in working
            if one.workers and one.session not in taking
        )

    def goes_by_files(self, step: int) -> None:
        """Announce that a step's weights come as published files, without a transfer."""
        self._transfer.by_files(step)

    # -- the weight group --------------------------------------------------------------------------

    def setup_weight_sync_group(
        self,
        master_address: str,
        master_port: int,
        state_dict_meta: object = None,  # noqa: ARG002 # the transfer itself agrees on it
    ) -> None:
        """Set the meeting place of future weight groups, and close the open weight group.

        Args:
            master_address: this host's address: a host name or an IP address.
            master_port: the port; 0 for any free port, chosen again for each group.
            state_dict_meta: ignored; Trinity's method has it.
        """
        self._group.close()
        self._group.place = MeetingPlace(master_address, master_port)

    def open_group(self, save_id: SaveId, device: torch.device) -> WeightGroup:
        """Open the weight group of the transfer that :meth:`ready_to_nccl_sync` agreed on.

        The previous group is used again if the members are the same and no transfer failed.

        Args:
            save_id: the save id of the weights to transfer.
            device: the device of the tensors; for a GPU the group uses NCCL.

        Raises:
            BroadcastError: no transfer was agreed, or a rank was late (``broadcast_timeout``).
        """
        agreed, deadline = self._transfer.take_agreed(), self.settings.broadcast_timeout
        return self._group.open(agreed, str(save_id), deadline=deadline, device=device)

    def group_failed(self) -> None:
        """Leave the weight group; the next transfer forms a new group."""
        self._group.close()

    def coordinate_weight_sync_setup(
        self,
        timeout: float | None = None,
        *,
        device: str = "cpu",
        cancel: Cancellation | None = None,
    ) -> None:
        """Form the weight group with all live explorers, without a transfer.

        Each explorer must call the method of the same name. Use this method only before training,
        as a test, because a transfer forms the group by itself. ``device`` is the device of the
        tensors to transfer.

        Raises:
            BroadcastError: an explorer was not ready within ``timeout``, or the group cannot be
                formed.
        """
        require_torch("a broadcast of weights")
        import torch  # noqa: PLC0415 # needed for broadcasts only

        step = self._me.record.step or 0
        if self.ready_to_nccl_sync(step, timeout=timeout, cancel=cancel) is None:
            raise BroadcastError("not all explorers were ready in time to form a weight group")
        self.open_group(SaveId(self._me.record.run_id, step, 0), torch.device(device))

    def coordinate_weight_sync_teardown(
        self, timeout: float | None = None, *, cancel: Cancellation | None = None
    ) -> None:
        """Leave the weight group after all live explorers have left it.

        Each explorer must call the method of the same name. At the ``timeout``, by default
        ``broadcast_timeout``, the trainer leaves anyway. After ``cancel`` the group stays open.
        """
        open_now = self._group.rendezvous
        if open_now is not None:
            timeout = self.settings.broadcast_timeout if timeout is None else timeout
            with self._wait(timeout, cancel) as wait:
                name = open_now.group_name
                while late := [one.name for one in self._roster.working() if one.group == name]:
                    if not wait.more():
                        log.warning(
                            "closing a weight group that these explorers have not left: %s",
                            ", ".join(late),
                        )
                        break
        self._group.close()

    def _point(self, step: int) -> None:
        self.begin_save(step)
        super()._point(step)
        self._holds_own_weights()

    def _holds_own_weights(self) -> None:
        if self._me.record.resumed_from is not None:
            self._me.update(resumed_from=None)

    def _worth_a_look(self) -> dict[Path, frozenset[str]]:
        reports: frozenset[str] = frozenset()
        with suppress(OSError, SyncdError):  # each look tries again
            explorers = self._roster.explorers()
            reports = frozenset(self._job.layout.explorer(one.name).name for one in explorers)
        return super()._worth_a_look() | {self._job.layout.explorers: reports}
