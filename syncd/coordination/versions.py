"""The published versions as one participant sees and holds them."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from syncd.checkpoint.tensor_rules import DTYPES
from syncd.coordination.leased_version import LeasedVersion, lease_version, read_latest
from syncd.protocol.errors import (
    EngineMismatchError,
    SaveNotReadyError,
    VersionGoneError,
)
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import FULL_STATE_DICT, RECEIPTS, parse_pointer, receipt_name, shard_name
from syncd.protocol.policy import Pull, Version, pull_decision
from syncd.protocol.records import Receipt, SaveOutcome, Saves, encode
from syncd.protocol.reports import TrainerReport
from syncd.storage.errnos import is_gone
from syncd.storage.fsio import LONG_RECORD_LIMIT, Storage
from syncd.storage.job import open_job
from syncd.storage.reading import read_if_there
from syncd.storage.sessions import Session
from syncd.storage.steps import make_step_folder, point

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

#: How often a version that is retired at that very moment is passed over for the newer one.
_ATTEMPTS: Final = 10
#: safetensors' name of a dtype → torch's.
_TORCH_NAMES: Final = {name: f"torch.{torch_name}" for torch_name, (name, _) in DTYPES.items()}


class _Hold:
    """One of those who hold a version together."""

    def __init__(self, let_go: Callable[[_Hold], None], sequence: int) -> None:
        self._let_go = let_go
        self.sequence = sequence

    def release(self) -> None:
        """Let it go. Safe to call twice."""
        self._let_go(self)


class Versions:
    """What is published in a job, or in the memory folder beside it.

    Args:
        storage: of the folder that versions are published in.
        layout: that folder's.
        name: who leases.
        session: the heartbeat that holds the leases; one of its own where None.
    """

    def __init__(
        self, storage: Storage, layout: JobLayout, name: str, session: Session | None
    ) -> None:
        self._storage = storage
        self.layout = layout
        self._name = name
        self._own: Session | None = None
        if session is None:
            self._own = session = Session(layout, open_job(storage, layout).lease_time)
        self._session = session
        self._pid = os.getpid()
        self._lock = threading.Lock()
        #: Sequence → what is leased, and who holds it.
        self._held: dict[int, tuple[LeasedVersion, set[_Hold]]] = {}

    def newest(self, known: Version | None = None, *, sure: bool = False) -> Version | None:
        """The version that LATEST names, if it is newer than ``known``; else ``known``.

        Args:
            known: what the caller knows of; nothing older is returned.
            sure: let the server answer, and not this client's cache.
        """
        if sure:
            self._storage.refresh(self.layout.state)
        latest = read_latest(self._storage, self.layout)
        found = Version(latest.sequence, latest.step) if latest is not None else None
        return known if pull_decision(known, found) is Pull.NOTHING_NEW else found

    @contextmanager
    def held(self, wanted: Version | None = None) -> Iterator[LeasedVersion | None]:
        """Hold a version, the newest by default; None where there is none.

        Raises:
            VersionGoneError: the wanted one was retired; or they come and go faster than they can
                be held.
            VerificationError: its manifest is damaged.
        """
        version = self._hold_newest() if wanted is None else self.hold(wanted.sequence)
        try:
            yield version
        finally:
            if version is not None:
                version.release()

    def _hold_newest(self) -> LeasedVersion | None:
        for left in reversed(range(_ATTEMPTS)):
            # What is retired was named by what this client remembers of LATEST.
            newest = self.newest(sure=left < _ATTEMPTS - 1)
            if newest is None:
                return None
            try:
                return self.hold(newest.sequence)
            except VersionGoneError as error:
                if not left:
                    raise
                log.info("%s; looking again", error)
        return None

    def hold(self, sequence: int) -> LeasedVersion:
        """Hold a version: one lease of it, however many of this participant hold it.

        Raises:
            VersionGoneError: it was retired.
            VerificationError: its manifest is damaged.
        """
        with self._lock:
            version, holds = self._held.get(sequence) or (self._lease(sequence), set())
            hold = _Hold(self._let_go, sequence)
            self._held[sequence] = version, holds | {hold}
            return version.with_hold(hold)

    def _lease(self, sequence: int) -> LeasedVersion:
        return lease_version(self._storage, self.layout, sequence, self._name, self._session.id)

    def _let_go(self, hold: _Hold) -> None:
        """End one hold; the last one ends the lease, and stays where storage refuses that."""
        if os.getpid() != self._pid:
            return  # a fork, that an iterator ends in, say: the lease is that of its parent
        with self._lock:
            version, holds = self._held.get(hold.sequence, (None, set()))
            if version is None or hold not in holds:
                return
            if holds == {hold}:
                version.release()
                del self._held[hold.sequence]
            else:
                holds.discard(hold)

    def stream(self, wanted: Version | None = None) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a version, one at a time; none where there is no version.

        Raises:
            VersionGoneError: the wanted one was retired.
            EngineMismatchError: the version has no weights here.
            VerificationError: its bytes are not what its manifest says.
        """
        # Torch is imported by those alone who want tensors.
        from syncd.coordination.tensors import stream  # noqa: PLC0415

        with self.held(wanted) as version:
            if version is None:
                return
            if not version.manifest.tensors:
                raise EngineMismatchError(
                    f"version {version.sequence} (step {version.step}) is {version.kind}: its "
                    "weights are not in its folder"
                )
            yield from stream(version)

    def metadata(self, wanted: Version | None = None) -> list[tuple[str, str, tuple[int, ...]]]:
        """Name, torch's name of the dtype, and shape of each tensor of a version.

        Raises:
            VersionGoneError: the wanted one was retired.
        """
        with self.held(wanted) as version:
            if version is None:
                return []
            return [
                (entry.name, _TORCH_NAMES.get(entry.dtype, entry.dtype), entry.shape)
                for entry in version.manifest.tensors
            ]

    def path(self, *, use_huggingface: bool) -> Path | str | None:
        """Where the newest version is: its folder, or that of the trainer's save, if it is there.

        Neither is held: it may be pruned once there are newer ones. Of kind ``remote`` it is the
        remote path.
        """
        newest = read_latest(self._storage, self.layout)
        if newest is None:
            return None
        if newest.kind == "remote":
            with self.held() as version:
                return version.remote_path if version else None
        if use_huggingface:
            return self.layout.version(newest.sequence)
        actor = self.layout.actor(newest.step)
        return actor if self._storage.exists(actor) else None

    def outcome(self, step: int) -> SaveOutcome | None:
        """What became of the last save of a step, as far as the daemon has said."""
        saves = read_if_there(self._storage, Saves, self.layout.saves, LONG_RECORD_LIMIT)
        return saves.steps.get(step) if saves is not None else None

    def is_refused(self, step: int) -> bool:
        """Whether the daemon has refused a step's save, and it has not been saved again since."""
        outcome = self.outcome(step)
        if outcome is None or outcome.outcome != "quarantined":
            return False
        path = self.layout.actor(step) / RECEIPTS / receipt_name(0)
        receipt = read_if_there(self._storage, Receipt, path)
        return receipt is None or receipt.save_id == outcome.identity

    def check_shards(self, step: int, world_size: int) -> None:
        """See that a step has all its shards, or is one full state dict.

        Raises:
            SaveNotReadyError: one is missing; says which.
        """
        actor = self.layout.actor(step)
        names = set(self._storage.names(actor))
        if FULL_STATE_DICT in names:
            return
        for rank in range(world_size):
            if shard_name(world_size, rank) not in names:
                raise SaveNotReadyError(
                    f"{actor / shard_name(world_size, rank)} is not there (yet)"
                )

    def pointed(self) -> int | None:
        """The step that the pointer names; None where it names none."""
        try:
            return parse_pointer(self._storage.read(self.layout.state_pointer))
        except OSError as error:
            if is_gone(error):
                return None
            raise

    def point(self, step: int) -> None:
        """Let the pointer name a step."""
        point(self._storage, self.layout, self.layout.state_pointer, step)

    def write_step(self, step: int, name: str, content: bytes) -> None:
        """Write a file into a step's folder, which is made where it is not there."""
        make_step_folder(self._storage, self.layout, step)
        self._storage.replace(self.layout.step(step) / name, content)

    def announce(self, report: TrainerReport) -> None:
        """Let the daemon of a memory folder know too which step is about to be written."""
        if self._own is not None:
            here = report.model_copy(update={"session": self._own.id})
            path, room = self.layout.trainer_report, self.layout.drafts
            self._storage.replace(path, encode(here), room=room)

    def close(self) -> None:
        """End the session, where it is our own."""
        if self._own is not None:
            self._own.close()
