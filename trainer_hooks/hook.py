"""``TrainerHook``: what a training loop calls after each step."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from torch import nn

from syncd.protocol.errors import InvalidSettingsError, SaveFailedError, SyncdError
from syncd.protocol.layout import JobLayout
from syncd.protocol.policy import (
    RunningStatus,
    SyncMethod,
    SyncSettings,
    SyncStyle,
    trainer_decision,
)
from syncd.protocol.records import SaveId, TrainerReport, encode
from syncd.storage.fsio import Storage
from syncd.storage.job import open_job
from trainer_hooks.state_dict import fsdp_version, host_copy, local_snapshot
from trainer_hooks.writer import Contents, RankWriter

log = logging.getLogger(__name__)


class Stateful(Protocol):
    """An optimizer or a scheduler, for our purposes."""

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to resume."""


class Pretrained(Protocol):
    """A tokenizer, a processor or a config of transformers, for our purposes."""

    def save_pretrained(self, save_directory: str) -> object:
        """Write its files into a folder."""


class TrainerHook:
    """Saves a model after the steps that are due, on every rank, beside the training.

    ``after_step`` copies this rank's tensors to host memory; a thread writes them. Promised: what
    explorers get is the model as it was when ``after_step(step)`` was called, on all ranks; and an
    error in the thread is raised by the next call, with its step. Not promised: that a save is
    announced when ``after_step`` returns; ``close`` waits for that. As a context manager it does
    not wait for other ranks when training raised.

    Construct it and call ``after_step`` on every rank alike: the run id is agreed by a collective.

    Args:
        job_dir: an existing folder on storage that all ranks, the daemon and the explorers share.
        model: a plain module, or one wrapped with ``fully_shard``.
        optimizer, scheduler: saved in full checkpoints.
        tokenizer: its files become part of each version, as do those of ``model.config``.
        settings: when to sync and when to save.
        storage: the seam for tests.

    Raises:
        JobUnavailableError: the job directory is missing or cannot be written.
        InvalidSettingsError: a method or style that this hook does not serve.
    """

    def __init__(
        self,
        job_dir: str | Path,
        model: nn.Module,
        *,
        optimizer: Stateful | None = None,
        scheduler: Stateful | None = None,
        tokenizer: Pretrained | None = None,
        settings: SyncSettings | None = None,
        storage: Storage | None = None,
    ) -> None:
        self._layout = JobLayout(Path(job_dir).absolute())
        self._model = model
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._settings = settings or SyncSettings()
        _check_served(self._settings)
        self._storage = storage or Storage(self._layout.root)
        open_job(self._storage, self._layout)
        grouped = dist.is_available() and dist.is_initialized()
        self._rank = dist.get_rank() if grouped else 0
        self._world_size = dist.get_world_size() if grouped else 1
        self._run_id = _agree_on_run_id(grouped=grouped)
        self._model_files = _model_files(model, tokenizer) if self._rank == 0 else ()
        self._writer = RankWriter(
            self._storage,
            self._layout,
            self._rank,
            self._world_size,
            save_timeout=self._settings.save_timeout,
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="syncd-writer")
        self._pending: tuple[int, Future[int]] | None = None
        self._counter = 0
        self._last_sync_step: int | None = None
        self._last_sync_time: float | None = None
        self._closed = False
        self._report(RunningStatus.RUNNING, None)

    def after_step(self, step: int) -> dict[str, float]:
        """Save if this step is due.

        Args:
            step: the step that the model has just finished; the same on all ranks.

        Returns:
            Metrics in seconds and bytes, empty when nothing was due: ``time/sync_weight`` or
            ``time/save_checkpoint`` (how long training stood still here),
            ``time/trainer_sync_interval``, and ``sync/bytes`` of the save before this one.

        Raises:
            SaveFailedError: an earlier save did not become whole.
        """
        due = trainer_decision(self._settings, step=step, last_sync_step=self._last_sync_step)
        if not (due.sync or due.full_save):
            self._raise_if_failed()
            return {}
        begun = time.monotonic()
        metrics: dict[str, float] = {}
        written = self._wait()
        if written is not None:
            metrics["sync/bytes"] = float(written)
        self._begin_save(step, is_full=due.full_save)
        name = "time/save_checkpoint" if due.full_save else "time/sync_weight"
        metrics[name] = time.monotonic() - begun
        if self._last_sync_time is not None:
            metrics["time/trainer_sync_interval"] = begun - self._last_sync_time
        self._last_sync_step, self._last_sync_time = step, begun
        return metrics

    def close(self) -> None:
        """Wait for the last save, and say that this trainer has stopped. Safe to call twice.

        Raises:
            SaveFailedError: the last save did not become whole.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._wait()
        finally:
            self._thread.shutdown()
            try:
                self._report(RunningStatus.STOPPED, self._last_sync_step)
            except OSError as error:
                # Why a save failed, or training did, says more.
                log.warning("storage does not take that this trainer has stopped: %s", error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
            return
        # Training failed: the other ranks may never write their part of what is under way.
        self._writer.stop_waiting()
        try:
            self.close()
        except SaveFailedError as error:
            log.warning("%s", error)

    def _begin_save(self, step: int, *, is_full: bool) -> None:
        save_id = SaveId(self._run_id, step, self._counter)
        self._counter += 1
        extra: dict[str, Any] = {"rng": torch.get_rng_state()}
        if self._scheduler is not None:
            extra["lr_scheduler"] = host_copy(self._scheduler.state_dict())
        contents = Contents(
            model=local_snapshot(self._model),
            optimizer=host_copy(self._optimizer.state_dict())
            if is_full and self._optimizer is not None
            else None,
            extra=extra if is_full else None,
            model_files=self._model_files,
            fsdp_version=fsdp_version(self._model),
            is_full=is_full,
        )
        self._pending = (step, self._thread.submit(self._save, save_id, contents))

    def _save(self, save_id: SaveId, contents: Contents) -> int:
        """In the thread: what storage does must not stop the training for longer than a copy."""
        # Announced first: what lies below a step that a resumed trainer is about to write again
        # is not for the pruner.
        self._writer.again(save_id, lambda: self._report(RunningStatus.RUNNING, save_id.step))
        return self._writer.save(save_id, contents)

    def _wait(self) -> int | None:
        """Wait for the save that is being written; how many bytes this rank wrote, if there was."""
        if self._pending is None:
            return None
        (step, future), self._pending = self._pending, None
        try:
            return future.result()
        except SyncdError:
            raise
        except Exception as error:
            raise SaveFailedError(f"the save of step {step} failed: {error}") from error

    def _raise_if_failed(self) -> None:
        if self._pending is None:
            return
        future = self._pending[1]
        if future.done() and future.exception() is not None:
            self._wait()

    def _report(self, status: RunningStatus, step: int | None) -> None:
        if self._rank != 0:
            return
        report = TrainerReport.model_validate(
            {
                "run_id": self._run_id,
                "world_size": self._world_size,
                "status": status.value,
                "step": step,
                "time": time.time(),
            }
        )
        self._storage.replace(self._layout.trainer_report, encode(report), room=self._layout.drafts)


def _check_served(settings: SyncSettings) -> None:
    """Refuse what is not served yet, rather than take it and do something else."""
    if settings.method is not SyncMethod.CHECKPOINT:
        raise InvalidSettingsError(f"TrainerHook does not serve method {settings.method} yet")
    if settings.style is SyncStyle.EXPLORER_DRIVEN:
        raise InvalidSettingsError(f"TrainerHook does not serve style {settings.style} yet")


def _agree_on_run_id(*, grouped: bool) -> str:
    """Rank 0's choice, on all ranks."""
    chosen: list[str] = [secrets.token_hex(6)]
    if grouped:
        dist.broadcast_object_list(chosen, src=0)
    return chosen[0]


def _model_files(
    model: nn.Module, tokenizer: Pretrained | None
) -> tuple[Callable[[Path], object], ...]:
    """Who writes the configs and the tokenizer, where the model has them.

    A PEFT model has a config of its own: without it no adapter can be made of its shards.
    """
    parts = [getattr(model, name, None) for name in ("config", "generation_config")]
    adapters = getattr(model, "peft_config", None)
    if isinstance(adapters, dict) and adapters:
        parts.append(adapters.get("default", next(iter(adapters.values()))))
    return tuple(
        (lambda folder, part=part: part.save_pretrained(str(folder)))
        for part in (*parts, tokenizer)
        if hasattr(part, "save_pretrained")
    )
