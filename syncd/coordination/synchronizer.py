"""``Synchronizer``: the methods of Trinity-RFT's, awaitable, over the files of a job."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from syncd.coordination.awaiting import Threads, elsewhere, finished
from syncd.coordination.explorer import ExplorerSynchronizer
from syncd.coordination.leased_version import LeasedVersion
from syncd.coordination.member import Module, Role
from syncd.coordination.trainer import TrainerSynchronizer
from syncd.coordination.transfer import Takers
from syncd.protocol.errors import InvalidSettingsError
from syncd.protocol.participants import Offer, Rendezvous, SavedState
from syncd.protocol.policy import RunningStatus, Version
from syncd.protocol.records import SaveId
from syncd.protocol.reports import Reload

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from syncd.coordination.broadcast import WeightGroup


class Synchronizer:
    """One participant of a job: registered, live, and in agreement with the others.

    What each method does, raises and does not promise is said at its blocking twin of the same
    name: in :class:`~syncd.coordination.trainer.TrainerSynchronizer`,
    :class:`~syncd.coordination.explorer.ExplorerSynchronizer`, or
    :class:`~syncd.coordination.member.Member` for what both have. Here it is awaited; a wait whose
    task is cancelled has put its status back before the cancellation is raised.

    Construction blocks, for a lease time where the name is a dead participant's: in a running event
    loop use :meth:`open`.

    Args:
        job_dir: the job directory.
        role: ``trainer``, of which a job has one, or ``explorer``.
        name: this participant's, unique among the live ones of its role.
        options: what the blocking twin of the role takes besides, by keyword.

    Attributes:
        blocking: the twin that does the work.

    Raises:
        NameTakenError: a live participant has the name.
        JobUnavailableError: the job directory is missing or cannot be written.
        InvalidSettingsError: no such role, or the name cannot be part of a file name.
    """

    def __init__(self, job_dir: str | Path, role: Role, name: str, **options: Any) -> None:
        if role not in {"trainer", "explorer"}:
            raise InvalidSettingsError(f"role {role!r} is neither 'trainer' nor 'explorer'")
        self.blocking: TrainerSynchronizer | ExplorerSynchronizer
        if role == "trainer":
            self.blocking = TrainerSynchronizer(job_dir, name, **options)
        else:
            self.blocking = ExplorerSynchronizer(job_dir, name, **options)
        self._threads = Threads()
        self._run, self._wait = self._threads.run, self._threads.wait

    @classmethod
    async def open(cls, job_dir: str | Path, role: Role, name: str, **options: Any) -> Self:
        """Construct one without blocking the event loop.

        A cancellation is raised once it is constructed, and closed again.
        """
        future = elsewhere(partial(cls, job_dir, role, name, **options))
        try:
            return await finished(future)
        except asyncio.CancelledError:
            if not future.cancelled() and future.exception() is None:
                await finished(asyncio.ensure_future(future.result().close()))
            raise

    # -- who there is --------------------------------------------------------------------------

    async def add_module(self) -> None:
        """Register again, after this process was paused for longer than a lease."""
        await self._run(self.blocking.add_module)

    async def modules(self) -> list[Module]:
        """All that have registered and are not collected, and whether they live."""
        return await self._run(self.blocking.modules)

    async def all_modules_gone(self) -> bool:
        """Whether no other participant lives."""
        return await self._run(self.blocking.all_modules_gone)

    # -- statuses ------------------------------------------------------------------------------

    async def set_trainer_status(self, status: RunningStatus) -> None:
        """Say what this trainer does; ``stopped`` wakes all explorers that wait for it."""
        await self._run(self._trainer.set_trainer_status, status)

    async def get_trainer_status(self) -> RunningStatus:
        """What the trainer does; stopped before the first one, and when it has died."""
        return await self._run(self.blocking.get_trainer_status)

    async def trainer_requires_weight_sync(self) -> bool | None:
        """Whether the trainer waits for a transfer; None where it has stopped."""
        return await self._run(self.blocking.trainer_requires_weight_sync)

    async def set_explorer_status(
        self, status: RunningStatus, old_status: RunningStatus | None = None
    ) -> None:
        """Say what this explorer does. With ``require_sync`` it asks for a sync once more."""
        await self._run(self._explorer.set_explorer_status, status, old_status)

    async def set_explorer_version(self, version: Version, refused: str | None = None) -> None:
        """Say which version this explorer serves, and which newer one it has refused, and why."""
        await self._run(self._explorer.set_explorer_version, version, refused)

    async def report(
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
        """Say all of what an explorer has to say; what is left out is taken back."""
        call = self._explorer.report
        await self._run(
            partial(
                call,
                version,
                refused=refused,
                reload=reload,
                fault=fault,
                received=received,
                workers=workers,
                group=group,
            )
        )

    async def get_explorer_status_counts(self) -> dict[RunningStatus, int]:
        """How many explorers have which status; the dead are not counted."""
        return await self._run(self.blocking.get_explorer_status_counts)

    async def explorer_requires_sync(self) -> bool:
        """Whether a live explorer waits for a sync that this trainer has not answered yet."""
        return await self._run(self._trainer.explorer_requires_sync)

    # -- weights -------------------------------------------------------------------------------

    async def begin_save(self, step: int) -> None:
        """Announce a save before its first byte is written."""
        await self._run(self._trainer.begin_save, step)

    async def set_model_state_dict(
        self, model_state_dict: Mapping[str, Any] | str | None, trainer_step: int
    ) -> None:
        """Announce new weights, which the daemon then publishes; whoever asked is answered."""
        await self._run(self._trainer.set_model_state_dict, model_state_dict, trainer_step)

    async def set_model_state_dict_with_step_num(
        self,
        step: int | None = None,
        world_size: int | None = None,
        *,
        timeout: float | None = None,
    ) -> Version | None:
        """Let a step that is on disk be published, wait for that, and return its version."""
        call = self.blocking.set_model_state_dict_with_step_num
        return await self._wait(partial(call, step, world_size, timeout=timeout))

    async def save_is_on_its_way(self) -> bool:
        """Whether the daemon has neither published nor refused what was announced last."""
        return await self._run(self._trainer.save_is_on_its_way)

    async def notify_no_new_model_state_dict(self) -> None:
        """Tell the explorers that wait that nothing newer than what is published will come."""
        await self._run(self._trainer.notify_no_new_model_state_dict)

    async def wait_for_explorers(self, timeout: float | None = None) -> bool:
        """Wait while the slowest live explorer lags by more than ``max_explorer_lag`` steps."""
        return await self._wait(partial(self._trainer.wait_for_explorers, timeout))

    async def wait_new_model_state_dict(
        self,
        current: Version | None,
        *,
        no_wait: bool = False,
        timeout: float | None = None,
    ) -> Version | None:
        """Require a sync, and wait until a newer version than ``current`` is published."""
        call = self._explorer.wait_new_model_state_dict
        return await self._wait(partial(call, current, no_wait=no_wait, timeout=timeout))

    async def wait_for_newer(
        self, current: Version | None, *, asks: bool = True, timeout: float | None = None
    ) -> Version:
        """Wait until a newer version than ``current`` is published, whatever the trainer says."""
        call = self._explorer.wait_for_newer
        return await self._wait(partial(call, current, asks=asks, timeout=timeout))

    async def wait_for_weights(
        self,
        current: Version | None,
        *,
        joins: Callable[[], bool],
        ends_with_trainer: bool,
        timeout: float | None = None,
    ) -> Version | Offer | None:
        """Require a sync, and wait for a newer version or a transfer, whichever comes first."""
        call = self._explorer.wait_for_weights
        return await self._wait(
            partial(
                call, current, joins=joins, ends_with_trainer=ends_with_trainer, timeout=timeout
            )
        )

    async def current_run(self) -> str | None:
        """The run id of the trainer that works now; None where none does."""
        return await self._run(self._explorer.current_run)

    async def hold(self, version: Version) -> LeasedVersion:
        """Hold a version: its files stay until it is released, before this is closed."""
        return await self._run(self.blocking.hold, version)

    async def may_produce(self) -> bool:
        """Whether this explorer is fresh enough to go on producing (``max_staleness``)."""
        return await self._run(self._explorer.may_produce)

    async def get_latest_model_version(self) -> Version | None:
        """The version that explorers should serve; None before the first."""
        return await self._run(self.blocking.get_latest_model_version)

    async def get_latest_model_path(self, *, use_huggingface: bool = False) -> Path | str | None:
        """Where the newest weights are."""
        return await self._run(
            partial(self.blocking.get_latest_model_path, use_huggingface=use_huggingface)
        )

    async def get_model_state_dict_iterator(
        self, version: Version | None = None
    ) -> AsyncGenerator[tuple[str, Tensor], None]:
        """A version's tensors, the newest one's by default, one at a time and in host memory.

        Close it (``contextlib.aclosing``) where it is not read to its end: that ends the lease.
        """
        tensors = self.blocking.get_model_state_dict_iterator(version)
        try:
            while (item := await self._run(next, tensors, None)) is not None:
                yield item
        finally:
            await finished(elsewhere(tensors.close))

    async def get_state_dict_meta(
        self, version: Version | None = None
    ) -> list[tuple[str, str, tuple[int, ...]]]:
        """Name, dtype (``torch.bfloat16``) and shape of each tensor of a version, or the newest."""
        return await self._run(self.blocking.get_state_dict_meta, version)

    # -- transfers -----------------------------------------------------------------------------

    async def ready_to_nccl_sync(
        self,
        module: Role,
        trainer_step: int,
        *,
        timeout: float | None = None,
    ) -> int | None:
        """Wait until the trainer and all live explorers are ready for a transfer.

        Args:
            module: our role.
            trainer_step: the trainer's step; what an explorer passes is not looked at.
            timeout: seconds; the settings' ``sync_timeout`` by default.

        Returns:
            The trainer's step; None where they are not ready in time, or the other side is gone.
        """
        if module == "trainer":
            call = partial(self._trainer.ready_to_nccl_sync, trainer_step, timeout=timeout)
        else:
            call = partial(self._explorer.ready_to_nccl_sync, timeout=timeout)
        return await self._wait(call)

    async def nccl_sync_succeeded(self, step: int) -> None:
        """Say that the weights of a step have arrived; on both sides, after the transfer."""
        if isinstance(self.blocking, TrainerSynchronizer):
            await self._run(self.blocking.nccl_sync_succeeded)
        else:
            await self._run(self.blocking.nccl_sync_succeeded, step)

    async def takers(self) -> Takers:
        """How many explorers work, and how many of them take part in broadcasts."""
        return await self._run(self._trainer.takers)

    async def have_received(self, save_id: SaveId) -> bool:
        """Whether there are explorers that take part in broadcasts, and all serve what was sent."""
        return await self._run(self._trainer.have_received, save_id)

    async def has_missed(self, save_id: SaveId) -> bool:
        """As trainer: whether one may not produce, and has missed what was sent last."""
        return await self._run(self._trainer.has_missed, save_id)

    async def goes_by_files(self, step: int) -> None:
        """Say that the weights of a step come by the checkpoint path."""
        await self._run(self._trainer.goes_by_files, step)

    # -- the weight group --------------------------------------------------------------------------

    async def setup_weight_sync_group(
        self, master_address: str, master_port: int, state_dict_meta: object = None
    ) -> None:
        """Say where the weight groups that are formed from now on meet; the one that is open ends.

        For the trainer alone.
        """
        call = self._trainer.setup_weight_sync_group
        await self._run(call, master_address, master_port, state_dict_meta)

    async def rendezvous(self) -> tuple[Rendezvous, int]:
        """Where an explorer's workers meet those that were agreed with, and its first rank."""
        return await self._wait(self._explorer.rendezvous)

    async def open_group(self, device: torch.device, save_id: SaveId | None = None) -> WeightGroup:
        """The weight group of all that :meth:`ready_to_nccl_sync` has agreed with, for a transfer.

        Args:
            device: where the tensors are.
            save_id: what is transferred; the trainer says.
        """
        if save_id is None:
            return await self._wait(partial(self._explorer.open_group, device))
        return await self._run(self._trainer.open_group, save_id, device)

    async def group_failed(self) -> None:
        """Leave the weight group: the next transfer forms another."""
        await self._run(self.blocking.group_failed)

    async def coordinate_weight_sync_setup(
        self, timeout: float | None = None, *, device: str = "cpu"
    ) -> None:
        """Form the weight group; all participants call it, and nothing is transferred."""
        call = self.blocking.coordinate_weight_sync_setup
        await self._wait(partial(call, timeout, device=device))

    async def coordinate_weight_sync_teardown(self, timeout: float | None = None) -> None:
        """Leave the weight group: explorers at once, the trainer once they have."""
        await self._wait(partial(self.blocking.coordinate_weight_sync_teardown, timeout))

    # -- what is needed to resume, and the end -----------------------------------------------------

    async def save_state(self, iteration: int, state: Mapping[str, Any]) -> None:
        """Save this participant's latest iteration and state (JSON), atomically."""
        await self._run(self.blocking.save_state, iteration, state)

    async def load_state(self) -> SavedState | None:
        """What it saved last; None before the first."""
        return await self._run(self.blocking.load_state)

    async def close(self) -> None:
        """End all waits, say that this participant has stopped, and give its name up."""
        try:
            await finished(elsewhere(self.blocking.close))
        finally:
            self._threads.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def _trainer(self) -> TrainerSynchronizer:
        if isinstance(self.blocking, TrainerSynchronizer):
            return self.blocking
        raise InvalidSettingsError(f"{self.blocking.name} is an explorer: only a trainer can do so")

    @property
    def _explorer(self) -> ExplorerSynchronizer:
        if isinstance(self.blocking, ExplorerSynchronizer):
            return self.blocking
        raise InvalidSettingsError(f"{self.blocking.name} is the trainer: only explorers can do so")
