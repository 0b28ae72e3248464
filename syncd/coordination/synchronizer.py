"""``Synchronizer``: the methods of Trinity-RFT's Synchronizer, async, over the files of a job."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from syncd.coordination.explorer import ExplorerSynchronizer
from syncd.coordination.member import Role
from syncd.coordination.trainer import TrainerSynchronizer
from syncd.coordination.waiting import Cancellation
from syncd.protocol.errors import InvalidSettingsError
from syncd.protocol.participants import SavedState
from syncd.protocol.policy import RunningStatus, Version

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
#: Enough for one wait, and for other calls meanwhile.
_THREADS: Final = 4


class Synchronizer:
    """One participant of a job, as an async object.

    Each method runs the method of :attr:`blocking` with the same name in a thread. That method has
    the full documentation: see :class:`~syncd.coordination.member.Member`,
    :class:`~syncd.coordination.trainer.TrainerSynchronizer` and
    :class:`~syncd.coordination.explorer.ExplorerSynchronizer`. :attr:`blocking` also has methods
    that Trinity's Synchronizer lacks; call them with ``await asyncio.to_thread(…)``.

    If the task of a wait is cancelled, the wait restores the participant's status before it raises
    the cancellation.

    The constructor blocks, for one lease time if a dead participant had the name. In a running
    event loop use :meth:`open`.

    Args:
        job_dir: the job directory.
        role: ``trainer`` (a job has only one) or ``explorer``.
        name: this participant's name, unique among the live participants of its role.
        options: further keyword arguments of the class of :attr:`blocking`.

    Attributes:
        blocking: the TrainerSynchronizer or ExplorerSynchronizer that does the work.

    Raises:
        NameTakenError: a live participant has the name.
        JobUnavailableError: the job directory is missing or cannot be written.
        InvalidSettingsError: the role is unknown, or the name cannot be part of a file name.
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
        """Construct a Synchronizer without blocking the event loop.

        If this call is cancelled, it waits for the construction, and closes the new participant.
        """
        future = elsewhere(partial(cls, job_dir, role, name, **options))
        try:
            return await finished(future)
        except asyncio.CancelledError:
            if not future.cancelled() and future.exception() is None:
                await finished(asyncio.ensure_future(future.result().close()))
            raise

    # -- participants -------------------------------------------------------------------------

    async def add_module(self) -> None:
        """Register again after this process was paused for longer than a lease time."""
        await self._run(self.blocking.add_module)

    # -- statuses ------------------------------------------------------------------------------

    async def set_trainer_status(self, status: RunningStatus) -> None:
        """Set this trainer's status; ``stopped`` wakes all explorers that wait for this trainer."""
        await self._run(self._trainer.set_trainer_status, status)

    async def get_trainer_status(self) -> RunningStatus:
        """The trainer's status; ``stopped`` if no trainer has registered or the trainer died."""
        return await self._run(self.blocking.get_trainer_status)

    async def trainer_requires_weight_sync(self) -> bool | None:
        """True if the trainer waits for a transfer; None if the trainer has stopped."""
        return await self._run(self.blocking.trainer_requires_weight_sync)

    async def set_explorer_status(
        self, status: RunningStatus, old_status: RunningStatus | None = None
    ) -> None:
        """Set this explorer's status; ``require_sync`` asks the trainer for another sync."""
        await self._run(self._explorer.set_explorer_status, status, old_status)

    async def get_explorer_status_counts(self) -> dict[RunningStatus, int]:
        """The number of explorers by status; dead explorers are not counted."""
        return await self._run(self.blocking.get_explorer_status_counts)

    async def explorer_requires_sync(self) -> bool:
        """True if a live explorer waits for a sync that this trainer has not answered yet."""
        return await self._run(self._trainer.explorer_requires_sync)

    # -- weights -------------------------------------------------------------------------------

    async def set_model_state_dict(
        self, model_state_dict: Mapping[str, Any] | str | None, trainer_step: int
    ) -> None:
        """Announce new weights for the daemon to publish; answer the explorers' sync requests."""
        await self._run(self._trainer.set_model_state_dict, model_state_dict, trainer_step)

    async def set_model_state_dict_with_step_num(
        self,
        step: int | None = None,
        world_size: int | None = None,
        *,
        timeout: float | None = None,
    ) -> Version | None:
        """Request the publication of a step on disk; wait for it, and return the version."""
        call = self.blocking.set_model_state_dict_with_step_num
        return await self._wait(partial(call, step, world_size, timeout=timeout))

    async def notify_no_new_model_state_dict(self) -> None:
        """Tell waiting explorers that nothing newer than the published version will come."""
        await self._run(self._trainer.notify_no_new_model_state_dict)

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

    async def get_latest_model_version(self) -> Version | None:
        """The version that explorers should serve; None before the first version."""
        return await self._run(self.blocking.get_latest_model_version)

    async def get_latest_model_path(self, *, use_huggingface: bool = False) -> Path | str | None:
        """The location of the newest weights."""
        return await self._run(
            partial(self.blocking.get_latest_model_path, use_huggingface=use_huggingface)
        )

    async def get_model_state_dict_iterator(
        self, version: Version | None = None
    ) -> AsyncGenerator[tuple[str, Tensor], None]:
        """The tensors of a version, by default the newest, one at a time and in host memory.

        To stop early, close the iterator (``contextlib.aclosing``), which ends the lease.
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
        """Name, dtype (for example ``torch.bfloat16``) and shape of each tensor of a version."""
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

        ``module`` is this participant's role. An explorer's ``trainer_step`` is ignored.

        Returns:
            The trainer's step; None if no transfer takes place.
        """
        if module == "trainer":
            call = partial(self._trainer.ready_to_nccl_sync, trainer_step, timeout=timeout)
        else:
            call = partial(self._explorer.ready_to_nccl_sync, timeout=timeout)
        return await self._wait(call)

    # -- the weight group --------------------------------------------------------------------------

    async def setup_weight_sync_group(
        self, master_address: str, master_port: int, state_dict_meta: object = None
    ) -> None:
        """Set the trainer's meeting place of future weight groups, and close the open group."""
        call = self._trainer.setup_weight_sync_group
        await self._run(call, master_address, master_port, state_dict_meta)

    async def coordinate_weight_sync_setup(
        self, timeout: float | None = None, *, device: str = "cpu"
    ) -> None:
        """Form the weight group, without a transfer; all participants must call this method."""
        call = self.blocking.coordinate_weight_sync_setup
        await self._wait(partial(call, timeout, device=device))

    async def coordinate_weight_sync_teardown(self, timeout: float | None = None) -> None:
        """Leave the weight group. An explorer leaves at once, the trainer after the explorers."""
        await self._wait(partial(self.blocking.coordinate_weight_sync_teardown, timeout))

    # -- the state to resume from, and the end -----------------------------------------------------

    async def save_state(self, iteration: int, state: Mapping[str, Any]) -> None:
        """Save this participant's latest iteration and state (JSON), atomically."""
        await self._run(self.blocking.save_state, iteration, state)

    async def load_state(
        self, role: Role | None = None, name: str | None = None
    ) -> SavedState | None:
        """The newest state that this or another participant saved; None if it saved none."""
        return await self._run(self.blocking.load_state, role, name)

    async def close(self) -> None:
        """End all waits, report that this participant has stopped, and give its name up."""
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
        raise InvalidSettingsError(
            f"{self.blocking.name} is an explorer: this call needs a trainer"
        )

    @property
    def _explorer(self) -> ExplorerSynchronizer:
        if isinstance(self.blocking, ExplorerSynchronizer):
            return self.blocking
        raise InvalidSettingsError(
            f"{self.blocking.name} is the trainer: this call needs an explorer"
        )


class Threads:
    """A pool of threads for blocking calls."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="syncd-synchronizer")

    async def run(self, call: Callable[..., T], *given: Any) -> T:
        """Run a call in a thread; return the call's result or raise its error."""
        return await finished(self._submit(partial(call, *given)))

    async def wait(self, call: Callable[..., T]) -> T:
        """Run a wait in a thread; a cancellation of the task cancels the wait."""
        cancel = Cancellation()
        return await finished(self._submit(partial(call, cancel=cancel)), cancel.cancel)

    def close(self) -> None:
        """Accept no more calls."""
        self._pool.shutdown(wait=False)

    def _submit(self, call: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._pool, call)


def elsewhere(call: Callable[[], T]) -> asyncio.Future[T]:
    """Run a call in the event loop's own pool, because :class:`Threads` can be busy or closed."""
    return asyncio.get_running_loop().run_in_executor(None, call)


async def finished(future: asyncio.Future[T], cancel: Callable[[], None] = lambda: None) -> T:
    """Wait for a thread's call; raise a cancellation only after the call has ended.

    An earlier cancellation would let the event loop close while the call is running.
    """
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error
            cancel()
    if cancelled is None:
        return future.result()
    if not future.cancelled():
        future.exception()  # else asyncio warns of an error that nobody retrieved
    raise cancelled
