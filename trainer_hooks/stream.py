"""``WeightStream``: saves named tensors of any framework, from any number of writers."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from torch._compile import _disable_dynamo

from syncd.checkpoint.safetensors_file import SafetensorsFile
from syncd.checkpoint.tensor_rules import shown
from syncd.coordination.leased_version import read_latest
from syncd.coordination.trainer import TrainerSynchronizer
from syncd.deltas.delta_index import read_index
from syncd.protocol.errors import InvalidSettingsError, SaveFailedError, WaitTimeoutError
from syncd.protocol.names import (
    NAME_MAP,
    SAVING,
    part_name,
    receipt_name,
)
from syncd.protocol.policy import (
    SyncMethod,
    SyncSettings,
    Version,
    check_step,
    given_or_default,
)
from syncd.protocol.records import ReceiptFile, SaveId, encode
from syncd.protocol.reports import TrainerReport
from syncd.protocol.tensor_names import NameMapRecord
from syncd.storage.errnos import PASSING
from syncd.storage.fsio import Draft, Storage
from trainer_hooks.saver import ClosingSaver, Saver
from trainer_hooks.saves import OwnSave
from trainer_hooks.settings import SaveSettings
from trainer_hooks.state.model_files import Pretrained, files_of
from trainer_hooks.state.small_files import SmallFiles
from trainer_hooks.state.weights_in_memory import WeightsInMemory
from trainer_hooks.writing.rank_files import RankContents, RankFiles
from trainer_hooks.writing.writer import RankWriter

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Seconds between two looks at rank 0's report.
_POLL: Final = 0.05
#: The most names in a message.
_NAMED: Final = 8
#: name → its dtype in safetensors, and its shape.
_Tensors = dict[str, tuple[str, tuple[int, ...]]]


class WeightStream(ClosingSaver):
    """Saves whole tensors by the names that they have on the hub. It needs no process group.

    Each of ``world_size`` writers gives some of the tensors, and together they give each name once.
    The daemon publishes the writers' files themselves, by hard links. :meth:`save` returns when the
    tensors are copied; a thread writes the copy. For example::

        with WeightStream("/shared/jobs/j", rank=r, world_size=w, model_files="/models/qwen") as s:
            for step, tensors in run():
                s.save(step, tensors)

    Promised: the pointer names a step only when the files of all writers are complete and durable,
    and hold the names, shapes and dtypes of the save before. If a save fails, the next call raises
    the error once, on each writer that knows of it.

    Not promised: that a save is announced when :meth:`save` returns. :meth:`wait` waits for it.

    Args:
        job_dir: an existing folder on storage that all writers, the daemon and the explorers share.
        rank, world_size: all writers call :meth:`save` with the same steps; rank 0 announces.
        model_files: a folder whose files, except weights, become part of each version (config,
            tokenizer), or an object with ``save_pretrained``. Only rank 0 uses it.
        settings: ``save_timeout`` and the terms for explorers. ``method`` must be ``checkpoint``.
        name: the name of the trainer; a job has one trainer.

    Raises:
        JobUnavailableError: the job directory is missing or not writable.
        NoRoomError: the disk of the job directory is full.
        NameTakenError: another trainer works in this job. The check may take one lease time.
        InvalidSettingsError: an argument is invalid, or ``model_files`` cannot be written.
    """

    def __init__(
        self,
        job_dir: str | Path,
        *,
        rank: int = 0,
        world_size: int = 1,
        model_files: str | Path | Pretrained | None = None,
        settings: SyncSettings | None = None,
        name: str = "trainer",
        storage: Storage | None = None,
    ) -> None:
        settings = given_or_default("settings", SyncSettings, settings)
        if settings.method is not SyncMethod.CHECKPOINT:
            raise InvalidSettingsError(
                f"WeightStream supports only method checkpoint, not {settings.method}"
            )
        if not 0 <= rank < world_size:
            raise InvalidSettingsError(f"rank {rank} is not one of {world_size} writers")
        self._small_files = SmallFiles()
        self._model_files = files_of(model_files if rank == 0 else None)
        self._small_files.files(self._model_files)
        self._saver = Saver(
            job_dir,
            rank,
            world_size,
            settings=settings,
            saving=SaveSettings(name=name),
            storage=storage,
        )
        # With deltas, the first one is the copy of the save before, while the last one is written.
        self._parts = deque(WeightsInMemory() for _ in range(1 + settings.deltas))
        self._synced = OwnSave(SaveId("", -1, 0))  # on rank 0, the last save
        self._found: _Tensors = {}
        self._before: _Tensors = {}  # of the save that was announced last
        self._run: str | None = None  # of a rank 0 that lives
        self._last: SaveId | None = None
        self._closed = False
        try:
            self._saver.open()
            # The report may be of a trainer that was killed, until it or its heartbeat changes.
            self._first_look = self._heartbeat(self._report())
        except BaseException:
            self._saver.close()
            raise

    @property
    def synchronizer(self) -> TrainerSynchronizer | None:
        """On rank 0, the synchronizer of this stream, as :attr:`TrainerHook.synchronizer`."""
        return self._saver.explorers.synchronizer

    @_disable_dynamo
    def save(
        self, step: int, tensors: Iterable[tuple[str, Any]] | Mapping[str, Any]
    ) -> dict[str, float]:
        """Copy this writer's tensors, and queue their file; first wait for the save before.

        The tensors are dense torch tensors on any device, NumPy arrays, or objects with
        ``__dlpack__``. Each is copied before the next is asked for. Returns ``time/stall`` in
        seconds, and ``sync/bytes`` of this writer's tensors.

        Raises:
            InvalidSettingsError: the step is no whole number, or a value is no whole tensor with a
                name of its own. Explorers do not get this save.
            SaveFailedError: an earlier save failed, or this stream is closed.
        """
        check_step(step)
        self._check_open()
        begun, saver = time.monotonic(), self._saver
        pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
        contents, taken = RankContents(whole=_NoCopy()), 0
        try:
            if saver.has_ended():
                taken = self._parts[0].fill(pairs)
                contents = RankContents(
                    whole=self._parts[0], whole_name=part_name(saver.world_size, saver.rank)
                )
                self._parts.rotate()
            else:
                saver.refuse(f"step {step}")
                deque(pairs, maxlen=0)  # the other writers may take part in each iteration
        finally:  # also if there is nothing to write, so that no other writer waits
            saver.submit(step, partial(self._write, step, contents))
        saver.raise_failure()
        return {"time/stall": time.monotonic() - begun, "sync/bytes": float(taken)}

    def wait(self) -> None:
        """Wait until the last save is announced.

        Raises:
            SaveFailedError: a save failed, or has not ended after four times the ``save_timeout``.
        """
        self._saver.wait()
        self._saver.raise_failure()

    def wait_published(self, timeout: float | None = None) -> Version:
        """Wait until the daemon has published the last save; return its version.

        ``timeout`` is in seconds from the announcement; None means the ``sync_timeout``.

        Raises:
            SaveFailedError: a save failed, or the daemon refuses this one.
            WaitTimeoutError: the save was not published in time.
        """
        self.wait()
        save, job = self._last, self._writer.job
        if save is None:
            raise SaveFailedError("nothing was saved yet")
        timeout = self._saver.settings.sync_timeout if timeout is None else timeout
        until = time.monotonic() + timeout
        while True:
            outcome = _unless_passing(lambda: job.outcome(save.step))
            if outcome is not None and outcome.identity == str(save):
                if outcome.sequence is None:
                    why = (
                        f": {job.refusal(save.step, save)}"
                        if outcome.outcome == "quarantined"
                        else ""
                    )
                    raise SaveFailedError(f"step {save.step} was {outcome.outcome}{why}")
                latest = _unless_passing(lambda: read_latest(job))
                # The save of a delta has the number of the version to come.
                if latest is not None and latest.sequence >= outcome.sequence:
                    return Version(outcome.sequence, save.step)
            if time.monotonic() >= until:
                raise WaitTimeoutError(
                    f"step {save.step} was not published within {timeout:g} s; {job.daemon_hint()}"
                )
            if self._writer.stopped.wait(_POLL):
                raise SaveFailedError(f"step {save.step} was not published before training ended")

    # -- in the thread -----------------------------------------------------------------------------

    def _write(self, step: int, contents: RankContents) -> None:
        saver = self._saver
        if saver.rank == 0:
            save, last = saver.new(step), self._synced
            if saver.settings.deltas and last.takes_delta(step, saver.explorers):
                save.delta_of(last)
            self._synced, self._last = save, save.id
            contents = self._as_delta(save, contents)._replace(
                # The tensors have the hub's names already; and they are not others than before.
                model_files=partial(
                    self._small_files.files,
                    self._model_files,
                    None,
                    {NAME_MAP: encode(NameMapRecord())},
                ),
                confirm=partial(self._compare, save),
            )
            saver.write(save, contents)
            if save.is_announced:
                self._before = self._found
            return
        save = self._save_of_rank_0(step)
        self._writer.save(save.id, self._as_delta(save, contents))
        self._wait_for_end(save.id)

    def _as_delta(self, save: OwnSave, contents: RankContents) -> RankContents:
        part, old = contents.whole, self._parts[0]
        if not isinstance(part, WeightsInMemory) or isinstance(part, _NoCopy):
            return contents
        base = old if old.save_id == save.base else None
        part.save_id = save.id
        if save.base is None:
            return contents
        return contents._replace(base=str(save.base), pieces=partial(part.pieces, base))

    def _compare(self, save: OwnSave) -> None:
        """Refuse a save of all writers whose names, shapes or dtypes are not those expected."""
        tensors: _Tensors = {}
        faults = []
        step = save.id.step
        for rank in range(self._saver.world_size):
            for name, dtype, shape in self._written_by(rank, save):
                if name in tensors:
                    faults.append(f"{shown(name)} comes from rank {rank} and from another")
                tensors[name] = dtype, shape
        before = self._before or tensors
        faults += [f"{shown(name)} is missing" for name in before.keys() - tensors.keys()]
        faults += [f"{shown(name)} is new" for name in tensors.keys() - before.keys()]
        faults += [
            f"{shown(name)} is {_described(tensors[name])}, but was {_described(before[name])}"
            for name in tensors.keys() & before.keys()
            if tensors[name] != before[name]
        ]
        if not tensors:
            faults.append("no writer gave a tensor")
        if faults:
            more = len(faults) - _NAMED
            raise SaveFailedError(
                f"step {step} is not announced: {'; '.join(sorted(faults)[:_NAMED])}"
                f"{f'; and {more} more' if more > 0 else ''}. Give the same tensors at each step, "
                "each on one rank; for another model, begin another stream"
            )
        self._found = tensors

    def _written_by(self, rank: int, save: OwnSave) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """Name, dtype and shape of each tensor in the file of a rank."""
        job, world_size = self._writer.job, self._saver.world_size
        actor = job.layout.actor(save.id.step)
        if save.base is None:
            with SafetensorsFile.open(job.storage, actor / part_name(world_size, rank)) as file:
                yield from (entry[:3] for entry in file.entries)
            return
        receipt = RankFiles(job, rank, world_size, save.id).receipt(receipt_name(rank))
        for delta in receipt.files if receipt is not None else ():
            if delta.over == "index":
                pieces = read_index(job.storage, actor / delta.name, delta.size, delta.digest)
                yield from ((piece.name, piece.dtype, piece.box.shape) for piece in pieces)

    def _save_of_rank_0(self, step: int) -> OwnSave:
        """Wait until rank 0 begins the save of this step; return the save."""
        until = time.monotonic() + self._saver.settings.save_timeout
        while True:
            save = self._saving()
            if save is not None and save.id != self._last and save.id.step >= step:
                saving = save.id
                self._run = saving.run
                if saving.step == step:
                    self._last = saving
                    return save
                # It can be there because it gave this step up, before this writer came.
                failed = self._failed_by_rank_0(SaveId(saving.run, step, saving.counter))
                if failed is not None and failed.run == saving.run:
                    raise _not_announced(step)
                self._last = saving
                self._writer.say_failed(saving)
                raise SaveFailedError(
                    f"rank {self._saver.rank} saves step {step}, but rank 0 saves step "
                    f"{saving.step}. All writers must save the same steps"
                )
            self._pause(until, f"rank 0 has not begun to save step {step}")

    def _wait_for_end(self, save_id: SaveId) -> None:
        until = time.monotonic() + 2 * self._saver.settings.save_timeout
        files = self._files_of_rank_0(save_id)

        def is_complete() -> bool:
            is_written = files.written(receipt_name(0)) == save_id
            return is_written and not files.storage.exists(files.folder / SAVING)

        while True:
            if self._failed_by_rank_0(save_id) == save_id:
                raise _not_announced(save_id.step)
            report = self._report()
            if report is not None and report.saving != str(save_id):
                self._check_run(report)
                return
            if _unless_passing(is_complete):  # rank 0 may be unable to write its report
                return
            self._pause(until, f"rank 0 has not announced step {save_id.step}")

    def _pause(self, until: float, what: str) -> None:
        # A poll: shared storage sends no events for another host's files.
        if self._writer.stopped.wait(_POLL):
            raise SaveFailedError(f"{what} before training ended")
        if time.monotonic() >= until:
            raise SaveFailedError(f"{what} in time (save_timeout). See the log of rank 0")

    @property
    def _writer(self) -> RankWriter:
        return self._saver.writer

    def _saving(self) -> OwnSave | None:
        """The save that a live rank 0 has begun."""
        report = self._report()
        if report is None or report.saving is None:
            return None
        if self._run is None and self._heartbeat(report) in {None, self._first_look}:
            return None
        self._check_run(report)
        saving = SaveId.parse(report.saving)
        if saving is None:
            return None
        return OwnSave(saving, base=SaveId.parse(report.base or ""))

    def _check_run(self, report: TrainerReport) -> None:
        if self._run not in {None, report.run_id}:
            raise SaveFailedError("rank 0 was started again. Start this writer again, too")

    def _report(self) -> TrainerReport | None:
        job = self._writer.job
        return _unless_passing(lambda: job.read(TrainerReport, job.layout.trainer_report))

    def _heartbeat(self, report: TrainerReport | None) -> tuple[str, int] | None:
        """The session of a report, and the time of its last heartbeat; None if there is none."""
        if report is None or report.session is None:
            return None
        job, session = self._writer.job, report.session
        status = _unless_passing(lambda: job.storage.status(job.layout.session(session)))
        return None if status is None else (session, status.st_mtime_ns)

    def _files_of_rank_0(self, save_id: SaveId) -> RankFiles:
        return RankFiles(self._writer.job, 0, self._saver.world_size, save_id)

    def _failed_by_rank_0(self, save_id: SaveId) -> SaveId | None:
        """The save that rank 0 gave up in the folder of this save's step."""
        return _unless_passing(lambda: self._files_of_rank_0(save_id).failed(0))


class _NoCopy(WeightsInMemory):
    """Stands for tensors that could not be copied: its save fails on all ranks."""

    def write(self, draft: Draft) -> ReceiptFile:  # noqa: ARG002 - there is nothing to write
        """Raise the error."""
        raise SaveFailedError("this writer has no copy of the tensors, so they are not saved")


def _unless_passing(read: Callable[[], T]) -> T | None:
    """What storage says; None if it fails for a moment."""
    try:
        return read()
    except OSError as error:
        if error.errno not in PASSING:
            raise
        return None


def _not_announced(step: int) -> SaveFailedError:
    return SaveFailedError(f"rank 0 has not announced step {step}. See the log of rank 0")


def _described(tensor: tuple[str, tuple[int, ...]]) -> str:
    return f"{tensor[0]} {list(tensor[1])}"
