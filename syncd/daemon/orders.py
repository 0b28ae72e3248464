"""Orders to a child process to make a version: a merge of a save, or a fold of deltas."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from syncd.checkpoint.build import build_step
from syncd.checkpoint.merging.options import MergeOptions, Work
from syncd.checkpoint.model_folder import flaws_in, warn_once
from syncd.checkpoint.save import Unfinished
from syncd.checkpoint.step_save import look_into_step
from syncd.deltas.limits import DeltaError
from syncd.protocol.errors import CheckpointError, SaveNotReadyError, VerificationError
from syncd.protocol.records import Latest, Manifest
from syncd.storage.fsio import named
from syncd.storage.job import Job


class MergeOrder(NamedTuple):
    """Merge the save ``save_id`` of a step into the empty ``folder`` of version ``sequence``."""

    folder: Path
    step: int
    save_id: str
    sequence: int
    options: MergeOptions

    def make(self, job: Job, work: Work) -> Manifest:
        """Make the version's folder; for the errors see ``build_step``."""
        storage, step, folder = job.storage, job.layout.step(self.step), self.folder
        save = look_into_step(storage, step, self.step)
        if isinstance(save, Unfinished) or save.identity != self.save_id:
            raise SaveNotReadyError(f"{step} changed before syncd merged it")
        manifest = build_step(
            storage, step, save, folder, options=self.options, work=work, sequence=self.sequence
        )
        for flaw, reason in flaws_in(storage, folder, manifest):
            warn_once(job.layout.actor(self.step), flaw, reason)
        return manifest


class FoldOrder(NamedTuple):
    """Fold the deltas of ``chain`` into LATEST's version, in the empty ``folder``."""

    folder: Path
    latest: Latest
    chain: Sequence[int]

    def make(self, job: Job, work: Work) -> Manifest:
        """Make the version's folder; for the errors see ``fold_version``.

        Raises:
            DeltaError: a delta is damaged, or LATEST's version is.
        """
        from syncd.deltas.folding import fold_version  # noqa: PLC0415 - NumPy may be missing

        try:
            with named(self.folder):
                return fold_version(job, self.latest, self.chain, self.folder, work)
        except (CheckpointError, VerificationError) as error:
            raise DeltaError(str(error)) from error


Order = MergeOrder | FoldOrder


def encoded(order: Order) -> list[object]:
    """An order as JSON for :func:`decoded`."""
    match order:
        case MergeOrder():
            options = order.options[:-1]  # the last one is a function
            return ["merge", str(order.folder), *order[1:-1], options]
        case FoldOrder(folder, latest, chain):
            return ["fold", str(folder), latest.model_dump(), chain]


def decoded(kind: str, folder: str, *told: Any) -> Order:
    """The order that :func:`encoded` has told."""
    if kind == "merge":
        step, save_id, sequence, options = told
        return MergeOrder(Path(folder), step, save_id, sequence, MergeOptions(*options))
    latest, chain = told
    return FoldOrder(Path(folder), Latest.model_validate(latest), chain)
