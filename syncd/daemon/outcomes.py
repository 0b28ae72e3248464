"""The record of saves, ``saves.json``: which saves were published, skipped or quarantined."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from syncd.checkpoint.chunked_save import holds_model_only
from syncd.checkpoint.save import Save
from syncd.checkpoint.step_save import look_into_step
from syncd.protocol.events import RecordUnwritten
from syncd.protocol.records import Manifest, Quarantine, SaveOutcome, SaveOutcomes, encode
from syncd.storage.epoch import Epoch
from syncd.storage.errnos import is_gone
from syncd.storage.job import Job
from syncd.storage.judge import Clock

log = logging.getLogger(__name__)


@dataclass
class Outcomes:
    """The outcomes of saves, as the active daemon records them.

    An outcome counts even if storage refuses to write it; :meth:`write_again` writes it later.
    ``of_step`` maps each step to the outcome of its last save.
    """

    job: Job
    epoch: Epoch
    wall: Clock

    def __post_init__(self) -> None:
        self._unwritten = False
        self.of_step: dict[int, SaveOutcome] = {}

    def published(self, step: int, identity: str, sequence: int) -> None:
        """Record that a save was published."""
        outcome = SaveOutcome(identity=identity, outcome="published", sequence=sequence)
        self._put_on_record(step, outcome)

    def found_published(self, manifest: Manifest) -> None:
        """Record that a save was published, according to a previous daemon's manifest."""
        recorded = self.of_step.get(manifest.step)
        # The recorded save may be a later, quarantined save, which must not be tried again.
        if recorded is not None and recorded.outcome == "quarantined":
            return
        outcome = SaveOutcome(
            identity=manifest.save_id, outcome="published", sequence=manifest.sequence
        )
        if recorded is not None and recorded.identity == manifest.save_id:
            outcome = outcome.model_copy(update={"model_only": recorded.model_only})
        self._put_on_record(manifest.step, outcome)

    def skip(self, step: int, identity: str) -> None:
        """Record that a save will never be published."""
        self._put_on_record(step, SaveOutcome(identity=identity, outcome="skipped"))

    def quarantine(self, save: Save, error: Exception) -> Path:
        """Record that a save can never be published; returns the record's path."""
        identity = save.known_as or ""
        name = hashlib.blake2s(identity.encode(), digest_size=6).hexdigest()
        path = self.job.layout.quarantine / f"step_{save.step}-{name}.json"
        record = Quarantine(
            step=save.step,
            identity=identity,
            error=type(error).__name__,
            reason=str(error),
            time=self.wall(),
        )
        try:
            self.epoch.replace_file(path, encode(record))
        except OSError as refused:
            RecordUnwritten(path, refused).tell(log)
        self._put_on_record(save.step, SaveOutcome(identity=identity, outcome="quarantined"))
        return path

    def learn(self, step: int, *, prefix: str | None, cancel: Callable[[], None]) -> None:
        """Record whether a save of torch.distributed.checkpoint holds only a model.

        Does nothing if the step folder no longer holds the recorded save. ``cancel`` is called
        between reads, and raises an error to stop the work. ``prefix`` is the prefix of the model's
        tensor names; None means that it is detected.

        Raises:
            OSError: storage failed; nothing was recorded.
        """
        outcome = self.of_step.get(step)
        if outcome is None:
            return
        actor = self.job.layout.actor(step)
        try:
            model_only = holds_model_only(self.job.storage, actor, prefix=prefix, cancel=cancel)
        except OSError as error:
            if is_gone(error):
                return
            raise
        now = look_into_step(self.job.storage, self.job.layout.step(step), step)
        if now.identity == outcome.identity:
            self._put_on_record(step, outcome.model_copy(update={"model_only": model_only}))

    def forget(self, step: int) -> None:
        """Remove the outcome of a step."""
        if self.of_step.pop(step, None) is not None:
            self._write()

    def write_again(self) -> None:
        """Write ``saves.json`` if the last write failed."""
        if self._unwritten:
            self._write()

    def _put_on_record(self, step: int, outcome: SaveOutcome) -> None:
        if self.of_step.get(step) != outcome:
            self.of_step[step] = outcome
            self._write()

    def _write(self) -> None:
        try:
            self.epoch.replace_file(self.job.layout.saves, encode(SaveOutcomes(steps=self.of_step)))
        except OSError as error:
            if not self._unwritten:
                RecordUnwritten(self.job.layout.saves, error).tell(log)
            self._unwritten = True
        else:
            self._unwritten = False
