"""What an explorer does to take weights by broadcast, blocking."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from syncd.coordination.member import Member, Seams
from syncd.coordination.transfer import ExplorerSide
from syncd.coordination.waiting import Cancellation
from syncd.coordination.weight_sync import ExplorerGroup
from syncd.protocol.errors import BroadcastError
from syncd.protocol.participants import Rendezvous
from syncd.protocol.policy import RunningStatus, SyncSettings
from syncd.protocol.reports import ExplorerReport

if TYPE_CHECKING:
    import torch

    from syncd.coordination.broadcast import WeightGroup


class ExplorerTransfers(Member[ExplorerReport]):
    """An explorer's half of a transfer; the rest of an explorer is built on it.

    Args and errors are those of :class:`~syncd.coordination.explorer.ExplorerSynchronizer`.
    """

    def __init__(
        self,
        job_dir: str | Path,
        name: str,
        *,
        settings: SyncSettings | None,
        memory_dir: str | Path | None,
        workers: int,
        seams: Seams | None,
    ) -> None:
        super().__init__(
            job_dir,
            "explorer",
            name,
            settings=settings,
            memory_dir=memory_dir,
            seams=seams,
            path=lambda layout: layout.explorer(name),
            first=lambda session: ExplorerReport(
                name=name,
                session=session,
                status=RunningStatus.STOPPED.value,
                workers=workers,
                time=0.0,
            ),
        )
        self._transfer = ExplorerSide(self._offers, self._roster, self._me)
        self._met: Rendezvous | None = None
        self._group = ExplorerGroup(self._meetings, self._offers, name, self._me.session.id)
        self._stack.callback(self._group.close)

    def ready_to_nccl_sync(
        self,
        *,
        timeout: float | None = None,
        cancel: Cancellation | None = None,
    ) -> int | None:
        """Wait until the trainer and all other live explorers are ready for a transfer.

        What is promised is said at the trainer's.

        Args:
            timeout: seconds; the settings' ``sync_timeout`` by default.
            cancel: ends the wait from another thread.

        Returns:
            The trainer's step; None where they are not ready in time, the trainer is gone, or it
            has said that these weights come by the checkpoint path.
        """
        with self._wait(timeout, cancel) as wait:
            return self._transfer.agree(wait)

    def nccl_sync_succeeded(self, step: int) -> None:
        """Say that the weights of a step have arrived; after the transfer.

        Where they came through the weight group that :meth:`rendezvous` named, the next transfer
        uses it again.
        """
        met = self._met
        self._me.update(
            step=step,
            received=met.save_id if met else None,
            group=met.group_name if met else None,
        )

    # -- the weight group --------------------------------------------------------------------------

    def rendezvous(self, *, cancel: Cancellation | None = None) -> tuple[Rendezvous, int]:
        """Where the workers meet those that :meth:`ready_to_nccl_sync` has agreed with.

        Args:
            cancel: ends the wait from another thread.

        Returns:
            That, and the rank of this explorer's first worker.

        Raises:
            BroadcastError: nothing was agreed, or the trainer has not said so within
                ``broadcast_timeout``.
            CancelledError: the wait was cancelled.
            OSError: storage failed.
        """
        offer, self._transfer.agreed = self._transfer.agreed, None
        self._met = None
        if offer is None:
            raise BroadcastError("no transfer was agreed: nobody comes to a weight group")
        with self._wait(self.settings.broadcast_timeout, cancel) as wait:
            self._met, rank = self._group.rendezvous(offer, wait)
        return self._met, rank

    def open_group(
        self, device: torch.device, *, cancel: Cancellation | None = None
    ) -> WeightGroup:
        """The weight group, for a first worker that is in this process: :meth:`rendezvous`, and in.

        Args:
            device: where received tensors are.
            cancel: ends the wait for the rendezvous from another thread.

        Raises:
            BroadcastError: nothing was agreed; or not all came within ``broadcast_timeout``.
        """
        met, rank = self.rendezvous(cancel=cancel)
        deadline = self.settings.broadcast_timeout
        return self._group.open(met, rank, deadline=deadline, device=device)

    def group_failed(self) -> None:
        """Leave the weight group, and say so: the next transfer forms another."""
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
        """Form the weight group with the trainer, who calls its own; nothing is transferred.

        For an explorer of one worker, which is in this process.

        Args:
            timeout: seconds until the trainer has come; the settings' ``sync_timeout`` by default.
            device: where received tensors are.
            cancel: ends the wait from another thread.

        Raises:
            BroadcastError: it has not, or the group cannot be formed.
        """
        import torch  # noqa: PLC0415 # for who broadcasts

        if self.ready_to_nccl_sync(timeout=timeout, cancel=cancel) is None:
            raise BroadcastError("the trainer did not come to form a weight group")
        self._me.update(group=self.open_group(torch.device(device), cancel=cancel).name)

    def coordinate_weight_sync_teardown(
        self,
        timeout: float | None = None,  # noqa: ARG002 # the trainer's waits for others
        *,
        cancel: Cancellation | None = None,  # noqa: ARG002 # likewise
    ) -> None:
        """Leave the weight group, before the trainer does."""
        self.group_failed()

    def _worth_a_look(self) -> dict[Path, frozenset[str]]:
        layout = self._layout
        return super()._worth_a_look() | {
            layout.offer.parent: frozenset({layout.offer.name, layout.rendezvous.name}),
            layout.state: frozenset({layout.trainer_report.name, layout.latest.name}),
        }
