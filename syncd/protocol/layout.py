"""The paths of a job directory, as in ``docs/protocol.md``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from syncd.protocol.names import (
    ACTOR,
    CHECKPOINT_POINTER,
    STATE_POINTER,
    delta_folder,
    step_folder,
    version_folder,
)


@dataclass(frozen=True, slots=True)
class JobLayout:
    """The paths of the job directory ``root``."""

    root: Path

    def step(self, step: int) -> Path:
        """``global_step_N``: the folder of a step."""
        return self.root / step_folder(step)

    def actor(self, step: int) -> Path:
        """``global_step_N/actor``: the model's shards."""
        return self.step(step) / ACTOR

    @property
    def state_pointer(self) -> Path:
        """The pointer to the newest step whose weights are whole."""
        return self.root / STATE_POINTER

    @property
    def checkpoint_pointer(self) -> Path:
        """The pointer to the newest step that can be resumed from."""
        return self.root / CHECKPOINT_POINTER

    @property
    def published(self) -> Path:
        """The folder of all versions."""
        return self.root / "published"

    def version(self, sequence: int) -> Path:
        """``published/v000017``: one immutable version."""
        return self.published / version_folder(sequence)

    @property
    def deltas(self) -> Path:
        """The folder of all deltas; missing before the first delta."""
        return self.root / "deltas"

    def delta(self, sequence: int) -> Path:
        """``deltas/d000017``: the immutable delta to the version of this sequence."""
        return self.deltas / delta_folder(sequence)

    @property
    def state(self) -> Path:
        """``.syncd``: all files of syncd except versions and deltas."""
        return self.root / ".syncd"

    @property
    def format(self) -> Path:
        """The protocol version and lease time of this job, written once."""
        return self.state / "format.json"

    @property
    def latest(self) -> Path:
        """``LATEST``: the version that explorers should serve."""
        return self.state / "LATEST"

    @property
    def epochs(self) -> Path:
        """The folder of the daemons' rooms."""
        return self.state / "epoch"

    @property
    def daemon_lock(self) -> Path:
        """The lock that elects the working daemon."""
        return self.state / "daemon.lock"

    @property
    def publish_lock(self) -> Path:
        """The hint that the daemon is making a new version."""
        return self.state / "publish.lock"

    @property
    def delta_progress(self) -> Path:
        """The progress of the newest delta."""
        return self.state / "delta_progress.json"

    @property
    def daemon_report(self) -> Path:
        """The daemon's report about itself."""
        return self.state / "daemon.json"

    @property
    def saves(self) -> Path:
        """The outcomes of saves: published, skipped or quarantined."""
        return self.state / "saves.json"

    @property
    def audit(self) -> Path:
        """One line for every deletion; older lines are in a second file (:func:`older_lines`)."""
        return self.state / "audit.jsonl"

    @property
    def journal(self) -> Path:
        """The history of saves and versions; older lines are in :func:`older_lines`."""
        return self.state / "journal.jsonl"

    @property
    def leases(self) -> Path:
        """The lease folders of all versions."""
        return self.state / "leases"

    def lease_folder(self, sequence: int) -> Path:
        """The folder with a version's leases; only the active daemon makes it."""
        return self.leases / version_folder(sequence)

    @property
    def sessions(self) -> Path:
        """The folder of the processes' heartbeats."""
        return self.state / "sessions"

    def session(self, session: str) -> Path:
        """The heartbeat of a session."""
        return self.sessions / f"{session}.lock"

    @property
    def explorers(self) -> Path:
        """The folder of the explorers' reports."""
        return self.state / "explorers"

    def explorer(self, name: str) -> Path:
        """An explorer's report about itself."""
        return self.explorers / f"{name}.json"

    @property
    def trainer_report(self) -> Path:
        """The trainer's report about itself."""
        return self.state / "trainer.json"

    @property
    def claims(self) -> Path:
        """The folder of the claims of names."""
        return self.state / "claims"

    def claim(self, role: str, name: str) -> Path:
        """The claim of an explorer's name, or of the job's trainer."""
        return self.claims / (f"explorer.{name}" if role == "explorer" else role)

    @property
    def offer(self) -> Path:
        """The trainer's offer of a broadcast, and its members."""
        return self.state / "broadcast" / "offer.json"

    @property
    def rendezvous(self) -> Path:
        """The address at which the members of a decided offer meet."""
        return self.offer.with_name("group.json")

    def verdict(self, offer: str) -> Path:
        """The file that says if an offered broadcast takes place."""
        return self.offer.with_name(f"{offer}.verdict")

    def saved_state(self, role: str, name: str) -> Path:
        """The state from which the trainer or an explorer resumes."""
        meta = self.state / "meta"
        return meta / (f"explorer_meta.{name}.json" if role == "explorer" else "trainer_meta.json")

    @property
    def drafts(self) -> Path:
        """Temporary files for folders that others watch; a rename moves finished files there."""
        return self.state / "drafts"

    @property
    def reserve(self) -> Path:
        """Files that reserve disk space for a take-over on a full disk."""
        return self.state / "reserve"

    @property
    def paused(self) -> Path:
        """The pause: while this file exists, nothing is published or pruned."""
        return self.state / "paused.json"

    @property
    def requests(self) -> Path:
        """The requests to the active daemon, and its answers."""
        return self.state / "requests"

    def request(self, request: str) -> Path:
        """One request, which the daemon replaces by its answer."""
        return self.requests / f"{request}.json"

    @property
    def bench(self) -> Path:
        """A folder for each session of an explorer that builds steps to evaluate them."""
        return self.state / "bench"

    @property
    def doctor(self) -> Path:
        """The folder in which ``syncd doctor`` measures storage."""
        return self.state / "doctor"

    @property
    def quarantine(self) -> Path:
        """The reasons why saves could not be published, one file for each save."""
        return self.state / "quarantine"


def older_lines(path: Path) -> Path:
    """The file with the older lines of a growing file, e.g. ``journal.older.jsonl``."""
    return path.with_name(f"{path.stem}.older{path.suffix}")
