"""``Synchronizer``: the methods of Trinity-RFT's Synchronizer, async, over the files of a job."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, Self, TypeVar

from syncd.coordination.explorer import ExplorerSynchronizer
from syncd.coordination.member import Member, Role
from syncd.coordination.trainer import TrainerSynchronizer
from syncd.coordination.waiting import Cancellation
from syncd.protocol.errors import InvalidSettingsError
from syncd.protocol.policy import Version

if TYPE_CHECKING:
    from torch import Tensor

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")
#: Enough for one wait, and for other calls meanwhile.
_THREADS: Final = 4


def in_thread(
    method: Callable[Concatenate[S, P], T],
) -> Callable[Concatenate[Synchronizer, P], Coroutine[Any, Any, T]]:
    """Make a coroutine of a method of :attr:`Synchronizer.blocking`.

    A cancellation of the task passes to a method with the parameter ``cancel``, which the coroutine
    lacks.
    """
    signature = inspect.signature(method)
    kept = [one for one in signature.parameters.values() if one.name != "cancel"]

    @functools.wraps(method)
    async def coroutine(self: Synchronizer, /, *args: P.args, **kwargs: P.kwargs) -> T:
        call: Callable[P, T] | None = getattr(self.blocking, method.__name__, None)
        if call is None:
            raise self._has_other_role()
        run = self._run if len(kept) == len(signature.parameters) else self._wait
        return await run(partial(call, *args, **kwargs))

    vars(coroutine)["__signature__"] = signature.replace(parameters=kept)
    return coroutine


class Synchronizer:
    """One participant of a job, as an async object.

    Each method runs the method of :attr:`blocking` with the same name in a thread. That method has
    the full documentation: see :class:`~syncd.coordination.member.Member`,
    :class:`~syncd.coordination.trainer.TrainerSynchronizer` and
    :class:`~syncd.coordination.explorer.ExplorerSynchronizer`. Call ``open_group`` of
    :attr:`blocking`, whose arguments depend on the role, with ``await asyncio.to_thread(…)``.

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
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="syncd-synchronizer")

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

    add_module = in_thread(Member.add_module)
    modules = in_thread(Member.modules)
    all_modules_gone = in_thread(Member.all_modules_gone)

    # -- statuses ------------------------------------------------------------------------------

    set_trainer_status = in_thread(TrainerSynchronizer.set_trainer_status)
    get_trainer_status = in_thread(Member.get_trainer_status)
    trainer_requires_weight_sync = in_thread(Member.trainer_requires_weight_sync)
    set_explorer_status = in_thread(ExplorerSynchronizer.set_explorer_status)
    get_explorer_status_counts = in_thread(Member.get_explorer_status_counts)
    explorer_requires_sync = in_thread(TrainerSynchronizer.explorer_requires_sync)
    set_explorer_version = in_thread(ExplorerSynchronizer.set_explorer_version)
    report = in_thread(ExplorerSynchronizer.report)
    current_run = in_thread(ExplorerSynchronizer.current_run)
    may_produce = in_thread(ExplorerSynchronizer.may_produce)
    wait_for_explorers = in_thread(TrainerSynchronizer.wait_for_explorers)
    wait_served = in_thread(TrainerSynchronizer.wait_served)
    wait_for_trainer = in_thread(ExplorerSynchronizer.wait_for_trainer)

    # -- weights -------------------------------------------------------------------------------

    begin_save = in_thread(TrainerSynchronizer.begin_save)
    set_model_state_dict = in_thread(TrainerSynchronizer.set_model_state_dict)
    save_is_on_its_way = in_thread(TrainerSynchronizer.save_is_on_its_way)
    set_model_state_dict_with_step_num = in_thread(Member.set_model_state_dict_with_step_num)
    notify_no_new_model_state_dict = in_thread(TrainerSynchronizer.notify_no_new_model_state_dict)
    wait_new_model_state_dict = in_thread(ExplorerSynchronizer.wait_new_model_state_dict)
    wait_for_newer = in_thread(ExplorerSynchronizer.wait_for_newer)
    wait_for_weights = in_thread(ExplorerSynchronizer.wait_for_weights)
    get_latest_model_version = in_thread(Member.get_latest_model_version)
    get_latest_model_path = in_thread(Member.get_latest_model_path)
    get_state_dict_meta = in_thread(Member.get_state_dict_meta)
    hold = in_thread(Member.hold)
    hold_step = in_thread(ExplorerSynchronizer.hold_step)

    async def get_model_state_dict_iterator(
        self, version: Version | None = None
    ) -> AsyncGenerator[tuple[str, Tensor], None]:
        """The tensors of a version, by default the newest, one at a time and in host memory.

        To stop early, close the iterator (``contextlib.aclosing``), which ends the lease.
        """
        tensors = self.blocking.get_model_state_dict_iterator(version)
        try:
            while (item := await self._run(partial(next, tensors, None))) is not None:
                yield item
        finally:
            await finished(elsewhere(tensors.close))

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
        if (module == "trainer") != isinstance(self.blocking, TrainerSynchronizer):
            raise self._has_other_role()
        if isinstance(self.blocking, TrainerSynchronizer):
            call = partial(self.blocking.ready_to_nccl_sync, trainer_step, timeout=timeout)
        else:
            call = partial(self.blocking.ready_to_nccl_sync, timeout=timeout)
        return await self._wait(call)

    async def nccl_sync_succeeded(self, step: int) -> None:
        """Record that a step's weights were sent, or have arrived."""
        if isinstance(self.blocking, TrainerSynchronizer):
            await self._run(self.blocking.nccl_sync_succeeded)
        else:
            await self._run(partial(self.blocking.nccl_sync_succeeded, step))

    takers = in_thread(TrainerSynchronizer.takers)
    have_received = in_thread(TrainerSynchronizer.have_received)
    serve_resumed = in_thread(TrainerSynchronizer.serve_resumed)
    takes_deltas = in_thread(TrainerSynchronizer.takes_deltas)
    say_no_deltas = in_thread(TrainerSynchronizer.say_no_deltas)
    has_missed = in_thread(TrainerSynchronizer.has_missed)
    goes_by_files = in_thread(TrainerSynchronizer.goes_by_files)

    # -- the weight group --------------------------------------------------------------------------

    setup_weight_sync_group = in_thread(TrainerSynchronizer.setup_weight_sync_group)
    rendezvous = in_thread(ExplorerSynchronizer.rendezvous)
    group_failed = in_thread(TrainerSynchronizer.group_failed)
    coordinate_weight_sync_setup = in_thread(TrainerSynchronizer.coordinate_weight_sync_setup)
    coordinate_weight_sync_teardown = in_thread(TrainerSynchronizer.coordinate_weight_sync_teardown)

    # -- the state to resume from, and the end -----------------------------------------------------

    save_state = in_thread(Member.save_state)
    load_state = in_thread(Member.load_state)

    async def close(self) -> None:
        """End all waits, report that this participant has stopped, and give its name up."""
        try:
            await finished(elsewhere(self.blocking.close))
        finally:
            self._pool.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _run(self, call: Callable[[], T], cancel: Callable[[], None] = lambda: None) -> T:
        return await finished(asyncio.get_running_loop().run_in_executor(self._pool, call), cancel)

    async def _wait(self, call: Callable[..., T]) -> T:
        cancel = Cancellation()
        return await self._run(partial(call, cancel=cancel), cancel.cancel)

    def _has_other_role(self) -> InvalidSettingsError:
        is_trainer = isinstance(self.blocking, TrainerSynchronizer)
        us, needed = ("the trainer", "an explorer") if is_trainer else ("an explorer", "a trainer")
        return InvalidSettingsError(f"{self.blocking.name} is {us}: this call needs {needed}")


def elsewhere(call: Callable[[], T]) -> asyncio.Future[T]:
    """Run a call in the event loop's own pool, because ours can be busy or closed."""
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
