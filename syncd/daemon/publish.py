"""Making versions: merge a save inside our room, commit it, and let LATEST name it."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from syncd.checkpoint.build import build_model_folder
from syncd.checkpoint.save import Save
from syncd.checkpoint.version import read_manifest
from syncd.daemon.config import DaemonConfig
from syncd.protocol.errors import (
    NoRoomError,
    ProtocolMismatchError,
    RecordError,
    SaveNotReadyError,
)
from syncd.protocol.layout import (
    JobLayout,
    parse_version_folder,
    version_folder,
)
from syncd.protocol.records import (
    DaemonReport,
    ExplorerReport,
    Latest,
    Manifest,
    PublishNotice,
    Quarantine,
    R,
    SaveOutcome,
    Saves,
    encode,
    parse,
)
from syncd.storage.epoch import Epoch
from syncd.storage.fsio import LONG_RECORD_LIMIT, RECORD_LIMIT, Storage, is_gone

log = logging.getLogger(__name__)

#: Bytes for config, tokenizer and manifest; and how many files a version may well have.
_SMALL_FILES: Final = 1024 * 1024
_FEW_INODES: Final = 32


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
        published_save: the identity of the save that LATEST was made from.
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
        self.latest: Latest | None = None
        self.published_save: str | None = None
        self.outcomes: dict[int, SaveOutcome] = {}

    def recover(self) -> None:
        """After a take-over: read the records, and adopt a finished version or discard it.

        Raises:
            ProtocolMismatchError: LATEST is of a newer protocol.
        """
        # What this client remembers of these may be older than the take-over.
        for folder in (self._layout.state, self._layout.published, self._layout.leases):
            self._storage.refresh(folder)
        self._storage.unlink_if_there(self._layout.publish_lock)
        self.latest = self._read_own(Latest, self._layout.latest)
        saves = self._read_own(Saves, self._layout.saves, LONG_RECORD_LIMIT)
        self.outcomes = dict(saves.steps) if saves else {}
        self._floor = self._highest_sequence()
        known = self.latest.sequence if self.latest else 0
        for sequence in sorted(self._published(), reverse=True):
            if sequence <= known:
                break
            manifest = self._finished(sequence)
            if manifest is None:
                log.warning("%s is not whole: discarded", version_folder(sequence))
                self._epoch.condemn(self._layout.version(sequence))
            else:
                log.info("adopting %s, which LATEST does not name yet", version_folder(sequence))
                self._epoch.open_leasing(sequence)
                self._announce(manifest)
                break
        if self.latest is not None:
            if not self._storage.exists(self._layout.lease_folder(self.latest.sequence)):
                self._epoch.open_leasing(self.latest.sequence)
            manifest = self._finished(self.latest.sequence)
            self.published_save = manifest.save_id if manifest else None
            recorded = self.outcomes.get(manifest.step) if manifest else None
            # A later save of that step may have been quarantined: it is not tried again.
            if manifest and (recorded is None or recorded.outcome != "quarantined"):
                self._put_on_record(
                    manifest.step,
                    SaveOutcome(
                        identity=manifest.save_id, outcome="published", sequence=manifest.sequence
                    ),
                )

    def publish(self, save: Save) -> Manifest:
        """Merge a whole save and make it LATEST.

        Raises:
            SaveNotReadyError: the save changed meanwhile; nothing was published.
            NoRoomError: the disk has no room for it; nothing was begun.
            CheckpointError: it can never be published as it is.
            SupersededError: another daemon has taken over.
        """
        if save.identity is None:
            raise SaveNotReadyError(save.reason)
        self._check_room(save)
        sequence = self._floor + 1
        notice = PublishNotice(sequence=sequence, step=save.step, session=self._session)
        folder = self._epoch.start_version(sequence)
        try:
            self._epoch.publish_file(self._layout.publish_lock, encode(notice))
            manifest = build_model_folder(
                self._storage,
                self._layout.actor(save.step),
                save,
                folder,
                sequence=sequence,
                digests=self._config.digests,
                max_file_size=self._config.max_shard_size,
                cancel=self._cancel,
                clock=self._clock,
            )
            self._epoch.open_leasing(sequence)
            self._epoch.publish_version(sequence)
            self._floor = sequence
            self._announce(manifest)
        except OSError as error:
            self._epoch.raise_if_superseded(error)
            raise
        finally:
            if self._storage.exists(folder):
                self._storage.remove_tree(folder)
            if self._epoch.is_live():  # else the notice is our successor's by now
                self._storage.unlink_if_there(self._layout.publish_lock)
        self.published_save = save.identity
        self._put_on_record(
            save.step,
            SaveOutcome(identity=save.identity, outcome="published", sequence=sequence),
        )
        return manifest

    def skip(self, step: int, identity: str) -> None:
        """Put on record that a save will never be published."""
        self._put_on_record(step, SaveOutcome(identity=identity, outcome="skipped"))

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
        identity = save.identity or ""
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
            log.error("%s cannot be written: %s", path, refused)
        self._put_on_record(save.step, SaveOutcome(identity=identity, outcome="quarantined"))
        return path

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
                log.error("%s cannot be written now: %s", self._layout.saves, error)
            self._unwritten = True
        else:
            self._unwritten = False

    def _check_room(self, save: Save) -> None:
        """Not to begin what cannot end. A quota that the filesystem hides is met on the way."""
        needed = _SMALL_FILES
        for name in save.weights:
            status = self._storage.status(self._layout.actor(save.step) / name)
            needed += status.st_size if status else 0
        free = self._storage.free(self._layout.epochs)
        if free.bytes is not None and free.bytes < needed:
            raise NoRoomError(
                f"step {save.step} needs {needed / 1e6:.1f} MB, and {free.bytes / 1e6:.1f} MB are "
                f"free in {self._layout.root}: make room there, or lower --keep"
            )
        if free.inodes is not None and free.inodes < _FEW_INODES:
            raise NoRoomError(
                f"only {free.inodes} more files can be made in {self._layout.root} (its filesystem "
                "is out of inodes): remove some"
            )

    def _read_own(self, model: type[R], path: Path, limit: int = RECORD_LIMIT) -> R | None:
        """A record that daemons alone write; a lost or damaged one is like none."""
        try:
            return parse(model, self._storage.read(path, limit), path)
        except ProtocolMismatchError:
            raise
        except RecordError as error:
            log.error("%s: going on as if it were lost", error)
            return None
        except OSError as error:
            if is_gone(error):
                return None
            raise

    def _published(self) -> list[int]:
        found = (parse_version_folder(n) for n in self._storage.names(self._layout.published))
        return [sequence for sequence in found if sequence is not None]

    def _finished(self, sequence: int) -> Manifest | None:
        """The manifest of a published version, if every file that it lists has its size."""
        folder = self._layout.version(sequence)
        try:
            manifest = read_manifest(self._storage, folder)
        except ProtocolMismatchError:
            raise
        except (OSError, RecordError) as error:
            if isinstance(error, OSError) and not is_gone(error):
                raise  # storage that does not answer says nothing about the version
            log.warning("%s has no manifest that can be read: %s", folder, error)
            return None
        for file in manifest.files:
            status = self._storage.status(folder / file.name)
            if status is None or status.st_size != file.size:
                log.warning("%s is not %d bytes", folder / file.name, file.size)
                return None
        return manifest if manifest.sequence == sequence else None

    def _highest_sequence(self) -> int:
        """The highest sequence that anything in the job has ever named: it never goes back."""
        named = [0, *self._published()]
        if self.latest is not None:
            named.append(self.latest.sequence)
        # With LATEST at hand, an empty one above it is of a version that was never published: its
        # number is still free.
        named.extend(
            parse_version_folder(name) or 0
            for name in self._storage.names(self._layout.leases)
            if self.latest is None or self._storage.names(self._layout.leases / name)
        )
        named.extend(
            self._told_sequence(self._layout.explorers / name, ExplorerReport)
            for name in self._storage.names(self._layout.explorers)
        )
        named.append(self._told_sequence(self._layout.daemon_report, DaemonReport))
        named.extend(outcome.sequence or 0 for outcome in self.outcomes.values())
        return max(named)

    def _told_sequence(self, path: Path, model: type[ExplorerReport | DaemonReport]) -> int:
        try:
            return parse(model, self._storage.read(path), path).sequence or 0
        except (OSError, RecordError) as error:
            log.debug("%s says no sequence: %s", path, error)
            return 0
