"""``CheckpointCoordinator``: saves in the background, and announces complete saves."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Self

from syncd.protocol.errors import InvalidSettingsError, SaveFailedError
from syncd.protocol.policy import SyncMethod, SyncSettings, given_or_default
from syncd.protocol.records import SaveId
from syncd.storage.fsio import Storage
from trainer_hooks.agreement import Ranks
from trainer_hooks.background import raise_first
from trainer_hooks.decisions import Decisions
from trainer_hooks.save_queue import SaveQueue, patience_of
from trainer_hooks.settings import SaveSettings
from trainer_hooks.state.hub_names import HubNames
from trainer_hooks.state.state_dict import fsdp_version, sharded_state_dict
from trainer_hooks.trainer_job import TrainerJob
from trainer_hooks.writing.contents import RankContents

if TYPE_CHECKING:
    from torch import nn

    from trainer_hooks.writing.writer import RankWriter

log = logging.getLogger(__name__)


class CheckpointCoordinator:
    """Writes one rank's saves in a thread, one by one. Replaces Trinity-RFT's class of this name.

    Promised: the pointer names a step only when every rank's shard of one save is complete and
    durable. If a save fails on a rank, the next call on that rank raises the error once. So does
    the next call on rank 0.

    Not promised: that a save is announced when a call returns. :meth:`wait_all` waits for the
    announcement. This class never moves the checkpoint pointer,
    ``latest_checkpointed_iteration.txt``.

    Construct the coordinator on every rank. Call the same methods in the same order on all ranks.

    Args:
        job_dir: an existing folder on storage that all ranks, the daemon and the explorers share.
        settings: only ``save_timeout`` and ``method`` are used. ``method`` must be ``checkpoint``.
        name: the name of the trainer; a job has one trainer.

    Raises:
        JobUnavailableError: the job directory is missing or not writable on some rank.
        NameTakenError: another trainer works in this job. The check may take one lease time.
        InvalidSettingsError: the method is not ``checkpoint``.
    """

    def __init__(
        self,
        job_dir: str | Path,
        *,
        settings: SyncSettings | None = None,
        name: str = "trainer",
        storage: Storage | None = None,
    ) -> None:
        settings, saving = given_or_default("settings", SyncSettings, settings), SaveSettings()
        if settings.method is not SyncMethod.CHECKPOINT:
            raise InvalidSettingsError(
                f"CheckpointCoordinator supports only method checkpoint, not {settings.method}"
            )
        patience = patience_of(settings, saving, Ranks().world_size)
        ranks = Decisions(timeout=patience, save_timeout=settings.save_timeout).ranks
        self._rank = ranks.rank
        self._job = TrainerJob(job_dir, None, name, ranks, settings, saving, storage=storage)
        self._queue = SaveQueue(
            patience=patience, progress=self._job.progress, begin_save=self._job.begin_save
        )
        self._counter = 0
        self._hub_names: HubNames | None = None
        self._closed = False

    def save_async(
        self,
        name: str,
        save_fn: Callable[[], object],
        global_step: int,
        is_state_dict: bool = False,
    ) -> None:
        """Call ``save_fn`` in the background, when all earlier functions have returned.

        With ``is_state_dict``, ``save_fn`` must write this rank's part of the state dict with
        ``torch.save`` to ``JOB/global_step_N/actor/model_world_size_W_rank_R.pt``. N is
        ``global_step``, W the number of ranks and R this rank. The folder exists. The pointer moves
        to the step once all ranks have written. If storage fails for a moment, ``save_fn`` is
        called again and must start over.

        Training must not change the tensors before ``save_fn`` has returned. ``name`` is for
        messages.

        Raises:
            SaveFailedError: an earlier save failed, or this save waited too long for earlier saves.
        """
        self._check_open()
        queue, has_room = self._queue, self._queue.has_room()
        if not has_room:
            queue.refuse(f"{name} of step {global_step}")
        if is_state_dict:
            save_id = self._next_id(global_step)
            if has_room:
                queue.submit(self._writer, save_id, RankContents(written_by=save_fn))
            else:
                queue.leave_out(self._writer, save_id)
        elif has_room:

            def work() -> None:
                save_fn()

            queue.thread.submit(global_step, work)
        queue.raise_failure()

    def save_model(
        self,
        model: nn.Module,
        global_step: int,
        *,
        model_files: tuple[Callable[[Path], object], ...] = (),
    ) -> None:
        """Copy this rank's part of a model to host memory, and save it as ``global_step`` later.

        The ``model`` is plain, or under DDP, FSDP1, FSDP2 or tensor parallelism. With FSDP1 this
        call is collective. ``model_files`` are functions that write the config or the tokenizer
        into a given folder; only rank 0 calls them.

        Raises:
            SaveFailedError: an earlier save failed, or this save waited too long for earlier saves.
        """
        self._check_open()
        queue, save_id = self._queue, self._next_id(global_step)
        # Needed even if there is no room, because with FSDP1 the other ranks gather.
        state = sharded_state_dict(model)
        if not queue.has_room():
            queue.refuse(f"the state dict of step {global_step}")
            queue.leave_out(self._writer, save_id)
        else:
            buffers = queue.buffers()
            try:
                if self._rank == 0:
                    if self._hub_names is None or self._hub_names.model is not model:
                        self._hub_names = HubNames(model)
                    model_files += self._hub_names.writers(state)
                contents = RankContents(
                    model=buffers.copy(state),
                    model_files=model_files if self._rank == 0 else (),
                    fsdp_version=fsdp_version(model),
                )
            except BaseException:  # e.g. no memory for the copy; others must not wait for this rank
                queue.leave_out(self._writer, save_id, buffers)
                raise
            queue.submit(self._writer, save_id, contents, buffers)
        queue.raise_failure()

    def check_path(self, local_path: str | Path, global_step: int) -> None:
        """Check that the daemon would find a save of ``global_step`` in ``local_path``.

        Raises:
            InvalidSettingsError: the daemon looks for the step in another folder.
        """
        actor = self._job.place.job.layout.actor(global_step)
        if Path(local_path).absolute() != actor:
            raise InvalidSettingsError(
                f"step {global_step} cannot be saved to {local_path}, because the daemon looks "
                f"for this step in {actor}. Save to that folder, or give the "
                "CheckpointCoordinator another job_dir"
            )

    def wait_all(self) -> None:
        """Wait until all saves are announced (on rank 0) or written (on other ranks).

        Raises:
            SaveFailedError: a save failed, or is unfinished after four times the ``save_timeout``.
        """
        self._queue.wait()
        self._queue.raise_failure()

    def close(self) -> None:
        """Wait for unfinished saves, and report that this trainer has stopped. Safe to call twice.

        Raises:
            SaveFailedError: a save failed, or was given up because it took too long.
        """
        if self._closed:
            return
        self._closed = True
        errors = self._queue.close(self._job.stop_waiting)
        self._job.close()
        raise_first(errors)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
            return
        # Training failed: the other ranks may never write their part of the saves under way.
        self._job.stop_waiting()
        try:
            self.close()
        except SaveFailedError as error:
            log.warning("%s", error)

    @property
    def _writer(self) -> RankWriter:
        writer = self._job.place.writer
        assert writer is not None  # noqa: S101 # every rank has one in a job directory
        return writer

    def _next_id(self, step: int) -> SaveId:
        self._counter += 1
        return SaveId(self._job.run_id, step, self._counter)

    def _check_open(self) -> None:
        if self._closed:
            raise SaveFailedError(
                "this coordinator is closed and cannot save. Make a new coordinator"
            )
