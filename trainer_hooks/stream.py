"""``WeightStream``: saves named tensors of any framework, from any number of writers."""

from __future__ import annotations

import logging
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

from syncd.checkpoint.safetensors_file import SafetensorsFile
from syncd.checkpoint.tensor_rules import shown
from syncd.coordination.trainer import TrainerSynchronizer
from syncd.protocol.errors import InvalidSettingsError, SaveFailedError
from syncd.protocol.names import MANIFEST, is_weights_name, part_name
from syncd.protocol.policy import SyncMethod, SyncSettings, check_step, given_or_default
from syncd.protocol.records import SaveId
from syncd.protocol.reports import TrainerReport
from syncd.storage.fsio import Storage
from trainer_hooks.saver import Saver, raise_first
from trainer_hooks.settings import SaveSettings
from trainer_hooks.state.host_part import HostPart
from trainer_hooks.state.state_dict import Pretrained
from trainer_hooks.writing.rank_files import RankContents, RankFiles
from trainer_hooks.writing.writer import RankWriter

log = logging.getLogger(__name__)

#: Seconds between two looks at rank 0's report.
_POLL: Final = 0.05
#: The most names in a message.
_NAMED: Final = 8
#: name → its dtype in safetensors, and its shape.
_Tensors = dict[str, tuple[str, tuple[int, ...]]]


class WeightStream:
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
        InvalidSettingsError: an argument is invalid.
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
        self._model_files = () if model_files is None else (_writer(model_files),)
        self._saver = Saver(
            job_dir,
            rank,
            world_size,
            settings=settings,
            saving=SaveSettings(),
            name=name,
            storage=storage,
        )
        try:
            self._saver.open()
        except BaseException:
            self._saver.close()
            raise
        self._part = HostPart()
        self._before: _Tensors = {}  # of the save that was announced last
        # The report of a trainer that was killed can name a save that is not of this trainer.
        self._old = self._saving()
        self._last: SaveId | None = None
        self._closed = False

    @property
    def synchronizer(self) -> TrainerSynchronizer | None:
        """On rank 0, the synchronizer of this stream, as :attr:`TrainerHook.synchronizer`."""
        return self._saver.explorers.synchronizer

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
        if self._closed:
            raise SaveFailedError("this stream is closed and cannot save. Make a new one")
        begun, saver = time.monotonic(), self._saver
        pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
        contents, taken = RankContents(written_by=_nothing_there), 0
        try:
            if saver.has_ended():
                taken = self._part.fill(pairs)
                contents = RankContents(
                    whole=self._part, whole_name=part_name(saver.world_size, saver.rank)
                )
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

    def close(self) -> None:
        """Wait for the last save, and report that this trainer has stopped. Safe to call twice.

        Raises:
            SaveFailedError: a save failed, or was given up because it took too long.
        """
        if not self._closed:
            self._closed = True
            raise_first(self._saver.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
            return
        # This writer failed: the others may never write their part of the saves under way.
        self._saver.stopped.set()
        try:
            self.close()
        except SaveFailedError as error:
            log.warning("%s", error)

    # -- in the thread -----------------------------------------------------------------------------

    def _write(self, step: int, contents: RankContents) -> None:
        saver = self._saver
        if saver.rank == 0:
            contents = contents._replace(
                model_files=self._model_files, confirm=partial(self._compare, step)
            )
            saver.write(saver.new(step), contents)
            return
        has_ended = False
        while not has_ended:  # twice if the first is the last save of a trainer that was killed
            save_id = self._save_of_rank_0(step)
            self._writer.save(save_id, contents)
            has_ended = self._has_ended(save_id)

    def _compare(self, step: int) -> None:
        """Refuse a save of all writers whose names, shapes or dtypes are not those expected."""
        found: _Tensors = {}
        faults = []
        job, world_size = self._writer.job, self._saver.world_size
        for rank in range(world_size):
            path = job.layout.actor(step) / part_name(world_size, rank)
            with SafetensorsFile.open(job.storage, path) as file:
                for name, dtype, shape, _, _ in file.entries:
                    if name in found:
                        faults.append(f"{shown(name)} comes from rank {rank} and from another")
                    found[name] = dtype, shape
        before = self._before or found
        faults += [f"{shown(name)} is missing" for name in before.keys() - found.keys()]
        faults += [f"{shown(name)} is new" for name in found.keys() - before.keys()]
        faults += [
            f"{shown(name)} is {_described(found[name])}, but was {_described(before[name])}"
            for name in found.keys() & before.keys()
            if found[name] != before[name]
        ]
        if not found:
            faults.append("no writer gave a tensor")
        if faults:
            more = len(faults) - _NAMED
            raise SaveFailedError(
                f"step {step} is not announced: {'; '.join(sorted(faults)[:_NAMED])}"
                f"{f'; and {more} more' if more > 0 else ''}. Give the same tensors at each step, "
                "each on one rank; for another model, begin another stream"
            )
        self._before = found

    def _save_of_rank_0(self, step: int) -> SaveId:
        """Wait until rank 0 begins the save of this step; return its id."""
        until = time.monotonic() + self._saver.settings.save_timeout
        while True:
            saving = self._saving()
            if saving is not None and saving != self._last:
                if saving.step == step:
                    self._last = saving
                    return saving
                if saving.step > step and saving != self._old:
                    self._last = saving
                    self._writer.say_failed(saving)
                    raise SaveFailedError(
                        f"rank {self._saver.rank} saves step {step}, but rank 0 saves step "
                        f"{saving.step}. All writers must save the same steps"
                    )
            self._pause(until, f"rank 0 has not begun to save step {step}")

    def _has_ended(self, save_id: SaveId) -> bool:
        """Wait for the end of a save; return False if rank 0 belongs to another run by now."""
        until = time.monotonic() + 2 * self._saver.settings.save_timeout
        files = RankFiles(self._writer.job, self._saver.rank, self._saver.world_size, save_id)
        while (report := self._report()) is not None and report.saving == str(save_id):
            if files.failed(0) == save_id != self._old:
                raise SaveFailedError(
                    f"rank 0 has not announced step {save_id.step}. See the log of rank 0"
                )
            self._pause(until, f"rank 0 has not announced step {save_id.step}")
        return report is None or report.run_id == save_id.run

    def _pause(self, until: float, what: str) -> None:
        # A poll: shared storage sends no events for another host's files.
        if self._writer.stopped.wait(_POLL):
            raise SaveFailedError(f"{what} before training ended")
        if time.monotonic() >= until:
            raise SaveFailedError(f"{what} in time (save_timeout). See the log of rank 0")

    @property
    def _writer(self) -> RankWriter:
        return self._saver.writer

    def _report(self) -> TrainerReport | None:
        job = self._writer.job
        return job.read(TrainerReport, job.layout.trainer_report)

    def _saving(self) -> SaveId | None:
        report = self._report()
        return None if report is None or report.saving is None else SaveId.parse(report.saving)


def _nothing_there() -> None:
    raise SaveFailedError("this writer has no copy of the tensors, so they are not saved")


def _described(tensor: tuple[str, tuple[int, ...]]) -> str:
    return f"{tensor[0]} {list(tensor[1])}"


def _writer(source: str | Path | Pretrained) -> Callable[[Path], object]:
    """A function that writes the model's small files into a folder.

    Raises:
        InvalidSettingsError: the folder does not exist.
    """
    if not isinstance(source, str | Path):
        return lambda folder: source.save_pretrained(str(folder))
    if not Path(source).is_dir():
        raise InvalidSettingsError(f"model_files: {source} is not a folder")

    def weights(_: str, names: list[str]) -> list[str]:
        return [n for n in names if is_weights_name(n) or n == MANIFEST or n.startswith(".")]

    return lambda folder: shutil.copytree(source, folder, ignore=weights, dirs_exist_ok=True)
