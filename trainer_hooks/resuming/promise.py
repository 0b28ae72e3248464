"""``Promise``: that a full checkpoint can be resumed, planned while the model still trains."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack

from torch import nn

from syncd.checkpoint.tensor_rules import shown
from syncd.protocol.errors import SyncdError
from syncd.storage.job import Job
from trainer_hooks.ranks import Ranks
from trainer_hooks.resuming.loading import Loading, RawOptimizerLoading, loadings
from trainer_hooks.resuming.resumable import look_at_checkpoint
from trainer_hooks.resuming.saved_files import SavedFiles
from trainer_hooks.state.full_checkpoint import Some, Stateful
from trainer_hooks.state.state_dict import beginning

#: A model's folder in the step's, the model, and its optimizers.
Saved = tuple[str, nn.Module, Some[Stateful]]


class Promise:
    """The loading of a run's first full checkpoint into the objects that made it.

    Make it on all ranks in the training's thread, when the checkpoint is saved: with FSDP1 that is
    collective. It keeps names, shapes and dtypes, and no data.
    """

    def __init__(self, ranks: Ranks, saved: Iterable[Saved]) -> None:
        self._parts: list[tuple[str, Loading]] = []
        self._reason = ""
        try:
            for folder, model, optimizers in saved:
                for part in loadings(model, optimizers):
                    if not isinstance(part, RawOptimizerLoading):  # only itself can load it
                        part.prepare_trained()
                        part.keep_shadows()
                        self._parts.append((folder, part))
        except SyncdError as error:
            self._reason = str(error)
        names = ranks.gathered([part.names() for _, part in self._parts])
        # Of pipeline stages, each rank has other names.
        self._elsewhere = set[str]().union(*(own for rank in names for own in rank))

    def broken_by(self, job: Job, step: int) -> str:
        """Why the checkpoint of a step cannot be resumed; empty if it can.

        Reads receipts and headers. Call it on rank 0, in any thread.

        Raises:
            OSError: storage failed.
        """
        if self._reason:
            return self._reason
        checkpoint = look_at_checkpoint(job, step, is_pointed=True)
        if isinstance(checkpoint, str):
            return checkpoint
        opened: dict[tuple[str, bool], SavedFiles] = {}
        try:
            with ExitStack() as stack:
                for folder, part in self._parts:
                    key = folder, part.is_optimizer
                    if key not in opened:
                        names = (
                            checkpoint.optimizers
                            if part.is_optimizer
                            else checkpoint.weights_in(folder)
                        )
                        place, told = job.layout.step(step) / folder, checkpoint.vouched.get(folder)
                        files = SavedFiles(job.storage, place, names, told, part.is_optimizer)
                        opened[key] = stack.enter_context(files)
                    part.files = opened[key]
                    part.open(None, range(len(part.files)))
                    part.plan(None)
                left = {name for _, part in self._parts for name in part.unused()}
        except SyncdError as error:
            return str(error)
        left -= set().union(*(files.taken for files in opened.values()))
        for name in sorted(left):
            inner = name.partition(".")[2]  # of an optimizer
            if not (beginning(name, self._elsewhere) or beginning(inner, self._elsewhere)):
                return f"nothing would load '{shown(name)}'"
        return ""
