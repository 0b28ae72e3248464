"""What must hold all through a soak, looked at by readers that take no part in it."""

import os
import re
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from explorer_hooks.reader import Reader
from syncd.checkpoint.version import read_manifest, verify_version
from syncd.protocol.errors import (
    JobUnavailableError,
    RecordError,
    VerificationError,
    VersionGoneError,
)
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import parse_lease_marker, parse_version_folder
from syncd.storage.fsio import Storage
from tests.multiprocess.by_hand import numbers
from tests.multiprocess.soak_programs import ERA, MEGABYTES, Away, holding

_EVERY = 0.05
#: Of each version: what is leased, what dead explorers left, what is built, and steps beside it.
_MOST_VERSIONS = 60
#: Two of each explorer there, and what those left that were killed.
_MOST_COPIES = 10
#: What may be more at the end than at the beginning: MiB, and descriptors.
_MORE_MEMORY = 8.0
_MORE_DESCRIPTORS = 8


@dataclass
class Findings:
    """What was seen, by all threads.

    Attributes:
        violations: what must never be.
        numbers: sequence → the number that all weights of that version are.
        back: the sequences of rollbacks.
        told: the number of a save → its step.
        counts: what happened how often, to be printed.
        no_delta: why stages read full versions, and how often.
        most: bytes of the job, at most.
    """

    violations: list[str] = field(default_factory=list)
    numbers: dict[int, float] = field(default_factory=dict)
    back: set[int] = field(default_factory=set)
    told: dict[float, int] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    no_delta: Counter[str] = field(default_factory=Counter)
    most: int = 0
    _changing: threading.Lock = field(default_factory=threading.Lock)

    def violated(self, what: str) -> None:
        with self._changing:
            self.violations.append(f"{time.strftime('%X')} {what}")
        print(f"VIOLATION {self.violations[-1]}", flush=True)

    def count(self, what: str) -> None:
        with self._changing:
            self.counts[what] += 1

    def copied(
        self,
        full_bytes: int | None,
        delta_bytes: int | None,
        no_delta: str | None,
        not_staged: str | None,
    ) -> None:
        """A stage has a copy: by deltas, of a save, by a full read, or from another process."""
        if delta_bytes is not None:
            self.count("copies made from deltas")
        elif full_bytes and not (no_delta or not_staged):
            self.count("copies made from whole saves")
        elif full_bytes or not_staged:
            self.count("full reads")
            with self._changing:
                why = no_delta or not_staged or ""
                self.no_delta[re.sub(r"/\S*|\d+(\.\d+)?", "…", why)] += 1
        else:
            self.count("copies of another process used")

    def version_is(
        self,
        sequence: int,
        step: int,
        number: float,
        *,
        is_back: bool,
        is_tip: bool,
        read: dict[str, Any] | None = None,
    ) -> None:
        """A version was read whole: it is the save that it says, and newer than those before it."""
        self.count("leases taken")
        if is_tip:
            self.count("served before their full version")
        if read is not None:
            self.copied(**read)
        with self._changing:
            known = self.numbers.setdefault(sequence, number)
            if is_back:
                self.back.add(sequence)
            older = [
                s
                for s, n in self.numbers.items()
                if s < sequence and n >= number and not {s, sequence} & self.back
            ]
        if known != number:
            self.violated(f"version {sequence} was {known}, and is {number}")
        if self.told.get(number) != step:
            self.violated(f"version {sequence} of step {step} is {number}: {self.told.get(number)}")
        if older:
            self.violated(f"version {sequence} is of a save before those of {sorted(older)}")


class Watch:
    """Threads that look, from the first moment to the last.

    Args:
        truth: the job, where it never goes away.
        paths: where explorers have it, each with what says when it is away there.
        stages: where they make copies.
        findings: where they write down what they see.
    """

    def __init__(
        self, truth: Path, paths: dict[Path, Away], stages: Sequence[Path], findings: Findings
    ) -> None:
        self._layout = JobLayout(truth)
        self._stages = stages
        self._found = findings
        self._stopping = threading.Event()
        works = [self._latest, self._leases, self._room]
        works += [
            lambda path=path, away=away, number=number: self._read(path, f"watch-{number}", away)
            for number, (path, away) in enumerate(paths.items())
        ]  # type: ignore[misc] # a default binds what the loop is at
        self._threads = [threading.Thread(target=self._guarded, args=[work]) for work in works]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - who does not look any more sees no violation
            self._found.violated(f"a watcher ended: {error!r}")

    def _latest(self) -> None:
        """LATEST only grows, and what it names is whole."""
        last, storage = 0, Storage(self._layout.root)
        with Reader(self._layout.root, "latest") as reader:
            while not self._stopping.wait(_EVERY):
                latest = reader.latest()
                if latest is None:
                    if last:
                        self._found.violated(f"LATEST cannot be read, after version {last}")
                    continue
                if latest.sequence < last:
                    self._found.violated(f"LATEST went from {last} back to {latest.sequence}")
                if latest.sequence == last:
                    continue
                last = latest.sequence
                folder = self._layout.version(last)
                try:
                    verify_version(storage, folder, read_manifest(storage, folder), threads=1)
                except (VerificationError, RecordError, OSError) as error:
                    newer = reader.latest()
                    if newer is not None and newer.sequence == last:
                        self._found.violated(f"LATEST names version {last}: {error}")

    def _leases(self) -> None:
        """What is leased is there."""
        layout = self._layout
        while not self._stopping.wait(_EVERY):
            for name in os.listdir(layout.leases):
                sequence = parse_version_folder(name)
                folder = layout.leases / name
                try:
                    markers = [
                        marker for marker in os.listdir(folder) if parse_lease_marker(marker)
                    ]
                except FileNotFoundError:
                    continue  # retired
                if sequence is None or layout.version(sequence).exists():
                    continue
                kept = [marker for marker in markers if (folder / marker).exists()]
                if kept:
                    self._found.violated(f"version {sequence} is gone, and {kept} have leased it")

    def _room(self) -> None:
        """The job's disk is bounded, and those of the stages."""
        limits = dict.fromkeys(self._stages, _MOST_COPIES * MEGABYTES * 1e6)
        limits[self._layout.root] = _MOST_VERSIONS * MEGABYTES * 1e6
        over: set[Path] = set()
        while not self._stopping.wait(10 * _EVERY):
            for path, limit in limits.items():
                used = used_by(path)
                if path == self._layout.root:
                    self._found.most = max(self._found.most, used)
                if used <= limit:
                    over.discard(path)
                elif path not in over:
                    over.add(path)
                    self._found.violated(f"{path} has {used / 1e6:.0f} MB")

    def _read(self, path: Path, name: str, away: Away) -> None:
        """Each version that LATEST names can be leased, and is whole, one save, and the newest."""
        reader: Reader | None = None
        last = 0
        try:
            while not self._stopping.wait(_EVERY):
                before = away.count()
                try:
                    reader = reader or Reader(path, name)
                    latest = reader.latest()
                    if latest is None or latest.sequence <= last:
                        continue
                    version = reader.lease(latest)
                    try:
                        version.verify()
                        found = numbers(version.folder, ERA)
                        last = version.sequence
                        self._found.version_is(**holding(version.manifest, found, path))
                    finally:
                        version.release()
                except (VersionGoneError, JobUnavailableError, OSError):
                    continue  # a newer one is there; or the job is away, or full
                except (VerificationError, AssertionError) as error:
                    if not away.excuses(before):
                        self._found.violated(f"{name}: {error}")
        finally:
            if reader is not None:
                reader.close()


def used_by(folder: Path) -> int:
    """Bytes of all files below a folder, as the disk counts them."""
    used = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                used += os.lstat(os.path.join(path, name)).st_blocks * 512
            except FileNotFoundError:
                pass
    return used


class Vitals:
    """Memory and descriptors of processes that live through all of it.

    Args:
        pids: name → process.
        seconds: how long the soak is.
    """

    def __init__(self, pids: dict[str, int], seconds: float) -> None:
        self._pids = pids
        self._begun = time.monotonic()
        self._seconds = seconds
        self._seen: dict[str, list[tuple[float, float, int]]] = {name: [] for name in pids}

    def look(self) -> None:
        part = (time.monotonic() - self._begun) / self._seconds
        for name, pid in self._pids.items():
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            memory = pages * os.sysconf("SC_PAGESIZE") / 2**20
            self._seen[name].append((part, memory, len(os.listdir(f"/proc/{pid}/fd"))))

    def tell(self, findings: Findings) -> None:
        """Print each at the end of the first third, and at the end, and say what has grown."""
        for name, seen in self._seen.items():
            early = [x for x in seen if x[0] < 1 / 3] or seen[:1]
            late = [x for x in seen if x[0] > 5 / 6] or seen[-1:]
            memory = [statistics.median(x[1] for x in part) for part in (early, late)]
            # At rest: what is open for a moment is no leak.
            opened = [min(x[2] for x in part) for part in (early, late)]
            print(
                f"{name}: memory {memory[0]:.1f} -> {memory[1]:.1f} MiB, "
                f"descriptors {opened[0]} -> {opened[1]}"
            )
            if memory[1] - memory[0] > _MORE_MEMORY or opened[1] - opened[0] > _MORE_DESCRIPTORS:
                findings.violated(f"{name} grows")
