"""``Promise``: that a full checkpoint can be resumed, planned while the model still trains."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from syncd.checkpoint.tensor_rules import shown
from syncd.protocol.errors import SyncdError
from syncd.storage.job import Job
from trainer_hooks.resuming.loading import Loading, RawOptimizerLoading, loadings
from trainer_hooks.resuming.resumable import look_at_checkpoint
from trainer_hooks.resuming.saved_files import SavedFiles
from trainer_hooks.state.full_checkpoint import Some, Stateful

log = logging.getLogger(__name__)

#: A model's folder in the step's, the model, and its optimizers.
Saved = tuple[str, nn.Module, Some[Stateful]]


class Promise:
    """The loading of a run's first full checkpoint into the objects that made it.

    Make it on all ranks in the training's thread, right before the save: any ``state_dict`` may be
    collective. It keeps names, shapes and dtypes, and no data, so that :meth:`check` does not look
    at the model.
    """

    def __init__(self, saved: Iterable[Saved]) -> None:
        self._parts: list[tuple[str, Loading]] = []
        self._reason = ""
        for folder, model, optimizers in saved:
            with self._noted():
                for part in loadings(model, optimizers):
                    if not isinstance(part, RawOptimizerLoading):  # only itself can load it
                        with self._noted():
                            part.prepare_trained()
                            part.keep_shadows()
                        self._parts.append((folder, part))

    def check(self, job: Job, step: int) -> bool:
        """Log why the checkpoint of a step cannot be resumed, if so; False if storage failed.

        Reads receipts and headers. Call it on rank 0, once, in any thread.
        """
        with self._noted():
            try:
                self._reason = self._reason or self._broken_by(job, step)
            except OSError:
                return False
        if self._reason:
            log.error(
                "training could not resume from the full checkpoint of step %d: %s. Mend this now: "
                "later full checkpoints are not checked",
                step,
                self._reason,
            )
        return True

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Note an error: loading would raise it, too, but the save goes on."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - any model's code may run
            self._reason = self._reason or (
                str(error) if isinstance(error, SyncdError) else repr(error)
            )

    def _broken_by(self, job: Job, step: int) -> str:
        checkpoint = look_at_checkpoint(job, step, is_pointed=True)
        if isinstance(checkpoint, str):
            return checkpoint
        opened: dict[tuple[str, bool], SavedFiles] = {}
        with ExitStack() as stack:
            for folder, part in self._parts:
                key = folder, part.is_optimizer
                if key not in opened:
                    weights, optimizers = checkpoint.weights_in(folder), checkpoint.optimizers
                    names = optimizers if part.is_optimizer else weights
                    place, told = job.layout.step(step) / folder, checkpoint.vouched.get(folder)
                    files = SavedFiles(job.storage, place, names, told, part.is_optimizer)
                    opened[key] = stack.enter_context(files)
                part.files = opened[key]
                # As rank 0: what is not sharded can differ from rank to rank.
                part.open(0, range(len(part.files)))
                part.plan(0)
            for _, part in self._parts:
                part.unused()
            for files in opened.values():
                # Other ranks may have other parts of the model.
                own = files[0]
                for name in sorted({*own.tensors, *own.plain} - files.taken):
                    return (
                        f"{own.path} has '{shown(name)}', which is not loaded. state_dict() must "
                        "have the same names at each call, in a model only parameters and buffers"
                    )
        return ""
