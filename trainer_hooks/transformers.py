"""``SyncdCallback``: publishes a model that a Trainer of transformers or TRL trains."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from transformers import TrainerCallback

from syncd.protocol.errors import InvalidSettingsError, SaveFailedError
from syncd.protocol.policy import SyncSettings, given_or_default
from syncd.storage.fsio import Storage
from trainer_hooks.hook import TrainerHook
from trainer_hooks.settings import SaveAsHf, SaveSettings

if TYPE_CHECKING:
    from torch import nn
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

    from trainer_hooks.state.model_files import Pretrained

log = logging.getLogger(__name__)

__all__ = ["SyncdCallback"]

#: A log shows the sum of these metrics since the last log, and the last value of the others.
_SUMMED: Final = frozenset(
    {
        "time/stall",
        "time/sync_weight",
        "time/broadcast",
        "time/wait_for_explorers",
        "sync/bytes",
        "sync/failed",
    }
)


class SyncdCallback(TrainerCallback):
    """Lets a Trainer sync its model after the optimizer steps that are due, on every rank.

    The callback calls a :class:`~trainer_hooks.hook.TrainerHook` at each optimizer step
    (``state.global_step``). It also publishes the steps that the Trainer saves, and the weights of
    the last step. The Trainer itself makes checkpoints and resumes from them.

    Promised: explorers get the whole model as it was after the step, with the names of the plain
    model, even if accelerate has wrapped it (DDP, FSDP1, FSDP2). Training waits for storage only in
    these cases:

    - :class:`~trainer_hooks.settings.SaveSettings` ask for a wait.
    - The Trainer saves a step while two saves are unfinished.
    - At the end, the last save is being written.

    At the end, nothing is published with ``SaveSettings(final=False)``, and nothing with
    ``load_best_model_at_end``, because the loaded model is not the model of the last step.

    Call ``train`` inside ``with callback:`` to report a failed training at once. Otherwise the
    trainer counts as dead one lease time after its process has ended.

    Add the callback with ``trainer.add_callback(callback)``. Use :meth:`add_to` instead if the
    callback's metrics should reach W&B or TensorBoard.

    Args:
        job_dir: an existing folder on storage that all ranks, the daemon and the explorers share;
            not the Trainer's ``output_dir``.
        settings: when to sync; the same on all ranks. ``save_interval`` must be 0.
        saving: how saves are written; the same on all ranks. ``save_as_hf`` must be ``never``.
        publish_first: whether to publish the weights before the first step, for explorers that have
            no weights yet. The version's step is 0, or the step from which the Trainer resumes.
        stop_on_failure: whether a failed save ends the training. If False, the failure is logged
            and counted in ``sync/failed``. The previous version stays published, and the next due
            step is saved as usual.

    Raises:
        InvalidSettingsError: the settings ask for full checkpoints, but only the Trainer makes full
            checkpoints.
    """

    def __init__(
        self,
        job_dir: str | Path,
        *,
        settings: SyncSettings | None = None,
        saving: SaveSettings | None = None,
        publish_first: bool = False,
        stop_on_failure: bool = True,
        storage: Storage | None = None,
    ) -> None:
        self._settings = given_or_default("settings", SyncSettings, settings)
        self._saving = given_or_default("saving", SaveSettings, saving)
        self._publish_first = publish_first
        self._stop_on_failure = stop_on_failure
        self._make_hook = partial(TrainerHook, job_dir, storage=storage)
        self._hook: TrainerHook | None = None
        self._metrics: dict[str, float] = {}
        if self._settings.save_interval or self._saving.save_as_hf is not SaveAsHf.NEVER:
            raise InvalidSettingsError(
                "SyncdCallback makes no full checkpoints, because a Trainer could not resume "
                "from them. Leave save_interval at 0 and save_as_hf at never. Set save_steps of "
                "the TrainingArguments instead"
            )

    @property
    def hook(self) -> TrainerHook | None:
        """The hook of the running training; None before and after the training."""
        return self._hook

    def add_to(self, trainer: Trainer) -> Self:
        """Add this callback before the callbacks that report to W&B, TensorBoard and so on.

        ``add_callback`` would add it after those callbacks, so their reports would lack its
        metrics.
        """
        trainer.callback_handler.callbacks.insert(0, self)
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._abandon(kind or RuntimeError)

    # -- called by the Trainer ------------------------------------------------------------------

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002 # the Trainer's signature, here and below
        model: nn.Module | None = None,
        processing_class: Pretrained | None = None,
        **_: Any,
    ) -> None:
        """Register as the job's trainer. Collective.

        Raises:
            JobUnavailableError: the job directory is missing or not writable on some rank.
            NameTakenError: another trainer works in this job.
            InvalidSettingsError: the settings are invalid, or the model is not supported.
        """
        # A hook is left if a training failed, or its batch was too large (auto_find_batch_size).
        self._abandon(RuntimeError)
        self._metrics = {}
        saving = self._saving
        # Ranks must agree, so the arguments decide: hosts need not share output_dir.
        if args.load_best_model_at_end:
            saving = replace(saving, final=False)
        self._hook = self._make_hook(
            _trained(model), tokenizer=processing_class, settings=self._settings, saving=saving
        )
        if self._publish_first:
            self._call(self._hook.save_state_dict, state.global_step)

    def on_step_end(
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        **_: Any,
    ) -> None:
        """Sync the step if the settings require it.

        Raises:
            SaveFailedError: an earlier save failed, and ``stop_on_failure`` is True.
        """
        if self._hook is not None:
            self._call(self._hook.after_step, state.global_step)

    def on_save(
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        **_: Any,
    ) -> None:
        """Sync the step that the Trainer has saved, if it is not synced yet.

        Raises:
            SaveFailedError: an earlier save failed, and ``stop_on_failure`` is True.
        """
        if self._hook is not None:
            self._call(self._hook.save_state_dict, state.global_step)

    def on_log(
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Add the hook's metrics to ``logs`` and ``log_history`` at each training log."""
        # Not into an evaluation's log, because a hyperparameter search adds up its values.
        if logs is None or "loss" not in logs:
            return
        logs.update(self._metrics)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(self._metrics)
        self._metrics = {}

    def on_train_end(
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: TrainerState,  # noqa: ARG002
        control: TrainerControl,  # noqa: ARG002
        **_: Any,
    ) -> None:
        """Sync the last step if needed, wait for saves, and report that this trainer has stopped.

        Raises:
            SaveFailedError: a save failed, and ``stop_on_failure`` is True.
        """
        hook, self._hook = self._hook, None
        if hook is None:
            return
        try:
            hook.close()
        except SaveFailedError as error:
            if self._stop_on_failure:
                raise
            log.error("%s", error)

    def _call(self, method: Callable[[int], dict[str, float]], step: int) -> None:
        try:
            self._add(method(step))
        except SaveFailedError as error:
            if self._stop_on_failure:
                raise
            log.error("could not save or publish; training continues: %s", error)
            self._add({"sync/failed": 1.0})

    def _add(self, metrics: dict[str, float]) -> None:
        for key, value in metrics.items():
            before = self._metrics.get(key, 0.0) if key in _SUMMED else 0.0
            self._metrics[key] = before + value

    def _abandon(self, kind: type[BaseException]) -> None:
        """End a hook whose training has failed, without waiting for other ranks."""
        hook, self._hook = self._hook, None
        if hook is not None:
            hook.__exit__(kind)


def _trained(model: nn.Module | None) -> nn.Module:
    """Return the model, after a check that its weights can be saved."""
    if model is None:
        raise InvalidSettingsError("the Trainer has no model to publish")
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise InvalidSettingsError(
            "DeepSpeed's ZeRO-3 leaves no weights in the model between steps, so the model "
            "cannot be published. Train with FSDP, or with ZeRO-1 or ZeRO-2"
        )
    return model
