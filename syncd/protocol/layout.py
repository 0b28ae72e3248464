"""The paths of a job directory, as in ``docs/protocol.md``."""

from __future__ import annotations

import hashlib
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
class Below:
    """A path below the job directory."""

    name: str

    def __get__(self, layout: JobLayout, _: object) -> Path:
        return layout.root / self.name


@dataclass(frozen=True, slots=True)
class JobLayout:
    """The paths of the job directory ``root``."""

    root: Path

    @property
    def folders(self) -> tuple[Path, ...]:
        """The folders that each process makes; without the first four no daemon works."""
        work = (self.published, self.epochs, self.leases, self.sessions)
        return (*work, self.explorers, self.quarantine, self.requests, self.bench, self.drafts)

    def step(self, step: int) -> Path:
        """``global_step_N``: the folder of a step."""
        return self.root / step_folder(step)

    def actor(self, step: int) -> Path:
        """``global_step_N/actor``: the model's shards."""
        return self.step(step) / ACTOR

    state_pointer = Below(STATE_POINTER)
    """The pointer to the newest step whose weights are whole."""

    checkpoint_pointer = Below(CHECKPOINT_POINTER)
    """The pointer to the newest step that can be resumed from."""

    published = Below("published")
    """The folder of all versions."""

    def version(self, sequence: int) -> Path:
        """``published/v000017``: one immutable version."""
        return self.published / version_folder(sequence)

    deltas = Below("deltas")
    """The folder of all deltas; missing before the first one."""

    def delta(self, sequence: int) -> Path:
        """``deltas/d000017``: the immutable delta that has the number of its version to come."""
        return self.deltas / delta_folder(sequence)

    state = Below(".syncd")
    """``.syncd``: all files of syncd except versions and deltas."""

    format = Below(".syncd/format.json")
    """The protocol version and lease time of this job, written once."""

    latest = Below(".syncd/LATEST")
    """``LATEST``: the version that explorers should serve."""

    epochs = Below(".syncd/epoch")
    """The folder of the daemons' rooms."""

    daemon_lock = Below(".syncd/daemon.lock")
    """The lock that elects the working daemon."""

    publish_lock = Below(".syncd/publish.lock")
    """The hint that the daemon is making a new version."""

    daemon_report = Below(".syncd/daemon.json")
    """The daemon's report about itself."""

    saves = Below(".syncd/saves.json")
    """The outcomes of saves: published, skipped or quarantined."""

    audit = Below(".syncd/audit.jsonl")
    """One line for every deletion; older lines are in a second file (:func:`older_lines`)."""

    journal = Below(".syncd/journal.jsonl")
    """The history of saves and versions; older lines are in :func:`older_lines`."""

    leases = Below(".syncd/leases")
    """The lease folders of all versions."""

    def lease_folder(self, sequence: int) -> Path:
        """The folder with a version's leases; only the active daemon makes it."""
        return self.leases / version_folder(sequence)

    sessions = Below(".syncd/sessions")
    """The folder of the processes' heartbeats."""

    def session(self, session: str) -> Path:
        """The heartbeat of a session."""
        return self.sessions / f"{session}.lock"

    explorers = Below(".syncd/explorers")
    """The folder of the explorers' reports."""

    def explorer(self, name: str) -> Path:
        """An explorer's report about itself."""
        return self.explorers / f"{name}.json"

    trainer_report = Below(".syncd/trainer.json")
    """The trainer's report about itself."""

    claims = Below(".syncd/claims")
    """The folder of the claims of names."""

    def claim(self, role: str, name: str) -> Path:
        """The claim of an explorer's name, or of the job's trainer."""
        return self.claims / (f"explorer.{name}" if role == "explorer" else role)

    def load_turn(self, number: int) -> Path:
        """The claim of a turn to load, counted from 0."""
        return self.claims / f"load.{number}"

    def late_turn(self, session: str) -> Path:
        """What becomes of the claim of a session that has loaded for too long."""
        return self.claims / f"late.{session}"

    offer = Below(".syncd/broadcast/offer.json")
    """The trainer's offer of a broadcast, and its members."""

    rendezvous = Below(".syncd/broadcast/group.json")
    """The address at which the members of a decided offer meet."""

    def verdict(self, offer: str) -> Path:
        """The file that says if an offered broadcast takes place."""
        return self.offer.with_name(f"{offer}.verdict")

    def saved_state(self, role: str, name: str) -> Path:
        """The state from which the trainer or an explorer resumes."""
        meta = self.state / "meta"
        return meta / (f"explorer_meta.{name}.json" if role == "explorer" else "trainer_meta.json")

    drafts = Below(".syncd/drafts")
    """Temporary files for folders that others watch; a rename moves finished files there."""

    reserve = Below(".syncd/reserve")
    """Files that reserve disk space for a take-over on a full disk."""

    paused = Below(".syncd/paused.json")
    """The pause: while this file exists, nothing is published or pruned."""

    requests = Below(".syncd/requests")
    """The requests to the active daemon, and its answers."""

    def request(self, request: str) -> Path:
        """One request, which the daemon replaces by its answer."""
        return self.requests / f"{request}.json"

    bench = Below(".syncd/bench")
    """A folder for each session of an explorer that builds steps to evaluate them."""

    mirror = Below(".syncd/mirror")
    """What ``syncd mirror pull`` has fetched for the next save."""

    doctor = Below(".syncd/doctor")
    """The folder in which ``syncd doctor`` measures storage."""

    quarantine = Below(".syncd/quarantine")
    """The reasons why saves could not be published, one file for each save."""

    def quarantined(self, step: int, identity: str) -> Path:
        """The reason why this save could not be published."""
        name = hashlib.blake2s(identity.encode(), digest_size=6).hexdigest()
        return self.quarantine / f"step_{step}-{name}.json"


def older_lines(path: Path) -> Path:
    """The file with the older lines of a growing file, e.g. ``journal.older.jsonl``."""
    return path.with_name(f"{path.stem}.older{path.suffix}")
