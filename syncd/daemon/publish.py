"""Making versions: merge a save inside our room, commit it, and let LATEST name it."""

from __future__ import annotations

import hashlib
import logging
import stat
import time
from collections.abc import Callable
from pathlib import Path

from syncd.checkpoint.build import build_model_folder
from syncd.checkpoint.chunked_save import holds_model_only
from syncd.checkpoint.free_space import FreeSpace
from syncd.checkpoint.merge import Progress, unheard
from syncd.checkpoint.remote import look_at_weights, write_remote
from syncd.checkpoint.republish import republish
from syncd.checkpoint.save import Save
from syncd.checkpoint.version import read_manifest
from syncd.daemon.config import DaemonConfig
from syncd.daemon.recover import look_back
from syncd.protocol.errors import (
    JobUnavailableError,
    SaveNotReadyError,
    VersionGoneError,
)
from syncd.protocol.events import Event
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import parse_version_folder, version_folder
from syncd.protocol.records import (
    Latest,
    Manifest,
    PublishNotice,
    Quarantine,
    RolledBack,
    SaveOutcome,
    Saves,
    encode,
)
from syncd.protocol.requests import RollbackRequest
from syncd.storage.epoch import Epoch
from syncd.storage.errnos import is_gone
from syncd.storage.fsio import Storage

log = logging.getLogger(__name__)


class Publisher:
    """The active daemon's record of what is published, and how it grows.

    Args:
        storage: the shared storage.
        layout: the job.
        config: the daemon's.
        epoch: the active daemon's room.
        session: for the notice that something is coming.
        cancel: called between chunks; raises to stop.
        wall: seconds since the epoch, for records that people read.
        clock: seconds, monotonic, for timings.

    Attributes:
        latest: LATEST, as this daemon wrote or found it; None before the first version.
        published_save: the identity of the save that LATEST was made from, or stands in for.
        served_request: the request that LATEST is the result of; None for a save's version.
        outcomes: step → what became of its last save.
    """

    def __init__(
        self,
        storage: Storage,
        layout: JobLayout,
        config: DaemonConfig,
        epoch: Epoch,
        session: str,
        *,
        cancel: Callable[[], None],
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._storage = storage
        self._layout = layout
        self._config = config
        self._epoch = epoch
        self._session = session
        self._cancel = cancel
        self._wall = wall
        self._clock = clock
        self._floor = 0
        self._unwritten = False
        advice = "make room there, or lower --keep"
        self._free_space = FreeSpace(storage, layout.epochs, layout.root, advice=advice)
        self.latest: Latest | None = None
        self.published_save: str | None = None
        self.served_request: str | None = None
        self.outcomes: dict[int, SaveOutcome] = {}

    def recover(self) -> Manifest | None:
        """After a take-over: read the records, and adopt a finished version or discard it.

        Returns:
            The version that was adopted.

        Raises:
            ProtocolMismatchError: LATEST is of a newer protocol.
        """
        found = look_back(self._storage, self._layout)
        self._take_notice_down()
        self.latest, self.outcomes, self._floor = found.latest, found.outcomes, found.highest
        for sequence in found.unfinished:
            log.warning(
                "%s is not whole: discarded",
                version_folder(sequence),
                extra=Event.VERSION_DISCARDED(version=sequence),
            )
            self._epoch.condemn(self._layout.version(sequence))
        served = found.served
        if found.adopted is not None:
            served = found.adopted
            log.info(
                "adopting %s, which LATEST does not name yet",
                version_folder(served.sequence),
                extra=Event.VERSION_ADOPTED(version=served.sequence, step=served.step),
            )
            self._epoch.open_leasing(served.sequence)
            self._announce(served)
        elif self.latest is not None and not self._storage.exists(
            self._layout.lease_folder(self.latest.sequence)
        ):
            self._epoch.open_leasing(self.latest.sequence)
        if served is None:
            return None
        self._serve(served)
        if served.rolled_back is not None:
            # The save in that step's folder, if there is one, may be another by now.
            return found.adopted
        recorded = self.outcomes.get(served.step)
        # A later save of that step may have been quarantined: it is not tried again.
        if recorded is None or recorded.outcome != "quarantined":
            outcome = SaveOutcome(
                identity=served.save_id,
                outcome="published",
                sequence=served.sequence,
            )
            if recorded is not None and recorded.identity == served.save_id:
                outcome = outcome.model_copy(update={"model_only": recorded.model_only})
            self._put_on_record(served.step, outcome)
        return found.adopted

    def reconfigure(self, config: DaemonConfig) -> None:
        """Make the next version by another configuration."""
        self._config = config

    def publish(self, save: Save, *, progress: Progress = unheard) -> Manifest:
        """Merge a whole save and make it LATEST.

        Args:
            save: as it was looked at last.
            progress: called with the bytes of tensors that are done, and those of all.

        Raises:
            SaveNotReadyError: the save changed meanwhile; nothing was published.
            CheckpointError: it can never be published as it is.
            SupersededError: another daemon has taken over.
        """
        if save.identity is None:
            raise SaveNotReadyError(save.reason)

        def build(folder: Path, sequence: int) -> Manifest:
            if save.remote is not None:
                step = self._layout.step(save.step)
                return write_remote(self._storage, step, save, folder, sequence=sequence)
            return build_model_folder(
                self._storage,
                self._layout.actor(save.step),
                save,
                folder,
                sequence=sequence,
                digests=self._config.digests,
                max_file_size=self._config.max_shard_size,
                threads=self._config.copy_threads,
                cast=self._config.cast,
                prefix=self._config.dcp_prefix,
                cancel=self._cancel,
                progress=progress,
                clock=self._clock,
            )

        manifest = self._make_version(save.step, build)
        self._put_on_record(
            save.step,
            SaveOutcome(identity=save.identity, outcome="published", sequence=manifest.sequence),
        )
        return manifest

    def republish(self, request: RollbackRequest) -> Manifest:
        """Make an old version LATEST again, under a new sequence.

        What LATEST answered before counts as published: the pointer may name it on.

        Raises:
            VersionGoneError, RecordError, VerificationError: it is not there, or damaged.
            SupersededError: another daemon has taken over.
        """
        source = self._layout.version(request.sequence)
        try:
            old = read_manifest(self._storage, source)
        except FileNotFoundError as error:
            raise VersionGoneError(f"{source} is gone, or damaged: it has no manifest") from error

        def build(folder: Path, sequence: int) -> Manifest:
            back = RolledBack(
                sequence=request.sequence, instead_of=self.published_save, request=request.id
            )
            manifest = old.model_copy(
                update={"sequence": sequence, "rolled_back": back, "timings": {}}
            )
            try:
                republish(self._storage, source, folder, manifest, cancel=self._cancel)
            except FileNotFoundError as error:
                if not self._storage.exists(folder):
                    raise
                raise VersionGoneError(f"{source} is gone, or damaged: {error}") from error
            return manifest

        return self._make_version(old.step, build)

    def answer(self, request: RollbackRequest, *, made: int | None, why: str) -> None:
        """Replace a request by its answer."""
        outcome = "refused" if made is None else "done"
        answered = request.model_copy(update={"outcome": outcome, "made": made, "why": why})
        path = self._layout.request(request.id)
        if self._storage.exists(path):  # else who asked has given up, and took it back
            self._epoch.publish_file(path, encode(answered))

    def _make_version(self, step: int, build: Callable[[Path, int], Manifest]) -> Manifest:
        """Build a version in our room, commit it, and let LATEST name it."""
        sequence = self._next_sequence()
        notice = PublishNotice(sequence=sequence, step=step, session=self._session)
        folder = self._epoch.start_version(sequence)
        try:
            self._epoch.publish_file(self._layout.publish_lock, encode(notice))
            manifest = build(folder, sequence)
            self._epoch.open_leasing(sequence)
            self._floor = sequence  # whatever comes of it: an error may hide that it was done
            self._epoch.publish_version(sequence)
            self._announce(manifest)
        except OSError as error:
            self._epoch.raise_if_superseded(error)
            raise
        finally:
            if self._storage.exists(folder):
                self._storage.remove_tree(folder)
            if self._epoch.is_live():  # else the notice is our successor's by now
                self._take_notice_down()
        self._serve(manifest)
        return manifest

    def _serve(self, manifest: Manifest) -> None:
        back = manifest.rolled_back
        self.published_save = manifest.settles
        self.served_request = None if back is None else back.request

    def skip(self, step: int, identity: str) -> None:
        """Put on record that a save will never be published."""
        self._put_on_record(step, SaveOutcome(identity=identity, outcome="skipped"))

    def learn(self, step: int) -> None:
        """Put on record whether a save of torch.distributed.checkpoint holds a model alone.

        Nothing is where it is not the save on record any more.

        Raises:
            OSError: as the storage says: nothing is known.
        """
        outcome = self.outcomes.get(step)
        if outcome is None:
            return
        try:
            model_only = holds_model_only(
                self._storage,
                self._layout.actor(step),
                prefix=self._config.dcp_prefix,
                cancel=self._cancel,
            )
        except OSError as error:
            if is_gone(error):
                return
            raise
        now = look_at_weights(self._storage, self._layout.step(step), step)
        if now.identity == outcome.identity:
            self._put_on_record(step, outcome.model_copy(update={"model_only": model_only}))

    def forget(self, step: int) -> None:
        """Take a step whose folder is gone off the record."""
        if self.outcomes.pop(step, None) is not None:
            self._write_saves()

    def write_again(self) -> None:
        """Write what storage refused to put on record before."""
        if self._unwritten:
            self._write_saves()

    def quarantine(self, save: Save, error: Exception) -> Path:
        """Put on record why a save cannot be published; it is not tried again.

        Returns:
            The record's file.
        """
        identity = save.known_as or ""
        name = hashlib.blake2s(identity.encode(), digest_size=6).hexdigest()
        path = self._layout.quarantine / f"step_{save.step}-{name}.json"
        record = Quarantine(
            step=save.step,
            identity=identity,
            error=type(error).__name__,
            reason=str(error),
            time=self._wall(),
        )
        try:
            self._epoch.publish_file(path, encode(record))
        except OSError as refused:
            log.error(
                "%s cannot be written: %s",
                path,
                refused,
                extra=Event.RECORD_UNWRITTEN(path=path, reason=refused),
            )
        self._put_on_record(save.step, SaveOutcome(identity=identity, outcome="quarantined"))
        return path

    def _next_sequence(self) -> int:
        """The next number, passing over those whose names something else than a folder has."""
        sequence = self._floor + 1
        while self._in_the_way(self._layout.version(sequence)) or self._in_the_way(
            self._layout.lease_folder(sequence)
        ):
            sequence += 1
        if parse_version_folder(version_folder(sequence)) is None:
            raise JobUnavailableError(
                f"{self._layout.latest} names version {self._floor}, and there is no number above "
                "it: no daemon wrote that; put back what it said before"
            )
        return sequence

    def _in_the_way(self, path: Path) -> bool:
        status = self._storage.status(path)
        return status is not None and not stat.S_ISDIR(status.st_mode)

    def _take_notice_down(self) -> None:
        try:
            self._storage.unlink_if_there(self._layout.publish_lock)
        except OSError as error:  # a hint only
            log.warning(
                "%s stays: %s",
                self._layout.publish_lock,
                error,
                extra=Event.CLEANUP_DELAYED(reason=error),
            )

    def _announce(self, manifest: Manifest) -> None:
        """Let LATEST name a published version."""
        latest = Latest(
            sequence=manifest.sequence,
            step=manifest.step,
            folder=version_folder(manifest.sequence),
            kind=manifest.kind,
        )
        self._epoch.publish_file(self._layout.latest, encode(latest))
        self.latest = latest

    def _put_on_record(self, step: int, outcome: SaveOutcome) -> None:
        if self.outcomes.get(step) != outcome:
            self.outcomes[step] = outcome
            self._write_saves()

    def _write_saves(self) -> None:
        """What happened has happened, also where it cannot be put on record now."""
        try:
            self._epoch.publish_file(self._layout.saves, encode(Saves(steps=self.outcomes)))
        except OSError as error:
            if not self._unwritten:
                log.error(
                    "%s cannot be written now: %s",
                    self._layout.saves,
                    error,
                    extra=Event.RECORD_UNWRITTEN(path=self._layout.saves, reason=error),
                )
            self._unwritten = True
        else:
            self._unwritten = False

    def check_room(self, save: Save) -> None:
        """Not to begin what cannot end.

        Raises:
            NoRoomError: the disk has no room for this version.
            SaveNotReadyError, CheckpointError: as :meth:`publish`.
        """
        self._free_space.check(
            self._layout.actor(save.step),
            save,
            cast=self._config.cast,
            prefix=self._config.dcp_prefix,
            cancel=self._cancel,
        )
