"""``SyncdWeightTransfer``: publishes what TRL's ``AsyncGRPOTrainer`` trains."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from syncd.protocol.errors import InvalidSettingsError
from syncd.protocol.policy import SyncSettings
from syncd.storage.fsio import Storage
from trainer_hooks.state.model_files import model_files
from trainer_hooks.state.small_files import Writer
from trainer_hooks.stream import WeightStream

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import TrainerControl, TrainerState, TrainingArguments

__all__ = ["SyncdWeightTransfer"]


class SyncdWeightTransfer(TrainerCallback):
    """Publishes the weights that an ``AsyncGRPOTrainer`` of TRL sends, instead of its NCCL group.

    The trainer must have it twice. As a callback it learns the step, the config and the tokenizer::

        transfer = SyncdWeightTransfer("/shared/jobs/j")
        AsyncGRPOTrainer(..., callbacks=[transfer], weight_transfer=transfer)

    TRL decides when to send: before the first step, and each ``weight_sync_steps`` steps. The
    version's step is ``state.global_step``. Rank 0 writes all tensors that TRL sends.

    Promised: sending returns when the tensors are copied and the save before is written; nobody is
    paused. At the end of the training, the last save is announced.

    Args:
        job_dir, settings, name: as for :class:`~trainer_hooks.stream.WeightStream`.
    """

    def __init__(
        self,
        job_dir: str | Path,
        *,
        settings: SyncSettings | None = None,
        name: str = "trainer",
        storage: Storage | None = None,
    ) -> None:
        self._open = partial(WeightStream, job_dir, settings=settings, name=name, storage=storage)
        self._stream: WeightStream | None = None
        self._state: TrainerState | None = None

    def on_train_begin(
        self,
        args: TrainingArguments,  # noqa: ARG002 # the Trainer's signature
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        **given: Any,
    ) -> None:
        """Learn what the weights that TRL sends belong to."""
        self._state = state
        self._files = _Files(model_files(given["model"], given["processing_class"])())

    # -- TRL's WeightTransferProtocol, called on rank 0 ------------------------------------------

    def init_weight_transfer(self) -> None:
        """Do nothing: the first weights open the stream, also of a second training."""

    def pause(self) -> None:
        """Do nothing: each explorer loads when it wants to."""

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        """Save the weights as a step.

        Raises:
            InvalidSettingsError: the trainer does not have this object among its callbacks, or it
                trains no model that can be published.
            SaveFailedError: an earlier save failed.
        """
        if self._state is None:
            raise InvalidSettingsError(
                "SyncdWeightTransfer does not know the step. Give it to the trainer twice: "
                "AsyncGRPOTrainer(..., callbacks=[transfer], weight_transfer=transfer)"
            )
        if self._stream is None:
            self._stream = self._open(model_files=self._files)
        self._stream.save(self._state.global_step, iterator)

    def resume(self) -> None:
        """Do nothing: nobody was paused."""

    def destroy(self) -> None:
        """Wait for the last save, and report that this trainer has stopped.

        Raises:
            SaveFailedError: a save failed.
        """
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()


class _Files:
    """The small files of the trained model, as a stream takes them."""

    def __init__(self, write: Writer) -> None:
        self._write = write

    def save_pretrained(self, save_directory: str) -> None:
        deque(self._write(Path(save_directory)), maxlen=0)
