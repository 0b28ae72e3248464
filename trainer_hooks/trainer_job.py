"""The job as one trainer rank uses it: its folders, and on rank 0 its explorers."""

from __future__ import annotations

import logging
import secrets
from pathlib import Path
from typing import NamedTuple

from torch import nn

from syncd.coordination.member import Seams
from syncd.coordination.trainer import TrainerSynchronizer
from syncd.protocol.errors import InvalidSettingsError, JobUnavailableError
from syncd.protocol.policy import SyncMethod, SyncSettings
from syncd.protocol.records import SaveId
from syncd.storage.errnos import unwritable_storage
from syncd.storage.fsio import Storage
from syncd.storage.job import Job
from trainer_hooks.agreement import Ranks
from trainer_hooks.explorers import Explorers
from trainer_hooks.progress import Progress
from trainer_hooks.settings import SaveLayout, SaveSettings
from trainer_hooks.state.lora import base_vocabulary, check_methods
from trainer_hooks.writing.model_files import adapters_of, unwrapped
from trainer_hooks.writing.retire import retire_old
from trainer_hooks.writing.writer import RankWriter

log = logging.getLogger(__name__)


class SaveFolder(NamedTuple):
    """A folder for saves. ``writer`` is None if this rank writes nothing into it."""

    job: Job
    writer: RankWriter | None
    weights: SaveLayout


class TrainerJob:
    """The resources that a rank opens to save.

    If the constructor fails on one rank, it raises an error on all ranks, and releases the
    trainer's name. ``run_id`` is the same on all ranks. Only rank 0 has ``explorers``.
    ``progress`` has the outcomes of saves.

    Raises:
        JobUnavailableError, NoRoomError: a folder cannot be written.
        NameTakenError: another trainer works in this job.
    """

    def __init__(
        self,
        job_dir: str | Path,
        memory_dir: str | Path | None,
        name: str,
        ranks: Ranks,
        settings: SyncSettings,
        saving: SaveSettings,
        *,
        storage: Storage | None,
    ) -> None:
        self._ranks = ranks
        self._settings = settings
        self._saving = saving
        self.progress = Progress()
        self._in_memory = memory_dir is not None
        self.explorers: Explorers | None = None
        self.memory: SaveFolder | None = None
        run_id = secrets.token_hex(6)

        def register() -> Explorers:
            synchronizer = TrainerSynchronizer(
                job_dir,
                name,
                settings=settings,
                memory_dir=memory_dir,
                run_id=run_id,
                world_size=ranks.world_size,
                seams=Seams(storage=storage),
            )
            try:
                return Explorers(synchronizer)
            except BaseException:
                synchronizer.close()
                raise

        def open_here() -> None:
            try:
                self.place = self._open(Path(job_dir), storage)
                if memory_dir is not None:
                    self.memory = self._open_memory(Path(memory_dir), storage)
                if ranks.rank == 0:
                    self.explorers = register()
            except OSError as error:
                raise unwritable_storage(error, job_dir) or JobUnavailableError(
                    f"cannot use {job_dir} now: {error}"
                ) from error

        try:
            ranks.together(open_here)
            told = ranks.gathered((run_id, str(self.place.job.layout.root)))
        except BaseException:
            self.close()
            raise
        self.run_id, root = told[0]
        for rank, (_, other) in enumerate(told):
            if ranks.rank == 0 and other != root:  # perhaps another mount of the same folder
                log.warning(
                    "rank 0 saves in %s, but rank %d saves in %s. If these are not the same "
                    "folder, no save is announced: give all ranks the same job directory",
                    root,
                    rank,
                    other,
                )
                break

    def close(self) -> None:
        """Report that this trainer has stopped. Safe to call twice."""
        if self.explorers is not None:
            self.explorers.close()

    def _open(self, root: Path, storage: Storage | None) -> SaveFolder:
        job = Job.at(root.absolute(), storage)
        job.open()
        job.storage.refresh(job.layout.root)
        gathers = self._settings.method is SyncMethod.MEMORY and not self._in_memory
        writer = RankWriter(
            job,
            self._ranks.rank,
            self._ranks.world_size,
            save_timeout=self._settings.save_timeout,
            concurrency=self._saving.write_concurrency,
            weights_announced=_nothing if self._in_memory else self._weights_announced,
            checkpoint_announced=self._checkpoint_announced,
        )
        return SaveFolder(job, writer, SaveLayout.FULL if gathers else self._saving.layout)

    def _open_memory(self, root: Path, storage: Storage | None) -> SaveFolder:
        """Open the memory folder, which only rank 0 can reach."""
        job = Job.at(root.absolute(), storage)
        if self._ranks.rank > 0:
            return SaveFolder(job, None, SaveLayout.FULL)
        job.open()
        # open() changes nothing in an existing job. refresh() fails if it is mounted read-only.
        job.storage.refresh(job.layout.root)
        writer = RankWriter(
            job,
            0,
            1,
            save_timeout=self._settings.save_timeout,
            weights_announced=self._weights_announced,
        )
        return SaveFolder(job, writer, SaveLayout.FULL)

    def base_vocabulary(self, model: nn.Module) -> int | None:
        """The number of tokens of the adapters' base model, if rank 0 can find it."""
        if not adapters_of(model):
            return None
        return self._ranks.of_first(lambda: base_vocabulary(unwrapped(model)))

    def begin_save(self, step: int) -> None:
        """On rank 0, announce that a save begins."""
        if self.explorers is not None:
            self.explorers.begin_save(step)

    def _weights_announced(self, save_id: SaveId) -> None:
        if self.explorers is not None:
            self.explorers.set_model_state_dict(None, save_id.step)
        # Done last: otherwise explorers that wait for this save could be told that none comes.
        self.progress.announced = save_id

    def _checkpoint_announced(self, save_id: SaveId) -> None:
        self.progress.checkpoint = save_id
        try:
            retire_old(
                self.place.job,
                newest=save_id.step,
                max_to_keep=self._saving.max_to_keep,
                keep_every=self._saving.keep_every,
            )
        except OSError as error:
            # The next call retires them, because it reads the list of checkpoints from disk.
            log.warning(
                "older full checkpoints could not be retired, so the daemon does not delete them. "
                "The trainer tries again after the next full checkpoint: %s",
                error,
            )

    def are_weights_there(self, save_id: SaveId) -> bool:
        """On rank 0: True if an announced save still has all its weights."""
        writer = self.place.writer
        try:
            return writer is not None and writer.are_weights_there(save_id)
        except OSError as error:
            log.warning(
                "step %d: cannot check whether its weights are complete: %s", save_id.step, error
            )
            return False

    def stop_waiting(self) -> None:
        """Give up the saves that other ranks have not finished."""
        for place in (self.place, self.memory):
            if place is not None and place.writer is not None:
                place.writer.stop_waiting()


def _nothing(_: SaveId) -> None:
    pass


def effective_settings(
    settings: SyncSettings, model: nn.Module, memory_dir: str | Path | None
) -> SyncSettings:
    """Check the settings; return the settings that take effect.

    Raises:
        InvalidSettingsError: the settings, the model or ``memory_dir`` are invalid.
    """
    if not isinstance(model, nn.Module):
        raise InvalidSettingsError(
            f"model is of type {type(model).__name__}, but it must be a torch.nn.Module. The "
            "arguments of TrainerHook are first the job directory, and then the model"
        )
    adapters = adapters_of(model)
    check_methods(adapters)
    settings, why = settings.normalised(lora=bool(adapters))
    if why is not None:
        log.warning("%s", why)
    if memory_dir is not None and settings.method is not SyncMethod.MEMORY:
        raise InvalidSettingsError(
            f"memory_dir is only for method memory, but the method is {settings.method}. Set "
            "SyncSettings(method='memory'), or give no memory_dir"
        )
    return settings
