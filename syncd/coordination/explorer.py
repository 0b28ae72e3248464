"""An explorer's methods of the Synchronizer, blocking: what a rollout worker's hook calls."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path

from syncd.coordination.asking import Request
from syncd.coordination.explorer_transfers import ExplorerTransfers
from syncd.coordination.member import Seams
from syncd.coordination.participant import become
from syncd.coordination.waiting import Cancellation
from syncd.protocol.errors import (
    InvalidSettingsError,
    JobUnavailableError,
    WaitTimeoutError,
)
from syncd.protocol.participants import Offer
from syncd.protocol.policy import (
    RunningStatus,
    SyncMethod,
    SyncSettings,
    Version,
    after_broadcast,
    may_produce,
)
from syncd.protocol.records import SaveId
from syncd.protocol.reports import Reload

log = logging.getLogger(__name__)


class ExplorerSynchronizer(ExplorerTransfers):
    """One explorer of a job. See :class:`~syncd.coordination.member.Member`.

    Args:
        job_dir: the job directory.
        name: the explorer's, unique among the live ones.
        settings: when who syncs, and how long a wait takes.
        memory_dir: the second job directory, where versions are (method ``memory``).
        workers: how many ranks of a weight group it is; 0 where it takes no part in broadcasts, and
            no transfer waits for it.
        seams: for tests.

    Raises:
        NameTakenError: a live explorer has the name; to know may take a lease time.
        JobUnavailableError: the job directory is missing or cannot be written.
        InvalidSettingsError: the name cannot be part of a file name.
    """

    def __init__(
        self,
        job_dir: str | Path,
        name: str,
        *,
        settings: SyncSettings | None = None,
        memory_dir: str | Path | None = None,
        workers: int = 1,
        seams: Seams | None = None,
    ) -> None:
        super().__init__(
            job_dir,
            name,
            settings=settings,
            memory_dir=memory_dir,
            workers=workers,
            seams=seams,
        )
        self._warned: Version | None = None

    def set_explorer_status(
        self, status: RunningStatus, old_status: RunningStatus | None = None
    ) -> None:
        """Say what this explorer does. With ``require_sync`` it asks for a sync once more.

        Args:
            status: what it does now.
            old_status: what the caller believes that it did.

        Raises:
            InvalidTransitionError: the status cannot follow the one that it has, or that is not the
                old one.
        """
        me = self._me
        asks = status is RunningStatus.REQUIRE_SYNC and me.record.status != status.value
        become(me, status, old_status, requests=me.record.requests + asks)

    def set_explorer_version(self, version: Version, refused: str | None = None) -> None:
        """Say which version this explorer serves, and which newer one it has refused, and why."""
        self._me.update(
            sequence=version.sequence, step=version.step, refused=refused, received=None
        )

    def report(
        self,
        version: Version | None,
        *,
        refused: str | None = None,
        reload: Reload | None = None,
        fault: str | None = None,
        received: str | None = None,
        workers: int | None = None,
        group: str | None = None,
    ) -> None:
        """Say all of what an explorer's hook has to say; what is left out is taken back.

        Args:
            version: what is served; None before the first.
            refused: which newer version was refused, and why.
            reload: how the engine came to what it serves.
            fault: why this explorer cannot be relied on.
            received: the save id of what is served, where it came by a broadcast.
            workers: how many ranks of a weight group it is from now on; None for as many as before.
            group: with that, the weight group that all of them have open.
        """
        self._me.update(
            sequence=version.sequence if version else None,
            step=version.step if version else None,
            refused=refused,
            reload=reload,
            fault=fault,
            received=received,
            **({} if workers is None else {"workers": workers, "group": group}),
        )

    def wait_new_model_state_dict(
        self,
        current: Version | None,
        *,
        no_wait: bool = False,
        timeout: float | None = None,
        cancel: Cancellation | None = None,
    ) -> Version | None:
        """Require a sync, and wait until a newer version than ``current`` is published.

        Args:
            current: what this explorer serves; None before its first version.
            no_wait: take what is there, and require nothing.
            timeout: seconds; the settings' ``sync_timeout`` by default.
            cancel: ends the wait from another thread.

        Returns:
            The newest version; ``current`` where the trainer has said since that nothing newer will
            come, or has stopped or died; the log says so, once for each. Never an older one.

        Raises:
            WaitTimeoutError: none of that in time.
            CancelledError: the wait was cancelled.
            JobUnavailableError: the job is not there now: unmounted, say. Wait again.
            InvalidTransitionError: this explorer is not running.
        """
        if no_wait:
            return self._versions.newest(current)
        with self._wait(timeout, cancel) as wait:
            missed, request = False, self._request()
            try:
                newest = self._versions.newest(current)
                if newest != current:
                    return newest
                # Before it is asked: what is said after this is said to us too.
                said = request.said()
                if self._roster.trainer_status() is RunningStatus.STOPPED:
                    return self._versions.newest(current, sure=True)
                request.require()
                missed = True
                while True:
                    nothing_comes = request.said() not in {None, said} or (
                        self._roster.trainer_status() is RunningStatus.STOPPED
                    )
                    newest = self._versions.newest(current, sure=nothing_comes)
                    if newest != current:
                        missed = False
                        return newest
                    if nothing_comes:
                        self._warn_once(current)
                        return current
                    if not wait.more():
                        raise WaitTimeoutError(
                            f"nothing newer than {current or 'nothing'} was published in "
                            f"{self._versions.layout.root} in time; see `syncd status` whether a "
                            "daemon works, and what it waits for"
                        )
            finally:
                request.end(missed=missed)

    def wait_for_newer(
        self,
        current: Version | None,
        *,
        asks: bool = True,
        timeout: float | None = None,
        cancel: Cancellation | None = None,
        look: Callable[[], None] = lambda: None,
    ) -> Version:
        """Wait until a newer version than ``current`` is published, whatever the trainer says.

        Where :meth:`wait_new_model_state_dict` ends with the trainer, or its word that nothing
        newer comes, this goes on; nor does a job that is away (unmounted) end it.

        Args:
            current: nothing at or below its sequence is taken; None for any version.
            asks: whether a sync is required meanwhile, and once more after each answer that there
                is nothing newer; what storage refuses of that is asked again.
            timeout: seconds; 0 to take what is there now, and require nothing; None for as long as
                it takes.
            cancel: ends the wait from another thread.
            look: called each time that there is nothing newer; what it raises ends the wait.

        Raises:
            WaitTimeoutError: nothing newer in time.
            CancelledError: the wait was cancelled.
            InvalidTransitionError: this explorer is not running.
            OSError: LATEST cannot be read.
        """
        patience = math.inf if timeout is None else timeout
        with self._wait(patience, cancel) as wait:
            missed, request = True, self._request()
            try:
                while True:
                    newest = self._versions.newest(current)
                    if newest is not None and newest != current:
                        missed = False
                        return newest
                    look()
                    if asks and patience > 0:
                        request.repeat()
                    if not wait.more():
                        raise WaitTimeoutError(
                            f"nothing newer than {current or 'nothing'} within {timeout:g} s in "
                            f"{self._versions.layout.root}"
                        )
            finally:
                request.end(missed=missed)

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
        """Require a sync, and wait for a newer version or a transfer, whichever comes first.

        Args:
            current: nothing at or below its sequence is taken; None for any version.
            joins: whether transfers are taken part in now.
            ends_with_trainer: whether it ends, as :meth:`wait_new_model_state_dict` does, where the
                trainer has stopped or says that nothing newer comes; else it asks again.
            timeout: seconds; None for as long as it takes.
            cancel: ends the wait from another thread.
            look: called each time that there is nothing newer; what it raises ends the wait.

        Returns:
            A version; or the offer of a transfer, which is decided: all its members have to meet
            (:meth:`rendezvous`); None where it ends with the trainer.

        Raises:
            WaitTimeoutError: neither in time.
            CancelledError: the wait was cancelled.
            InvalidTransitionError: this explorer is not running.
            OSError: LATEST or the offer cannot be read.
        """
        with self._wait(math.inf if timeout is None else timeout, cancel) as wait:
            missed, request = True, self._request()
            said = request.said() if ends_with_trainer else None
            try:
                while True:
                    ends = False
                    try:
                        has_stopped = self._roster.trainer_status() is RunningStatus.STOPPED
                        if offer := self._offered(joins=joins(), has_stopped=has_stopped):
                            missed = False
                            return offer
                        if ends_with_trainer:
                            ends = has_stopped or request.said() not in {None, said}
                    except JobUnavailableError:
                        if ends_with_trainer:
                            raise
                    if not self._transfer.has_joined:  # else its other members wait for us
                        newest = self._versions.newest(current, sure=ends)
                        if newest is not None and newest != current:
                            missed = False
                            return newest
                        if ends:
                            self._warn_once(current)
                            return None
                        look()
                    request.repeat()
                    if not wait.more():
                        if (offer := self._transfer.leave()) is not None:
                            return offer
                        raise WaitTimeoutError(
                            f"nothing newer than {current or 'nothing'}, and no transfer, within "
                            f"{timeout:g} s in {self._versions.layout.root}"
                        )
            finally:
                try:
                    self._transfer.leave()
                finally:
                    request.end(missed=missed)

    def _offered(self, *, joins: bool, has_stopped: bool) -> Offer | None:
        """One look at what is offered; a trainer that has stopped decides no more."""
        transfer = self._transfer
        offer = transfer.look() if joins or transfer.has_joined else None
        return offer or (transfer.leave() if has_stopped else None)

    def current_run(self) -> str | None:
        """The run id of the trainer that works now; None where none does."""
        trainer = self._roster.trainer()
        working = trainer is not None and trainer.status != RunningStatus.STOPPED.value
        return trainer.run_id if trainer is not None and working else None

    def _warn_once(self, current: Version | None) -> None:
        if current is not None and current != self._warned:
            self._warned = current
            log.warning("nothing newer than step %d: %s serves it on", current.step, self.name)

    def _request(self) -> Request:
        return Request(self._me, self._roster, clock=self._clock, poll=self._poll)

    def may_produce(self) -> bool:
        """Whether this explorer is fresh enough to go on producing (``max_staleness``)."""
        if self.settings.max_staleness is None:
            return True
        record, newest = self._me.record, self._versions.newest()
        held: Version | None = None
        if record.sequence is not None and record.step is not None:
            held = Version(record.sequence, record.step)
        if self.settings.method is SyncMethod.NCCL and newest is not None:
            trainer = self._roster.trainer()
            received = SaveId.parse(record.received) if record.received else None
            if held and received and trainer and received.run == trainer.run_id:
                held = after_broadcast(held, newest)
            offer = self._offers.current()
            # What goes by the files counts once it is published, as of any other method.
            is_sent = offer is not None and offer.decided in {None, "go"}
            if offer and trainer and offer.session == trainer.session and is_sent:
                newest = Version(newest.sequence, max(newest.step, offer.step))
        return may_produce(self.settings, held, newest)

    def _point(self, step: int) -> None:
        """Without a trainer an explorer may choose what is published: to evaluate old steps."""
        if self._roster.trainer_status() is not RunningStatus.STOPPED:
            raise InvalidSettingsError(
                f"explorer {self.name} cannot have step {step} published: the trainer works, and "
                "decides that"
            )
        super()._point(step)
