"""Orders to a child process: to merge a save, fold deltas, prepare a tip, or make its version."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from syncd.checkpoint.build import build_step
from syncd.checkpoint.merging.options import MergeOptions, Work
from syncd.checkpoint.model_folder import flaws_in, warn_once
from syncd.checkpoint.save import Unfinished
from syncd.checkpoint.step_save import look_into_step
from syncd.checkpoint.tip_folder import make_from_tip, prepare_tip
from syncd.deltas.limits import DeltaError
from syncd.protocol.errors import CheckpointError, SaveNotReadyError, VerificationError
from syncd.protocol.records import Latest, Manifest
from syncd.storage.fsio import named
from syncd.storage.job import Job


class _StepOrder(NamedTuple):
    folder: Path
    step: int
    save_id: str
    sequence: int
    options: MergeOptions

    def build(self, job: Job, work: Work, build: Callable[..., Manifest]) -> Manifest:
        """Fill the folder by ``build_step``, or a function with the same arguments."""
        storage, step, folder = job.storage, job.layout.step(self.step), self.folder
        save = look_into_step(storage, step, self.step)
        if isinstance(save, Unfinished) or save.identity != self.save_id:
            raise SaveNotReadyError(f"{step} changed before syncd merged it")
        manifest = build(
            storage, step, save, folder, options=self.options, work=work, sequence=self.sequence
        )
        for flaw, reason in flaws_in(storage, folder, manifest):
            warn_once(job.layout.actor(self.step), flaw, reason)
        return manifest


class MergeOrder(_StepOrder):
    """Merge the save ``save_id`` of a step into the empty ``folder`` of version ``sequence``."""

    def make(self, job: Job, work: Work) -> Manifest:
        """Make the version's folder; for the errors see ``build_step``."""
        return self.build(job, work, build_step)


class PrepareOrder(_StepOrder):
    """Make the empty ``folder`` the whole tip ``sequence`` of the save ``save_id`` of a step."""

    def make(self, job: Job, work: Work) -> Manifest:
        """Make the tip's folder; for the errors see ``prepare_tip``."""
        return self.build(job, work, prepare_tip)


class MakeOrder(NamedTuple):
    """Make the version of the whole tip ``tip`` in the empty ``folder``."""

    folder: Path
    tip: int

    def make(self, job: Job, work: Work) -> Manifest:
        """Make the version's folder; for the errors see ``make_from_tip``."""
        tip, storage = job.layout.delta(self.tip), job.storage
        return make_from_tip(storage, tip, self.folder, to=storage, work=work)


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


Order = MergeOrder | PrepareOrder | MakeOrder | FoldOrder


def encoded(order: Order) -> list[object]:
    """An order as JSON for :func:`decoded`."""
    match order:
        case MergeOrder() | PrepareOrder():
            kind = "merge" if isinstance(order, MergeOrder) else "prepare"
            options = order.options[:-1]  # the last one is a function
            return [kind, str(order.folder), *order[1:-1], options]
        case MakeOrder(folder, tip):
            return ["make", str(folder), tip]
        case FoldOrder(folder, latest, chain):
            return ["fold", str(folder), latest.model_dump(), chain]


def decoded(kind: str, folder: str, *fields: Any) -> Order:
    """The order that :func:`encoded` has told."""
    if kind in {"merge", "prepare"}:
        step, save_id, sequence, options = fields
        order = MergeOrder if kind == "merge" else PrepareOrder
        return order(Path(folder), step, save_id, sequence, MergeOptions(*options))
    if kind == "make":
        return MakeOrder(Path(folder), *fields)
    latest, chain = fields
    return FoldOrder(Path(folder), Latest.model_validate(latest), chain)
