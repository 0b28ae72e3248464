"""Scanning a job: makes an Observation from its files, at a cost that does not grow with time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from syncd.checkpoint.save import Save, Unfinished, is_saved_over
from syncd.checkpoint.step_save import look_into_step
from syncd.daemon.chains import Chain, DeltaSeen, chain_to, deltas_to_each, look_at_delta
from syncd.daemon.config import DaemonConfig
from syncd.daemon.observation import Known, LeaseSeen, Observation, Pointer, PointerState
from syncd.daemon.steering import QuietPaths, Steering
from syncd.daemon.steps import LOOK_AGAIN, Steps
from syncd.protocol.errors import RecordError
from syncd.protocol.names import (
    CHECKPOINT_POINTER,
    DCP_METADATA,
    STATE_POINTER,
    is_name,
    parse_lease_marker,
    parse_pointer,
    parse_step_folder,
    parse_version_folder,
)
from syncd.protocol.records import parse
from syncd.protocol.reports import TrainerReport
from syncd.storage.errnos import REFUSED_HERE, UNREADABLE, is_gone
from syncd.storage.fsio import Signature, signature
from syncd.storage.job import Job, delta_folders, has_marks, numbers_in, version_folders
from syncd.storage.judge import Clock, Judge, Liveness, Lookout

log = logging.getLogger(__name__)

_POINTER_LIMIT: Final = 4096
#: How many names in a folder without a pointer are checked, to find a job below it.
_MOST_BELOW: Final = 100


@dataclass
class Scanner:
    """Scans one job, and remembers results that need not be read again.

    Attributes:
        dead_benches: the names in ``bench/`` that are no live session.
    """

    job: Job
    pointer: str
    judge: Judge
    clock: Clock = time.monotonic

    def __post_init__(self) -> None:
        self._storage, self._layout = self.job.storage, self.job.layout
        self._pointer_file = self._layout.root / self.pointer
        self._longest_tick = self.judge.lease_time / 4
        self._lookout = Lookout(self.judge, self._layout, tick=self._longest_tick, clock=self.clock)
        self._save: Save | None = None
        self._save_since = 0.0
        self._looked: object = None  # pointer and save as they were at the last look
        self._settled: object = None  # the pointer when its save needed no more looks
        self._settled_at = 0.0
        self._dead_since: dict[str, float] = {}
        self._living: frozenset[str] = frozenset()
        self._benches: list[str] = []
        self.dead_benches: list[str] = []
        self._deltas_seen: dict[int, DeltaSeen] = {}  # a delta that can be read never changes
        self._steps = Steps(self.job, self.clock)
        self._quiet_paths = QuietPaths(clock=self.clock)
        self._steering = Steering(self.job)
        self._report_seen: Signature | None = None
        self._step_told: int | None = None
        self._below: str | None = None  # a hint about a job in a subfolder, once looked for

    def scan(self, known: Known, config: DaemonConfig) -> Observation:
        """Scan once; JobUnavailableError if the job's folder, or ``.syncd`` in it, is missing."""
        self.job.check_is_there()
        self._lookout.tick = min(config.tick, self._longest_tick)
        pointer, pointer_key = self._pointer(self._pointer_file)
        checkpoint, checkpoint_key = self._pointer(self._layout.checkpoint_pointer)
        deltas = self._deltas()
        refused = {it.identity for it in known.outcomes.values() if it.outcome == "quarantined"}
        usable = (it for it in deltas if not (it.is_whole and it.target in refused))
        deltas_to = deltas_to_each(known.latest, known.save_id, usable)
        self._look_at_pointed(pointer, pointer_key, known)
        benched = self._benched()
        save = self._save
        outcome = known.outcomes.get(save.step) if save else None
        ended = outcome.outcome if outcome and save and outcome.identity == save.known_as else ""
        versions = version_folders(self.job)
        lease_folders = numbers_in(self._storage, self._layout.leases, parse_version_folder)
        # A listing may be outdated, so look up the lease folder of each version that seems pruned.
        lease_folders += (
            sequence
            for sequence in sorted(set(versions).difference(lease_folders))
            if self._storage.exists(self._layout.lease_folder(sequence))
        )
        steps, unrecorded, vanished = self._steps.look(
            pointer, (pointer_key, checkpoint_key, known.published_save, config), known.outcomes
        )
        return Observation(
            **vars(known),
            pointer=pointer,
            checkpoint=checkpoint,
            instead=self._instead(known) if pointer.state is PointerState.MISSING else "",
            save=save,
            save_still_for=self.clock() - self._save_since,
            versions=tuple(versions),
            deltas=deltas,
            lease_folders=tuple(lease_folders),
            leases=tuple(self._leases(lease_folders, known.sessions)),
            living=self._living,
            steps=steps,
            unrecorded=unrecorded,
            vanished=vanished,
            benched=benched,
            announced_step=self._announced(look=bool(steps)),
            pause=self._steering.pause(),
            rollbacks=self._steering.rollbacks(),
            chain=self._chain(known, deltas_to, refused),
            deltas_to=deltas_to,
            outcome=ended,
        )

    @property
    def has_more(self) -> bool:
        """True if step folders remain for the next scan."""
        return self._steps.has_more

    def look_again(self) -> None:
        """Make the next scans look into all step folders again."""
        self._steps.look_again()

    def points_elsewhere(self, step: int) -> bool:
        """True if the pointer now names another step than ``step``; False in any doubt."""
        pointer, _ = self._pointer(self._pointer_file)
        return pointer.step is not None and pointer.step != step

    def is_needed(self, step: int) -> bool:
        """True if a pointer or a bench needs the step, or the trainer announced no higher step.

        This method asks the server, because the step's folder is already in the trash. It opens
        each file twice, because on some storage the first open may still find the old file.
        """
        for folder in (self._layout.root, self._layout.state):
            self._storage.refresh(folder)
        for _ in range(2):
            pointer, _ = self._pointer(self._pointer_file)
            checkpoint, _ = self._pointer(self._layout.checkpoint_pointer)
            announced = self._announced()
        if pointer.step is None:
            return True
        limit = pointer.step if announced is None else announced
        if step in {pointer.step, checkpoint.step} or step >= limit:
            return True
        return step in self._benched(refreshed=True)

    def _pointer(self, path: Path) -> tuple[Pointer, Signature | None]:
        try:
            content, key = self._storage.read_with_signature(path, _POINTER_LIMIT)
        except OSError as error:
            if is_gone(error):
                return Pointer(PointerState.MISSING), None
            return Pointer(PointerState.UNREADABLE, why=error.strerror or str(error)), None
        step = parse_pointer(content)
        if step is None:
            return Pointer(PointerState.TORN if content.strip() else PointerState.EMPTY), key
        if step < 0:
            return Pointer(PointerState.NEGATIVE), key
        return Pointer(PointerState.STEP, step), key

    def _instead(self, known: Known) -> str:
        (name,) = {STATE_POINTER, CHECKPOINT_POINTER} - {self.pointer}
        if self._storage.exists(self._layout.root / name):
            return f"{name} is there: give --pointer {name}"
        if known.latest:
            return ""
        if self._below is None:
            self._below = self._job_below()
        return self._below

    def _job_below(self) -> str:
        root, storage = self._layout.root, self._storage
        names = sorted(name for name in storage.names(root) if not name.startswith("."))
        for name in names[:_MOST_BELOW]:
            try:
                is_job = has_marks(Job.at(root / name, storage))
            except OSError as error:  # for example another user's folder, or a file
                log.debug("cannot check whether %s is a job: %s", root / name, error)
                continue
            if is_job:
                return f"{root / name} looks like a job: give its path, or --root {root}"
        return ""

    def _look_at_pointed(self, pointer: Pointer, key: Signature | None, known: Known) -> None:
        if pointer.step is None:
            self._save = self._settled = self._looked = None
            return
        if (
            self._settled == (key, known.published_save, known.tip)
            and self._save is not None
            and self.clock() - self._settled_at < LOOK_AGAIN
        ):
            return
        save = look_into_step(self._storage, self._layout.step(pointer.step), pointer.step)
        outcome = known.outcomes.get(save.step)
        if (
            outcome is not None
            and outcome.outcome == "published"
            and is_saved_over(save.identity or "", outcome.identity)
        ):
            actor = self._layout.actor(save.step)
            why = (
                f"a trainer is saving into {actor} again: the .distcp files changed, but "
                f"{DCP_METADATA}, the last file, did not. If the save is complete, run 'touch' on "
                f"{DCP_METADATA}"
            )
            save = Unfinished(save.step, why)
        seen, self._save = self._save, save
        if seen is None or (save.step, save.known_as) != (seen.step, seen.known_as):
            self._save_since = self.clock()
        settled = save.identity is not None and (
            save.identity in {known.published_save, known.tip and known.tip.save_id}
            or (
                outcome is not None
                and outcome.identity == save.identity
                and outcome.outcome == "quarantined"
            )
        )
        # Settled only if two looks agree, because on some storage a first open finds the previous
        # save, and a listing shows it even longer.
        before, self._looked = self._looked, (key, save.identity)
        settled = settled and before == self._looked
        self._settled = (key, known.published_save, known.tip) if settled else None
        self._settled_at = self.clock()

    def _deltas(self) -> tuple[DeltaSeen, ...]:
        before = self._deltas_seen
        numbers = sorted(before)
        with self._quiet_paths.ignoring(self._layout.deltas, UNREADABLE):
            numbers = delta_folders(self.job)
        deltas = tuple(before.get(n) or self._look_at_delta(n) for n in numbers)
        self._deltas_seen = {delta.sequence: delta for delta in deltas if delta.target}
        return deltas

    def _look_at_delta(self, number: int) -> DeltaSeen:
        with suppress(OSError):  # the next scan looks again
            return look_at_delta(self.job, number)
        return DeltaSeen(number, 0)

    def _chain(self, known: Known, reached: Iterable[str], refused: set[str]) -> Chain:
        def look(step: int) -> Save:
            return look_into_step(self._storage, self._layout.step(step), step)

        joined = {*reached, known.save_id or ""}
        return chain_to(self._save, joined, refused | {known.published_save or ""}, look)

    def _leases(
        self, sequences: Iterable[int], others: Mapping[str, Callable[[], str]]
    ) -> list[LeaseSeen]:
        held = [
            (sequence, marker, (parse_lease_marker(marker) or ("", ""))[1])
            for sequence in sequences
            for marker in self._markers(self._layout.lease_folder(sequence), UNREADABLE)
        ]
        sessions = {session for *_, session in held if session}
        self._lookout.called = others
        liveness = self._lookout.look(sessions.union(others, filter(is_name, self._benches)))
        living = frozenset(who for who, seen in liveness.items() if seen is Liveness.ALIVE)
        self._living = living
        self.dead_benches = [name for name in self._benches if name and name not in living]
        now = self.clock()
        dead = liveness.keys() - living
        self._dead_since = {name: self._dead_since.get(name, now) for name in dead}
        dead_for = {name: now - since for name, since in self._dead_since.items()}
        # A name of another format is kept as a lease: somebody put it there on purpose.
        return [
            LeaseSeen(sequence, marker, dead_for.get(session), session)
            for sequence, marker, session in held
        ]

    def _benched(self, *, refreshed: bool = False) -> frozenset[int]:
        """The steps that explorers build or evaluate."""

        def listed(folder: Path) -> list[str]:
            if refreshed and self._storage.may_change(folder):
                self._storage.refresh(folder)
            return self._markers(folder)

        bench = self._layout.bench
        self._benches = listed(bench)
        builds = (name for session in self._benches for name in listed(bench / session))
        steps = (parse_step_folder(name.partition("-")[0]) for name in builds)
        return frozenset(step for step in steps if step is not None)

    def _markers(self, folder: Path, errnos: Collection[int] = REFUSED_HERE) -> list[str]:
        """The names of leases or builds; an unreadable folder counts as one unnamed lease."""
        names = [""]
        with self._quiet_paths.ignoring(folder, errnos):
            names[:] = self._storage.names(folder)
        return names

    def _announced(self, *, look: bool = True) -> int | None:
        """The trainer's step; without ``look`` perhaps an outdated one."""
        path = self._layout.trainer_report
        status = self._storage.status(path)
        key = status and signature(status)
        if look or key != self._report_seen:
            self._report_seen, self._step_told = key, self._read_announced(path)
        return self._step_told

    def _read_announced(self, path: Path) -> int | None:
        try:
            return parse(TrainerReport, self._storage.read(path), path).step or 0
        except RecordError:
            return 0  # the report is unreadable: prune nothing
        except OSError as error:
            return None if is_gone(error) else 0
