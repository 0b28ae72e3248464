"""``TrainerHook``: a training loop calls it after each step."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from torch import nn
from torch._compile import _disable_dynamo

from syncd.coordination.served_waits import ServedStep
from syncd.coordination.trainer import TrainerSynchronizer
from syncd.protocol.errors import InvalidSettingsError, OutOfStepError, SaveFailedError
from syncd.protocol.policy import SyncMethod, SyncSettings, check_step, given_or_default
from syncd.storage.fsio import Storage
from trainer_hooks.fast_path import TrainerBroadcasts
from trainer_hooks.planning import Planner
from trainer_hooks.ranks import Due, LedRanks, Ranks
from trainer_hooks.resuming.loaded import forget, held_by, remember
from trainer_hooks.saver import ClosingSaver, Saver, raise_first
from trainer_hooks.saves import OwnSave
from trainer_hooks.settings import SaveSettings
from trainer_hooks.state.full_checkpoint import Critic, Replaceable, Some, Stateful
from trainer_hooks.state.lora import base_vocabulary, check_methods
from trainer_hooks.state.model_files import Pretrained, model_files
from trainer_hooks.state.pieces import plain_names
from trainer_hooks.state.state_dict import sharded_state_dict
from trainer_hooks.state.wrappers import adapters_of, own_buffers, trained_model, unwrapped
from trainer_hooks.trained import Trained
from trainer_hooks.writing.writer import RankWriter

log = logging.getLogger(__name__)

#: The most broadcast_timeouts in a broadcast: one to get ready, one to meet, one to transfer.
_BROADCAST_WAITS: Final = 3
#: Torch's default timeout of a collective, in seconds; rank 0's decision may be that late, too.
_TORCH_TIMEOUT: Final = 1800.0


class TrainerHook(ClosingSaver, Replaceable):
    """Saves a model after the steps that are due, on every rank, while training continues.

    ``after_step`` copies this rank's tensors to host memory; a thread writes the copies. Promised:

    - Explorers get the model as it was on all ranks when ``after_step(step)`` was called.
    - A pointer always names a complete save.
    - If a save fails, the next call does its own work, and then raises the error of the failed save
      once. The error names the step. If you catch the error, training can continue.

    Not promised: that a save is announced when ``after_step`` returns, or at all if a rank has
    died. :meth:`close` and ``block_until_saved`` wait for the announcement.

    Construct the hook on every rank. Call its methods on every rank in the same order with the same
    steps, because rank 0 decides for all ranks, and all ranks gather. The methods return metrics in
    seconds, bytes and counts; ``docs/trainer.md`` lists them.

    Args:
        job_dir: an existing folder on storage that all ranks, the daemon and the explorers share.
        model: a plain module, or one under DDP, FSDP1, FSDP2 or tensor parallelism. PEFT adapters
            are saved without the base model, or merged into the weights (``SaveSettings.lora``).
            If ``load_checkpoint`` has filled it, the hook waits at most a lease time until a live
            daemon has published that checkpoint again.
        optimizer, scheduler: saved in full checkpoints. Each is one object, or a sequence of
            several, such as Muon and AdamW. Several optimizers must be ``torch.optim.Optimizer``.
        tokenizer: its files become part of each version, and so does ``model.config``.
        settings, saving: when to sync and save, and how; the same on all ranks.
        critic: another model of this trainer and its optimizer, saved in full checkpoints.
        user_state: called on each rank at each full checkpoint. It returns any other state that
            resuming needs: tensors, numbers, text, or lists and dicts of these.

    Attributes:
        optimizer, scheduler, critic, user_state: the arguments. If training goes on with another
            object, set it between steps, on all ranks: full checkpoints have the new one.

    Raises:
        JobUnavailableError: the job directory is missing or not writable on some rank.
        NoRoomError: the disk of the job directory is full.
        SaveFailedError: a rank did not make its hook within the ``save_timeout``.
        NameTakenError: another trainer works in this job. The check may take one lease time.
        InvalidSettingsError: the method is not supported, settings contradict each other, an
            argument is not of its type, or the config or the tokenizer cannot be written.
    """

    def __init__(
        self,
        job_dir: str | Path,
        model: nn.Module,
        *,
        optimizer: Some[Stateful] = None,
        scheduler: Some[Stateful] = None,
        tokenizer: Pretrained | None = None,
        settings: SyncSettings | None = None,
        saving: SaveSettings | None = None,
        critic: Critic | None = None,
        user_state: Callable[[], Mapping[str, Any]] | None = None,
        storage: Storage | None = None,
    ) -> None:
        saving = given_or_default("saving", SaveSettings, saving)
        settings = _effective(given_or_default("settings", SyncSettings, settings), model, saving)
        self.optimizer, self.scheduler, self.user_state = optimizer, scheduler, user_state
        self.critic = Critic() if critic is None else critic
        alone = Ranks()
        averages, model = own_buffers(model), trained_model(model)
        self._saver = saver = Saver(
            job_dir,
            alone.rank,
            alone.world_size,
            settings=settings,
            saving=saving,
            held=held_by(model),
            storage=storage,
        )
        broadcast = _BROADCAST_WAITS * settings.broadcast_timeout
        ranks = LedRanks(  # the timeout is the longest wait for rank 0's decision
            timeout=settings.sync_timeout + saver.patience + broadcast + _TORCH_TIMEOUT,
            save_timeout=settings.save_timeout,
        )
        vocabulary = None
        if adapters_of(model):
            vocabulary = ranks.of_first(lambda: base_vocabulary(unwrapped(model)))
        self._trained = Trained(
            model=model,
            rank=ranks.rank,
            objects=self,
            averages=averages,
            model_files=model_files(model, tokenizer),
            lora=saving.lora,
            sync_dtype=saving.sync_dtype,
            base_vocabulary=vocabulary,
        )
        self._trained.prove(ranks)
        saver.open_together(ranks)
        forget(model)
        # Of all ranks, also without deltas, because the settings of a rank may differ.
        reasons = ranks.gathered(self._trained.why_no_deltas(settings, saving.layout))
        why = next(filter(None, reasons), None)
        saver.copies.keeps = why is None
        if why is None:
            names = ranks.gathered(plain_names(sharded_state_dict(model)))
            for rank, own in reversed(tuple(enumerate(names))):
                saver.copies.first_ranks |= dict.fromkeys(own, rank)
        elif settings.deltas and saver.rank == 0:
            log.warning("deltas=True has no effect, so every save is full: %s", why)
            saver.explorers.say_no_deltas(why)
        self._fast_path = TrainerBroadcasts(model, settings, saver.explorers, self._trained.cast)
        self._planner = Planner(ranks, saver, self._fast_path)
        self._step: int | None = None
        self._last_sync_time: float | None = None
        self._pid = os.getpid()
        self._closed = False

    @property
    def synchronizer(self) -> TrainerSynchronizer | None:
        """On rank 0, the synchronizer of this hook; None on the other ranks.

        Use it to store and load states (``save_state``, ``load_state``), to list the participants
        (``modules``, ``get_explorer_status_counts``), and to see if an explorer requests a sync
        (``explorer_requires_sync``). The hook itself announces saves, answers requests, and sets
        the trainer's status. The synchronizer's methods raise errors of storage.
        """
        return self._saver.explorers.synchronizer

    @_disable_dynamo
    def after_step(self, step: int) -> dict[str, float]:
        """Save the finished step if it is due: as a sync, as a full checkpoint, or as both.

        Raises:
            InvalidSettingsError: the step is not a whole number, or the model is on the meta
                device.
            SaveFailedError: an earlier save failed, or the hook is closed.
            CheckpointError: the model is quantized, but ``sync_dtype`` is set.
            OutOfStepError: rank 0 was called with another step, or a collective failed in a
                broadcast; end this training.
        """
        begun = self._finished(step)
        metrics = self._carry_out(self._planner.by_policy(step, waiting=False))
        if self._saver.settings.max_explorer_lag is not None:
            waited = time.monotonic()
            self._planner.wait_for_explorers()
            metrics["time/wait_for_explorers"] = time.monotonic() - waited
        return self._with_counters(metrics, begun)

    @_disable_dynamo
    def sync_while_waiting(self) -> dict[str, float]:
        """Sync if a sync is due now. Call this method while the trainer waits for data.

        Call it equally often on all ranks, between the same steps. It never makes a full
        checkpoint.

        Raises:
            SaveFailedError: an earlier save failed, or the hook is closed.
            OutOfStepError: rank 0 was called with another step, or a collective failed in a
                broadcast; end this training.
        """
        begun = self._begun()
        plan = self._planner.by_policy(self._step, waiting=True)
        return self._with_counters(self._carry_out(plan), begun)

    @_disable_dynamo
    def wait_served(
        self, step: int, explorers: Collection[str], timeout: float | None = None
    ) -> ServedStep:
        """Wait until explorers serve a step, or a later one of this trainer: before rollouts.

        Collective: rank 0 reads the explorers' reports, and all ranks get the same answer. An
        explorer serves a step once its engine has the weights, from a version, from deltas or from
        a broadcast. For example::

            hook.save_state_dict(step)  # does nothing if the step is already synced
            served = hook.wait_served(step, ["server-0", "server-1"], timeout=600)
            roll_out(served.serving)  # without those in served.missing

        The wait does not last for an explorer that has refused the step, reports a fault, or has
        ended since a wait of this hook saw it; nor if nobody will serve the step: it was not saved,
        the daemon refuses it, or a rollback has replaced it. It lasts for an explorer that no wait
        has seen yet, and while no daemon works, until the ``timeout``, which is no error.
        ``missing`` has the reasons.

        Args:
            step: a step that is saved already, or the one that training resumed from.
            explorers: the names of the explorers.
            timeout: in seconds; by default, and at most, the ``sync_timeout``.

        Raises:
            InvalidSettingsError: an argument is not of its type.
            SaveFailedError: the hook is closed.
            OutOfStepError: rank 0 was called with another step; end this training.
        """
        check_step(step)
        if isinstance(explorers, str) or not explorers:
            raise InvalidSettingsError(f"explorers is {explorers!r}: it must be a list of names")
        self._check_open()
        limit = self._saver.settings.sync_timeout  # the other ranks wait in a collective
        seconds = limit if timeout is None else min(timeout, limit)
        save, trainer = self._planner.last_sync, self.synchronizer

        def is_announced() -> bool | None:
            is_lost = save.id.step < step or (save.id.step == step and save.has_failed)
            return False if is_lost else save.is_announced or None

        def wait() -> ServedStep:
            assert trainer is not None  # noqa: S101 - rank 0 has one
            own = save.id if save.id.step == step else None
            return trainer.wait_served(
                step, explorers, seconds, save_id=own, is_announced=is_announced
            )

        served = self._planner.ranks.of_first(wait)
        if served.step != step:
            raise OutOfStepError(
                f"rank 0 waited until step {served.step} is served, and this rank for step {step}. "
                "End this training, and call wait_served with the same step on all ranks"
            )
        return served

    @_disable_dynamo
    def save_state_dict(self, step: int) -> dict[str, float]:
        """Sync now, even if no sync is due; do nothing if the step is already synced.

        Raises:
            InvalidSettingsError: the step is not a whole number, or the model is on the meta
                device.
            SaveFailedError: an earlier save failed, or the hook is closed.
            OutOfStepError: rank 0 was called with another step, or a collective failed in a
                broadcast; end this training.
        """
        begun = self._finished(step)
        return self._with_counters(self._carry_out(self._planner.sync(step)), begun)

    @_disable_dynamo
    def save_checkpoint(
        self, step: int, *, block_until_saved: bool = False, save_as_hf: bool | None = None
    ) -> dict[str, float]:
        """Make the finished step a full checkpoint now; do nothing if it already is one.

        If this step was already synced, its weights are not written again. ``block_until_saved``
        waits until the checkpoint is announced (on rank 0) or written (on other ranks).
        ``save_as_hf`` adds the full weights as a Hugging Face model. If it is None,
        ``SaveSettings.save_as_hf`` decides.

        Raises:
            InvalidSettingsError: an argument is not of its type, or the model is on the meta
                device.
            SaveFailedError: an earlier save failed, or the hook is closed. With
                ``block_until_saved``, a failure of this save also raises this error.
            OutOfStepError: rank 0 was called with another step; end this training.
        """
        if not (save_as_hf is None or isinstance(save_as_hf, bool)):
            raise InvalidSettingsError(
                f"save_as_hf is {save_as_hf!r}: it must be a bool, or None for the settings' choice"
            )
        begun = self._finished(step)
        metrics = self._carry_out(self._planner.checkpoint(step, with_hf=save_as_hf))
        if block_until_saved:
            self._saver.wait()
            metrics["time/save_checkpoint"] = time.monotonic() - begun
        return self._with_counters(metrics, begun)

    @_disable_dynamo
    def close(self) -> None:
        """Save the last step, wait for unfinished saves, and report that this trainer has stopped.

        Collective: call it on all ranks, before the process group is destroyed. If the last step's
        weights are not in files yet, they are saved now (unless ``SaveSettings.final`` is False).
        With ``save_interval``, or ``save_as_hf = last``, the last step also becomes a full
        checkpoint. The model is saved as it is now, under the number of the last step.

        If a rank does not close within the ``save_timeout``, the other ranks log a warning and make
        no last save. Then each rank waits at most twice the ``save_timeout`` for each unfinished
        save. If ranks write one at a time, this limit is multiplied by the number of ranks.

        A second call, or a call in a forked process, does nothing. Do not call this method in a
        signal handler, because the signal may interrupt an optimizer step: raise ``SystemExit``
        there instead.

        Raises:
            SaveFailedError: the last save failed, or was given up because it took too long.
            OutOfStepError: the last step of rank 0 is another step.
        """
        if not self._begins_to_close():
            return
        errors: list[SaveFailedError] = []
        try:
            self._carry_out(self._planner.at_close(self._step))
        except SaveFailedError as error:
            errors.append(error)
        except BaseException:
            for other in self._end():
                log.error("%s", other)
            raise
        errors += self._end()
        remember(self._trained.model, self._saver.writer.job.layout.root)
        self._planner.ranks.wait_until_sent()
        raise_first(errors)

    def _give_up(self) -> None:
        """Training failed, so this rank must not begin a collective either."""
        if not self._begins_to_close():
            return
        self._saver.stopped.set()
        self._planner.ranks.call_off(self._saver.run_id, "has ended with an error")
        for error in self._end():
            log.warning("%s", error)

    def _begins_to_close(self) -> bool:
        """Return True on the first call; always False in a forked process."""
        if self._closed or os.getpid() != self._pid:
            return False
        self._closed = True
        return True

    def _begun(self) -> float:
        self._check_open()
        return time.monotonic()

    def _finished(self, step: int) -> float:
        check_step(step)
        begun = self._begun()
        self._step = step
        return begun

    def _carry_out(self, plan: Due) -> dict[str, float]:
        metrics: dict[str, float] = {}
        step = self._step
        if step is None or not plan:
            return metrics
        last_sync, first = self._planner.last_sync, time.monotonic()
        if plan & Due.BROADCAST:
            plan = self._planner.broadcast(plan, step)
            metrics["time/broadcast"] = time.monotonic() - first
        begun = time.monotonic()
        plan = self._planner.begin(plan, step)
        if plan & Due.SYNC:
            writer = self._saver.memory or self._saver.writer
            self._save(self._planner.synced, Due.SYNC, writer)
            metrics["time/sync_weight"] = time.monotonic() - begun
        half, full, writer = time.monotonic(), self._planner.full, self._saver.writer
        if plan & Due.FULL:
            if plan & Due.PROMISE:
                full.promise = self._trained.promise()
            self._save(full, plan, writer)
        elif plan & Due.HUGGING_FACE:
            self._saver.add_hugging_face(full, self._trained.full_weights)
        if plan & (Due.FULL | Due.HUGGING_FACE):
            metrics["time/save_checkpoint"] = time.monotonic() - half
        if self._planner.last_sync is not last_sync:
            if self._last_sync_time is not None:
                metrics["time/trainer_sync_interval"] = first - self._last_sync_time
            self._last_sync_time = first
        return metrics

    def _save(self, save: OwnSave, plan: Due, writer: RankWriter) -> None:
        is_delta = save.base is not None
        make = partial(self._trained.part, writer, plan, save.id.step, is_delta=is_delta)
        self._saver.save(save, make, writer)

    def _with_counters(self, metrics: dict[str, float], begun: float) -> dict[str, float]:
        saver = self._saver
        saver.raise_failure()
        written = saver.take_written()
        if written is not None:
            metrics["sync/bytes"] = float(written)
        if saver.announced is not None:
            metrics["sync/announced_step"] = float(saver.announced)
        if self._fast_path.is_on and saver.rank == 0:
            metrics["sync/broadcasts"] = float(self._fast_path.broadcasts)
            metrics["sync/broadcast_failures"] = float(self._fast_path.failures)
        metrics["sync/skipped"] = float(self._planner.skipped)
        metrics["time/stall"] = time.monotonic() - begun
        return metrics

    def _end(self) -> list[SaveFailedError]:
        self._fast_path.close()
        forget(self._trained.model)  # it can be loaded after this hook was made
        errors = self._saver.close()
        self._trained.close()
        return errors


def _effective(settings: SyncSettings, model: nn.Module, saving: SaveSettings) -> SyncSettings:
    """Check the settings; return the settings that take effect.

    Raises:
        InvalidSettingsError: the settings or the model are invalid.
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
    if saving.memory_dir is not None and settings.method is not SyncMethod.MEMORY:
        raise InvalidSettingsError(
            f"memory_dir is only for method memory, but the method is {settings.method}. Set "
            "SyncSettings(method='memory'), or give SaveSettings no memory_dir"
        )
    return settings
