"""``Saver``: one rank's saves, written one after another in a thread; rank 0 announces them."""

from __future__ import annotations

import atexit
import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import Final, Self

from syncd.coordination.member import Doubles
from syncd.coordination.trainer import TrainerSynchronizer
from syncd.deltas.needs import missing_extra
from syncd.protocol.errors import (
    InvalidSettingsError,
    JobUnavailableError,
    SaveFailedError,
    SyncdError,
)
from syncd.protocol.policy import RunningStatus, SyncMethod, SyncSettings
from syncd.protocol.records import SaveId
from syncd.protocol.reports import ResumedFrom
from syncd.storage.errnos import unwritable_storage
from syncd.storage.fsio import Storage
from syncd.storage.job import Job
from trainer_hooks.explorers import Explorers
from trainer_hooks.ranks import Ranks
from trainer_hooks.refusals import Refusals
from trainer_hooks.resuming.loaded import is_in
from trainer_hooks.resuming.resumable import failed_checkpoint
from trainer_hooks.saves import OwnSave, SaveMemory, let_go
from trainer_hooks.settings import SaveLayout, SaveSettings
from trainer_hooks.state.host_buffers import HostBuffers
from trainer_hooks.state.pieces import pieces_of
from trainer_hooks.state.weights_in_memory import WeightsInMemory
from trainer_hooks.writing.rank_files import RankContents
from trainer_hooks.writing.retire import retire_old
from trainer_hooks.writing.writer import RankWriter

log = logging.getLogger(__name__)

#: The most unfinished saves: one is being written, and the copy of another waits to be written.
_LIMIT: Final = 2
#: The longest wait for one save, in save_timeouts: one to write it, and one for the other ranks.
_PATIENCE: Final = 2
#: Seconds: longer than any training, but within the limit of locks.
_FOREVER: Final = 1e9
#: Seconds to clean up after a save that is given up.
_LAST: Final = 30.0

#: Makes this rank's part of a save, in buffers if any. The stack closes at the end of the save.
MakeContents = Callable[[HostBuffers | None, ExitStack], RankContents]
Gather = Callable[[ExitStack], WeightsInMemory | None]


@dataclass
class Saver:
    """Saves one rank's parts in a job. It needs no process group.

    At most two saves are unfinished, each in its own memory. If a save cannot be written, this rank
    records the failure in storage, so that no other rank waits for it. The interpreter does not
    wait for the writing thread at exit: it cuts off the write, as a kill would.

    Attributes:
        run_id: part of the save ids; the same on all ranks.
        held: the content of the model; see :mod:`~trainer_hooks.resuming.loaded`.
        patience: the longest wait for one save, in seconds.
        writer: writes into the job.
        memory: writes into a memory filesystem, on rank 0 alone.
        explorers: only rank 0 communicates with them.
        announced: on rank 0, the step that was announced last.
        is_served: False if explorers may serve other weights than those that training begins with.
        has_promised: on rank 0, True if a full checkpoint was checked for resuming.
        stopped: ends the waits for other ranks, so that unfinished saves fail.
    """

    job_dir: str | Path
    rank: int
    world_size: int
    _: KW_ONLY
    settings: SyncSettings
    saving: SaveSettings
    held: ResumedFrom | Path | None = None
    storage: Storage | None = None

    def __post_init__(self) -> None:
        self.patience = min(_PATIENCE * self.settings.save_timeout, _FOREVER)
        self.run_id = secrets.token_hex(6)
        self.writer: RankWriter
        self.memory: RankWriter | None = None
        self.explorers = Explorers()
        self.announced: int | None = None
        self.is_served = True
        self.stopped = threading.Event()
        self._count = 0
        self._changed = threading.Condition()
        self.copies = SaveMemory(_LIMIT, self._changed)
        #: The unfinished work and its steps. The first is under way.
        self._queue: list[tuple[int, Callable[[], object]]] = []
        self._closed = False
        self._errors: deque[SaveFailedError] = deque()
        self._written: int | None = None
        self.has_promised = False
        self._refusals = Refusals(self._job(self.saving.memory_dir or self.job_dir, opens=False))
        # A daemon thread, so that the process can end even if storage never answers.
        self._thread = threading.Thread(target=self._run, name="syncd-writer", daemon=True)

    def open(self) -> None:
        """Open the folders; on rank 0, register the trainer. After an error, call :meth:`close`.

        Raises:
            JobUnavailableError, NoRoomError: a folder cannot be written.
            NameTakenError: another trainer works in this job.
            InvalidSettingsError: a package for deltas is missing.
        """
        memory_dir = self.saving.memory_dir
        in_job = self.settings.method is SyncMethod.MEMORY and memory_dir is None
        timeout = self.settings.save_timeout
        if self.settings.deltas and (why := missing_extra()):
            raise InvalidSettingsError(f"deltas=True cannot be used, because {why}")
        try:
            self.writer = RankWriter(
                self._job(self.job_dir, opens=True),
                self.rank,
                self.world_size,
                save_timeout=timeout,
                stopped=self.stopped,
                is_gathered=in_job or self.saving.layout is SaveLayout.FULL,
            )
            if memory_dir is not None:  # only rank 0 can reach it
                job = self._job(memory_dir, opens=self.rank == 0)
                self.memory = RankWriter(
                    job, self.rank, 1, save_timeout=timeout, is_gathered=True, stopped=self.stopped
                )
            if self.rank == 0:
                synchronizer = TrainerSynchronizer(
                    self.job_dir,
                    self.saving.name,
                    settings=self.settings,
                    memory_dir=memory_dir,
                    run_id=self.run_id,
                    world_size=self.world_size,
                    resumed_from=self.held if isinstance(self.held, ResumedFrom) else None,
                    doubles=Doubles(storage=self.storage),
                )
                self.explorers = Explorers(synchronizer)
                synchronizer.set_trainer_status(RunningStatus.RUNNING)
                served = self.explorers.serve_resumed(partial(is_in, self.writer.job))
                self.is_served = bool(served) or self.held == self.writer.job.layout.root
        except OSError as error:
            raise unwritable_storage(error, self.job_dir) or JobUnavailableError(
                f"cannot use {self.job_dir} now: {error}"
            ) from error

    def open_together(self, ranks: Ranks) -> None:
        """Open on all ranks, or raise an error on all of them. Collective."""
        try:
            ranks.together(self.open)
            told = ranks.gathered((self.run_id, self.is_served, str(self.writer.job.layout.root)))
        except BaseException:
            self.close()
            raise
        self.run_id, self.is_served, root = told[0]
        for rank, (_, _, other) in enumerate(told):
            if self.rank == 0 and other != root:  # perhaps another mount of the same folder
                log.warning(
                    "rank 0 saves in %s, but rank %d saves in %s. If these are not the same "
                    "folder, no save is announced: give all ranks the same job directory",
                    root,
                    rank,
                    other,
                )
                break

    def coming_id(self, step: int) -> SaveId:
        """The id that the next new save gets, if it is of this step."""
        return SaveId(self.run_id, step, self._count)

    def new(self, step: int) -> OwnSave:
        """Return a new save. All ranks must number the same saves."""
        save = OwnSave(self.coming_id(step))
        self._count += 1
        return save

    def save(
        self, save: OwnSave, make: MakeContents, writer: RankWriter | None = None, name: str = ""
    ) -> None:
        """Make this rank's part of a save, and queue it. Waits if two saves are unfinished.

        An error of ``make`` is raised; any other failure is kept for :meth:`raise_failure`.
        ``name`` is for messages.
        """
        writer, step = writer or self.writer, save.id.step
        with ExitStack() as at_end:
            if writer.rank >= writer.world_size:  # only rank 0 writes there, but all ranks gather
                make(None, at_end)
                return
            base = at_end.enter_context(ExitStack())
            has_base = save.base is not None and self.has_ended()
            old = self.copies.base_of(save, base) if has_base else None
            buffers = self.copies.take(at_end) if self.has_room() else None
            try:
                # Needed even if there is no room, because the other ranks gather.
                contents = make(buffers, at_end)
            except BaseException:
                self._leave_out(save, writer)
                raise
            if buffers is not None:
                model, tied = contents.model, contents.tied
                if self.copies.keeps and model is not None:
                    self.copies.keep(save, model, buffers)
                    if save.base is not None:
                        new = partial(pieces_of, model, old, self.rank, self.copies.first_ranks)
                        contents = contents._replace(
                            base=str(save.base), pieces=lambda _: new(tied=tied), needs_base=base
                        )
                self.submit(step, partial(self.write, save, contents, writer, at_end.pop_all()))
                return
        self.refuse(name or f"step {step}")
        self._leave_out(save, writer)

    def add_hugging_face(self, save: OwnSave, gather: Gather) -> None:
        """Add the full weights that rank 0 gathers to a full checkpoint.

        An error of ``gather`` is raised; any other failure is kept for :meth:`raise_failure`.
        """
        with ExitStack() as stack:
            spool, at_end = gather(stack), stack.pop_all()
        if spool is not None:
            save.has_hugging_face = True
            self.submit(save.id.step, partial(self._write_hugging_face, save, spool, at_end))

    def has_room(self) -> bool:
        """Wait until at most one save is unfinished; return False if that takes too long."""
        with self._changed:
            return self._changed.wait_for(
                lambda: len(self._queue) < _LIMIT and bool(self.copies), self.patience
            )

    def submit(self, step: int, work: Callable[[], object]) -> None:
        """Queue work for the thread. Its errors are kept for :meth:`raise_failure`."""
        if not self._thread.is_alive():
            self._thread.start()
            atexit.register(self._say_unclosed)
        with self._changed:
            self._queue.append((step, work))
            self._changed.notify_all()

    def refuse(self, name: str) -> None:
        """Record that a save is skipped because two saves took too long."""
        # An earlier save may have ended by now, while the ranks gathered this one.
        why = self._being_written() or "two saves were unfinished"
        self._errors.append(
            SaveFailedError(f"{name} is not saved, because {why} after {self.patience:g} s")
        )

    @property
    def is_busy(self) -> bool:
        """True if a save is unfinished."""
        return bool(self._queue)

    def has_ended(self, *, most: int = 0, timeout: float | None = None) -> bool:
        """Wait until at most ``most`` saves are unfinished; return False on timeout."""
        timeout = self.patience if timeout is None else timeout
        with self._changed:
            return self._changed.wait_for(lambda: len(self._queue) <= most, timeout)

    def wait(self) -> None:
        """Wait until all saves have ended.

        Raises:
            SaveFailedError: a save has not ended after twice the patience.
        """
        timeout = _LIMIT * self.patience
        if not self.has_ended(timeout=timeout):
            raise SaveFailedError(
                f"{self._being_written()} after {timeout:g} s; syncd goes on writing"
            )

    def raise_failure(self) -> None:
        """Raise the oldest error that was not raised yet."""
        if self._errors:
            raise self._errors.popleft()

    def take_written(self) -> int | None:
        """Return the bytes that saves wrote since the previous call; None if no save succeeded."""
        with self._changed:
            written, self._written = self._written, None
            return written

    def close(self) -> list[SaveFailedError]:
        """Wait for unfinished saves, and report that this trainer has stopped.

        Saves that take too long are cancelled. Returns the errors, oldest first.
        """
        atexit.unregister(self._say_unclosed)
        left = self._end(self.patience)
        if left:
            self.stopped.set()
            self._end(_LAST)
            self._errors.append(
                SaveFailedError(
                    f"{left} after {self.patience:g} s, so syncd cancelled the writing. Saves "
                    "announced earlier are unaffected"
                )
            )
        self.explorers.close()
        self._refusals.look_last(self.stopped)
        return list(self._errors)

    def _say_unclosed(self) -> None:
        if self._thread.is_alive():  # not in a fork
            log.warning(
                "the trainer ends without close(): its last saves may be lost. Use a with block"
            )

    def _job(self, root: str | Path, *, opens: bool) -> Job:
        job = Job.at(Path(root).absolute(), self.storage)
        if opens:
            job.open()
            # open() changes nothing in an existing job. refresh() fails if it is read-only.
            job.storage.refresh(job.layout.root)
        return job

    def _leave_out(self, save: OwnSave, writer: RankWriter) -> None:
        """Tell the other ranks that this rank will not write its part."""
        save.has_failed = True
        self.submit(save.id.step, lambda: writer.say_failed(save.id))

    def _being_written(self) -> str:
        """The unfinished saves, for messages; empty if there are none."""
        with self._changed:
            steps = [str(step) for step, _ in self._queue]
        if len(steps) > 1:
            return f"steps {' and '.join(steps)} are still being written"
        return f"step {steps[0]} is still being written" if steps else ""

    def _end(self, timeout: float) -> str:
        """End the thread after its work; return what is unfinished if no save ends in time."""
        while (count := len(self._queue)) and self.has_ended(most=count - 1, timeout=timeout):
            pass
        with self._changed:
            left = self._being_written()
            del self._queue[1:]
            self._closed = True
            self._changed.notify_all()
        if not left and self._thread.is_alive():
            self._thread.join()
        return left

    # -- in the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        while self._queue or not self._closed:
            pause = self._refusals.look()
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed, pause)
                if not self._queue:
                    continue
                step, work = self._queue[0]
            error: SaveFailedError | None = None
            try:
                work()
            except SaveFailedError as raised:
                error = raised
            except BaseException as raised:
                # Also a SystemExit, e.g. from a tokenizer: uncaught, it would end only this thread.
                log.error("the save of step %d failed", step, exc_info=True)
                why = str(raised) or type(raised).__name__
                error = SaveFailedError(f"the save of step {step} failed: {why}")
                error.__cause__ = raised
            del work  # with the entry of the queue, this frees the data that it wrote
            let_go(error)
            with self._changed:
                del self._queue[0]
                if error is not None:
                    self._errors.append(error)
                self._changed.notify_all()

    def write(
        self,
        save: OwnSave,
        contents: RankContents,
        writer: RankWriter | None = None,
        at_end: ExitStack | None = None,
    ) -> None:
        """Write this rank's part of a save, in the thread.

        Raises:
            SaveFailedError: the save failed.
        """
        writer, at_end = writer or self.writer, at_end or ExitStack()
        save_id = save.id
        with at_end:
            try:
                try:
                    # Otherwise the pruner could delete a step that a resumed trainer writes again.
                    writer.again(save_id, lambda: self.explorers.begin_save(save_id, save.base))
                except BaseException as error:
                    writer.say_failed(save_id)
                    if isinstance(error, OSError):
                        raise writer.failure(save_id, error) from error
                    raise
                size = writer.save(save_id, contents, partial(self._announced, save, writer))
            except BaseException as error:
                save.has_failed = True
                if contents.is_full and isinstance(error, SaveFailedError):
                    raise failed_checkpoint(error, self.writer.job) from error
                raise
        with self._changed:
            self._written = size + (self._written or 0)

    def _write_hugging_face(self, save: OwnSave, spool: WeightsInMemory, at_end: ExitStack) -> None:
        with at_end:
            try:
                self.writer.add_hugging_face(save.id, spool)
            except BaseException:
                save.has_hugging_face = False
                raise

    def _announced(self, save: OwnSave, writer: RankWriter, is_checkpoint: bool) -> None:
        if is_checkpoint:
            save.is_checkpoint = True
            if save.promise is not None and save.promise.check(self.writer.job, save.id.step):
                self.has_promised = True
            save.promise = None  # it refers to the optimizer, which may be replaced
            try:
                retire_old(
                    self.writer.job,
                    newest=save.id.step,
                    max_to_keep=self.saving.max_to_keep,
                    keep_every=self.saving.keep_every,
                )
            except OSError as error:
                # The next call retires them, because it reads the list of checkpoints from disk.
                log.warning(
                    "older full checkpoints could not be retired, so the daemon does not delete "
                    "them. The trainer tries again after the next full checkpoint: %s",
                    error,
                )
        elif writer is (self.memory or self.writer):  # explorers look for weights there
            self._refusals.expect(save.id)
            self.explorers.set_model_state_dict(None, save.id.step)
            # Done last: otherwise explorers that wait for this save could be told that none comes.
            save.is_announced = True
            self.announced = save.id.step


class ClosingSaver:
    """The base of what has a saver, and closes it at the end of a ``with`` block."""

    _saver: Saver
    _closed: bool

    def close(self) -> None:
        """Wait for unfinished saves, and report that this trainer has stopped. Safe to call twice.

        Raises:
            SaveFailedError: a save failed, or was given up because it took too long.
        """
        if self._closed:
            return
        self._closed = True
        raise_first(self._saver.close())

    def _check_open(self) -> None:
        if self._closed:
            raise SaveFailedError(f"this {type(self).__name__} is closed: make a new one to save")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._give_up()

    def _give_up(self) -> None:
        """Training failed: the other ranks may never write their part of the saves under way."""
        self._saver.stopped.set()
        try:
            self.close()
        except SaveFailedError as error:
            log.warning("%s", error)


def raise_first(errors: Sequence[SyncdError]) -> None:
    """Raise the first error, if any, and log the others."""
    for other in errors[1:]:
        log.error("%s", other)
    if errors:
        raise errors[0]
