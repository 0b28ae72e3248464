"""Publishing: commit a version that was made in the daemon's room, and update LATEST.

``saves.json`` records what became of each save.
"""

from __future__ import annotations

import logging
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from syncd.checkpoint.build import FreeSpace
from syncd.checkpoint.merging.options import MergeOptions
from syncd.checkpoint.open_save import holds_model_only
from syncd.checkpoint.save import Save, WholeSave
from syncd.checkpoint.step_save import look_into_step
from syncd.checkpoint.version import read_manifest, republish
from syncd.daemon.config import DaemonConfig
from syncd.daemon.naming import Naming
from syncd.daemon.observation import Known
from syncd.daemon.recover import BELIEVED, look_back
from syncd.daemon.tenure import Tenure
from syncd.protocol.errors import (
    JobUnavailableError,
    NonFiniteError,
    SaveNotReadyError,
    VersionGoneError,
)
from syncd.protocol.events import CleanupDelayed, RecordUnwritten
from syncd.protocol.names import parse_version_folder, version_folder
from syncd.protocol.records import (
    Latest,
    Manifest,
    Quarantine,
    RolledBack,
    SaveOutcome,
    SaveOutcomes,
    Tip,
    encode,
)
from syncd.protocol.requests import RollbackRequest
from syncd.protocol.version_events import DeltaDiscarded, VersionDiscarded
from syncd.storage.epoch import Epoch
from syncd.storage.errnos import GONE, Ignoring, is_gone
from syncd.storage.job import Job
from syncd.storage.judge import Clock

log = logging.getLogger(__name__)

#: Seconds between two looks at LATEST.
_LOOK_AGAIN: Final = 60.0


@dataclass
class Publisher:
    """Makes what was made LATEST, and remembers what became of each save.

    Attributes:
        latest: LATEST as this daemon last wrote or found it; None before the first version.
        known: what is known of LATEST's version, unless it is damaged.
    """

    tenure: Tenure
    config: DaemonConfig

    def __post_init__(self) -> None:
        job, self._epoch = self.tenure.job, self.tenure.epoch
        self._job, self._clock = job, self.tenure.clock
        self._storage, self._layout = job.storage, job.layout
        self.naming = Naming(job, self.tenure.judge.lease_time, self._clock)
        self._floor = 0
        self._free_space = FreeSpace(job.storage, job.layout.epochs, job.layout.root)
        self.latest: Latest | None = None
        self.known = Known()
        self.outcomes = Outcomes(job, self._epoch, self.tenure.wall)

    def recover(self) -> Manifest | None:
        """Read the records after a take-over; adopt or discard the versions above LATEST.

        Returns the manifest of the adopted version, if any.

        Raises:
            ProtocolMismatchError: LATEST has a newer protocol version.
        """
        past = look_back(self._job)
        take_notice_down(self._job)
        self.latest, self._floor = past.latest, past.highest
        self.naming.takes_over(past.latest)
        self.outcomes.of_step = past.outcomes
        for sequence in past.unfinished:
            VersionDiscarded(sequence).tell(log)
            self._epoch.condemn(self._layout.version(sequence))
        served = past.served
        if past.adopted is not None:
            served = past.adopted
            self._epoch.open_leasing(served.sequence)
            self._write_latest(served, keeps_no_deltas=True)
        elif self.latest is not None and not self._storage.exists(
            self._layout.lease_folder(self.latest.sequence)
        ):
            self._epoch.open_leasing(self.latest.sequence)
        for sequence in past.strays:
            self._discard_delta(sequence)
        tip = self.latest.tip if self.latest else None
        chain = past.deltas_to.get(tip.save_id) if tip else None
        if tip is not None and (chain is None or (tip.root or 0) not in {0, chain[0].sequence}):
            self.advance(None)
        if served is None:
            return None
        self._serve(served)
        # After a rollback the step's folder may already hold another save.
        if served.rolled_back is None:
            self.outcomes.found_published(served)
        return past.adopted

    def _discard_delta(self, sequence: int) -> None:
        """Discard a delta above LATEST; a failure is harmless."""
        DeltaDiscarded(sequence).tell(log)
        try:
            self._epoch.condemn(self._layout.delta(sequence))
        except OSError as error:
            if not is_gone(error):
                CleanupDelayed(error).tell(log)

    def check_room(self, save: WholeSave) -> None:
        """Raise NoRoomError if the disk lacks space; also raises the errors of :meth:`publish`."""
        self._free_space.check(
            self._layout.actor(save.step), save, self.merge_options(), self.tenure.cancel
        )

    def check_finite(self, save: WholeSave) -> None:
        """If ``refuse_nonfinite`` is set, raise NonFiniteError for a save with NaN or Inf."""
        found = save.nonfinite
        if self.config.refuse_nonfinite and found is not None and found.count:
            raise NonFiniteError(
                f"step {save.step} has {found}, and the daemon refuses such saves "
                "(refuse_nonfinite). Resume training from an earlier checkpoint, and save again"
            )

    def publish(self, save: WholeSave, merged: Manifest) -> None:
        """Make the version LATEST that was made of a save in this daemon's room.

        Raises:
            SaveNotReadyError: another version took its number meanwhile.
            SupersededError: another daemon has taken over.
        """
        if merged.sequence != self.next_sequence():
            raise SaveNotReadyError(f"{version_folder(merged.sequence)} is another version now")
        self._commit(merged)
        self.outcomes.published(save.step, save.identity, merged.sequence)

    def merge_options(self) -> MergeOptions:
        """The settings of a merge now."""
        return MergeOptions(
            max_file_size=self.config.max_shard_size,
            digests=self.config.digests,
            cast=self.config.cast,
            prefix=self.config.dcp_prefix,
            names=self.naming.choose(self.config.names),
            may_keep=self.config.names is None,
        )

    def publish_fold(self, folded: Manifest, *, of_deltas: bool) -> None:
        """Make the version LATEST that was made of the tip, or of an earlier one.

        An attempt whose LATEST could not be written is finished here.

        Raises:
            SaveNotReadyError: a newer version was published meanwhile.
        """
        if self.latest and folded.sequence <= self.latest.sequence:
            raise SaveNotReadyError(f"{version_folder(folded.sequence)} is too old now")
        there = self._layout.version(folded.sequence)
        if self._storage.exists(there):
            folded = read_manifest(self._storage, there)
            self._storage.sync_folder(self._layout.published)
            self._write_latest(folded, keeps_no_deltas=of_deltas)
            self._serve(folded)
        else:
            self._commit(folded, of_deltas=of_deltas)

    def advance(self, tip: Tip | None, no_deltas: str | None = None) -> None:
        """Let LATEST name this as its tip; ``no_deltas`` is a reason to take no deltas."""
        if self.latest is not None:
            no_deltas = self.latest.no_deltas or no_deltas
            self._name(self.latest.model_copy(update={"tip": tip, "no_deltas": no_deltas}))

    def _name(self, latest: Latest) -> None:
        self._epoch.replace_file(self._layout.latest, encode(latest))
        self.latest = latest

    def reserve(self, making: Save | None = None) -> int:
        """A new sequence for a tip; the next one is that of what is being made."""
        self._floor = self.next_sequence() + (making is not None)
        return self._floor

    def is_newest(self, sequence: int) -> bool:
        """True if no higher sequence was reserved, or told by an explorer."""
        return sequence == self._floor

    def republish(self, request: RollbackRequest, making: Save | None) -> Manifest:
        """Make an old version LATEST again, under a new sequence.

        The save of the previous LATEST, or the newest one that was being made or prepared, stays
        recorded as published, because the pointer may still name it.

        Raises:
            VersionGoneError, RecordError, VerificationError: the old version is gone or damaged.
            SupersededError: another daemon has taken over.
        """
        source = self._layout.version(request.sequence)
        try:
            old = read_manifest(self._storage, source)
        except FileNotFoundError as error:
            raise VersionGoneError(f"{source} is gone, or damaged: it has no manifest") from error
        if old.sequence != request.sequence:
            raise VersionGoneError(f"{source} is damaged: its manifest is of another version")

        # What was prepared and never named did not end, whatever its outcome says.
        self.outcomes.forget_above(self.latest.newest if self.latest else 0)
        # The next number is that of what is being made.
        sequence = self.next_sequence() + (making is not None)
        tip = self.latest.tip if self.latest else None
        replaced = making.identity if making else tip.save_id if tip else self.known.published_save
        back = RolledBack(
            sequence=request.sequence,
            instead_of=replaced,
            request=request.id,
        )
        manifest = old.model_copy(update={"sequence": sequence, "rolled_back": back, "timings": {}})
        with self._epoch.build(version_folder(sequence)) as folder:  # mkdir building/VERSION
            try:
                republish(self._storage, source, folder, manifest, cancel=self.tenure.cancel)
            except FileNotFoundError as error:
                if not self._storage.exists(folder):
                    raise
                raise VersionGoneError(f"{source} is gone, or damaged: {error}") from error
            self._commit(manifest)
        return manifest

    def answer(self, request: RollbackRequest, *, made: int | None, why: str) -> None:
        """Replace a rollback request by its answer; ``made`` is None for a refusal."""
        outcome = "refused" if made is None else "done"
        answered = request.model_copy(update={"outcome": outcome, "made": made, "why": why})
        path = self._layout.request(request.id)
        if self._storage.exists(path):  # else the user has withdrawn the request
            self._epoch.replace_file(path, encode(answered))

    def _commit(self, manifest: Manifest, *, of_deltas: bool = False) -> None:
        """Publish the version in ``building/``; this method defines the order of all writes.

        All its files are synced, and it leaves this daemon's room by a rename, which fails after
        another daemon has taken over. docs/protocol.md ("The fence: epochs") has the reasons.
        """
        epoch, sequence = self._epoch, manifest.sequence
        # Rename the empty folder building/leases-VERSION to leases/VERSION. Fsync leases/.
        epoch.open_leasing(sequence)
        # Even after an error, because the rename may have taken place.
        self._floor = max(self._floor, sequence)
        # Rename building/VERSION to published/VERSION. Fsync published/.
        epoch.publish_version(sequence)
        # Write LATEST with an fsync, and rename it. Fsync .syncd/. Explorers see LATEST.
        self._write_latest(manifest, keeps_no_deltas=of_deltas)
        self._serve(manifest)

    def _serve(self, manifest: Manifest) -> None:
        self.naming.serves(manifest)
        back = manifest.rolled_back
        self.known = Known(
            published_save=manifest.settles,
            served_request=back.request if back else None,
            full_bytes=manifest.size,
            nonfinite=manifest.nonfinite.count if manifest.nonfinite else 0,
            save_id=manifest.save_id,
        )

    def count_above(self, told: int) -> None:
        """Let new numbers be above ``told``: an explorer serves it, perhaps of a restored job."""
        if told <= (self.latest.sequence if self.latest else 0) + BELIEVED:
            self._floor = max(self._floor, told)

    def next_sequence(self) -> int:
        """The number of the next version."""
        sequence = self._floor + 1
        while self._in_the_way(self._layout.version(sequence)) or self._in_the_way(
            self._layout.lease_folder(sequence)
        ):
            sequence += 1
        if parse_version_folder(version_folder(sequence)) is None:
            raise JobUnavailableError(
                f"{self._layout.latest} names v{self._floor}, the highest possible "
                "number, so no daemon wrote this LATEST: restore its previous content"
            )
        return sequence

    def _in_the_way(self, path: Path) -> bool:
        status = self._storage.status(path)
        return status is not None and not stat.S_ISDIR(status.st_mode)

    def _write_latest(self, manifest: Manifest, *, keeps_no_deltas: bool) -> None:
        before, back = self.latest, manifest.rolled_back
        tip = before.tip if before else None
        no_deltas = before.no_deltas if before and keeps_no_deltas else None
        if back is not None:
            no_deltas = f"v{back.sequence} is served again"
        self._name(
            Latest(
                sequence=manifest.sequence,
                step=manifest.step,
                folder=version_folder(manifest.sequence),
                kind=manifest.kind,
                dtype=manifest.dtype,
                names=self.naming.kept_with(manifest),
                save_id=manifest.save_id,
                tip=tip.above(manifest.sequence) if tip else None,
                no_deltas=no_deltas,
                rollback=manifest.sequence if back else before and before.rollback,
            )
        )


def take_notice_down(job: Job) -> None:
    """Remove ``publish.lock``; a failure is harmless, because the file is only a hint."""
    try:
        job.storage.unlink_if_there(job.layout.publish_lock)
    except OSError as error:
        CleanupDelayed(error).tell(log)


@dataclass
class Outcomes:
    """The outcomes of saves, as the active daemon records them.

    An outcome counts even if storage refuses to write it; :meth:`write_again` writes it later.
    ``of_step`` maps each step to the outcome of its last save; ``unwritten`` is storage's error.
    """

    job: Job
    epoch: Epoch
    wall: Clock

    def __post_init__(self) -> None:
        self.unwritten: OSError | None = None
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

    def quarantine(self, step: int, identity: str, error: Exception) -> Path:
        """Record that a save can never be published; returns the record's path."""
        path = self.job.layout.quarantined(step, identity)
        record = Quarantine(
            step=step,
            identity=identity,
            error=type(error).__name__,
            reason=str(error),
            time=self.wall(),
        )
        try:
            self.epoch.replace_file(path, encode(record))
        except OSError as refused:
            RecordUnwritten(path, refused).tell(log)
        self._put_on_record(step, SaveOutcome(identity=identity, outcome="quarantined"))
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
        storage, layout = self.job.storage, self.job.layout
        with Ignoring(GONE):
            model_only = holds_model_only(storage, layout.actor(step), prefix=prefix, cancel=cancel)
            if look_into_step(storage, layout.step(step), step).identity == outcome.identity:
                self._put_on_record(step, outcome.model_copy(update={"model_only": model_only}))

    def forget(self, step: int) -> None:
        """Remove the outcome of a step."""
        if self.of_step.pop(step, None) is not None:
            self._write()

    def forget_above(self, sequence: int) -> None:
        """Remove the outcomes with higher numbers."""
        above = [step for step, one in self.of_step.items() if (one.sequence or 0) > sequence]
        for step in above:
            self.forget(step)

    @property
    def written(self) -> SaveOutcomes | None:
        """The content of ``saves.json``; None if it has none yet, or could not be written."""
        return None if self.unwritten or not self.of_step else SaveOutcomes(steps=self.of_step)

    def write_again(self) -> None:
        """Write ``saves.json`` if the last write failed."""
        if self.unwritten:
            self._write()

    def _put_on_record(self, step: int, outcome: SaveOutcome) -> None:
        if self.of_step.get(step) != outcome:
            self.of_step[step] = outcome
            self._write()

    def _write(self) -> None:
        try:
            self.epoch.replace_file(self.job.layout.saves, encode(SaveOutcomes(steps=self.of_step)))
        except OSError as error:
            self.unwritten = error
        else:
            self.unwritten = None
