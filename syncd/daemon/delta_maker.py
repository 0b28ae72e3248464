"""Deltas, which are made in the background after LATEST names the new version.

A delta never delays its version. If the work on a delta fails, explorers read the version's own
files. ``docs/protocol.md`` ("Deltas") has the order of the writes.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, Protocol

from syncd.checkpoint.merging.options import Progress, Work
from syncd.checkpoint.version import read_manifest
from syncd.daemon.tenure import Tenure
from syncd.deltas.ends import NoDeltaError
from syncd.deltas.making import DeltaChild, FoldChild, why_not_here
from syncd.deltas.whole_version import WholeVersion
from syncd.protocol.errors import SyncdError
from syncd.protocol.names import delta_folder, version_folder
from syncd.protocol.records import Delta, Latest, Manifest, encode
from syncd.protocol.reports import DELTA_SIGN, DeltaProgress
from syncd.protocol.version_events import DeltaFault, DeltaMade, DeltaOvertaken, NoDelta
from syncd.storage.epoch import ALL_DELTAS
from syncd.storage.job import Job

log = logging.getLogger(__name__)

Mode = Literal["auto", "on", "off"]
#: For fewer hosts, a delta saves no more reads than the daemon needs to make it.
_FEWEST: Final = 2
#: Seconds without progress after which the work ends; readers no longer wait for it either.
_SILENCE: Final = 10 * DELTA_SIGN
#: Seconds to wait at the end for a thread whose storage does not answer.
_PATIENCE: Final = 5.0


class MakeDelta(Protocol):
    """Writes a delta durably into an empty folder; ``delta.json`` is the last file.

    ``cancel`` is called often, and raises an error to stop the work. ``progress`` is called with
    the bytes compared so far, and the total bytes.

    Raises:
        NoDeltaError: the two versions can have no delta, or the delta would save too few bytes.
        OSError, SyncdError: the work failed.
    """

    def __call__(
        self,
        job: Job,
        base: Manifest,
        target: Manifest,
        folder: Path,
        *,
        cancel: Callable[[], None],
        progress: Progress,
    ) -> Delta:
        """Make a delta."""
        ...


def by_a_child(
    job: Job,
    base: Manifest,
    target: Manifest,
    folder: Path,
    *,
    cancel: Callable[[], None],
    progress: Progress,
) -> Delta:
    """Make a delta in a child process."""
    ends = (WholeVersion(job.layout.version(one.sequence), one) for one in (base, target))
    with DeltaChild(job.storage, *ends) as child:
        return child.write(folder, Work(cancel, progress))


class InBackground(Protocol):
    """Work in the background."""

    def is_alive(self) -> bool:
        """True until the work has ended."""
        ...

    def join(self, timeout: float | None = None) -> None:
        """Wait until the work has ended, at most ``timeout`` seconds."""
        ...


def on_a_thread(work: Callable[[], None]) -> InBackground:
    """Start work on a thread."""
    thread = threading.Thread(target=work, name=threading.current_thread().name, daemon=True)
    thread.start()
    return thread


class Folding(Protocol):
    """A fold in the background, such as :class:`~syncd.deltas.making.FoldChild`."""

    done: int
    total: int

    def poll(self) -> Manifest | None:
        """The new version, once it is there."""
        ...

    def close(self) -> None:
        """End the work."""
        ...


@dataclass(frozen=True)
class DeltaWork:
    """The functions that make deltas; tests replace them.

    ``start`` runs work in the background. ``why_not_here`` returns the reason if this host cannot
    make deltas.
    """

    make: MakeDelta = by_a_child
    start: Callable[[Callable[[], None]], InBackground] = on_a_thread
    why_not_here: Callable[[], str | None] = why_not_here
    fold: Callable[[Job, int, Sequence[int], Path], Folding] = FoldChild


@dataclass(slots=True)
class _Making:
    """A delta being made; the loop's thread sets ``ended``, the working thread sets ``outcome``."""

    base: int
    target: Manifest
    begun: float
    ended: threading.Event = field(default_factory=threading.Event)
    told_at: float = float("-inf")
    outcome: DeltaMade | NoDelta | None = None
    background: InBackground | None = None


@dataclass
class DeltaMaker:
    """Makes the delta to each new version from the previous version; one delta at a time.

    A version that is published meanwhile gets none. Only the loop's thread may call the methods.
    Only :meth:`leave` waits for the work. :meth:`finished` returns errors of the work.

    Attributes:
        takers: the hosts with a live explorer that could use a delta.
    """

    tenure: Tenure
    work: DeltaWork

    def __post_init__(self) -> None:
        self._job, self._epoch = self.tenure.job, self.tenure.epoch
        self._clock, self._wall = self.tenure.clock, self.tenure.wall
        self.mode: Mode = "off"
        self.takers: Collection[str] = ()
        self._announced: _Making | None = None
        self._making: _Making | None = None
        #: Seconds of the last deltas. Readers decide by the longest whether to wait for the next.
        self._seconds: deque[float] = deque(maxlen=3)
        self._outcomes: list[DeltaMade | NoDelta] = []

    @property
    def versions(self) -> set[int]:
        """The base and the target of the current delta; they must not be pruned."""
        return {self._making.base, self._making.target.sequence} if self._making else set()

    def forget_others(self) -> None:
        """Remove an earlier daemon's progress record."""
        try:
            self._job.storage.unlink_if_there(self._job.layout.delta_progress)
        except OSError as error:  # only a hint: nobody waits for a file that no longer changes
            log.debug("cannot remove %s: %s", self._job.layout.delta_progress, error)

    def announce(self, base: Latest | None, target: Manifest) -> int | None:
        """Decide if a delta will be made; call this right before LATEST names ``target``.

        ``base`` is LATEST as it was when the merge began. Returns the base's sequence, which
        becomes LATEST's ``delta_from``, or None for no delta.
        """
        self._announced = None
        if self.mode == "off" or (self.mode == "auto" and len(self.takers) < _FEWEST):
            return None
        if base is None or {base.kind, target.kind} != {"full"}:
            return None
        return base.sequence if self._plan(base.sequence, target) else None

    def _plan(self, base: int, target: Manifest) -> bool:
        making = _Making(base, target, self._clock())
        why = self._why_not_now(target)
        if not why:
            try:
                self._tell(making, "making", total=_total(target))
            except (OSError, SyncdError) as error:
                why = str(error) or type(error).__name__
        if why:
            kind = NoDelta if self._making is None else DeltaOvertaken
            self._outcomes.append(kind(target.sequence, base, why))
            return False
        self._announced = making
        return True

    def begin(self) -> None:
        """Begin the work on the announced delta; LATEST must already name the target version."""
        making, self._announced = self._announced, None
        if making is None:
            return
        self._making = making
        names = {ALL_DELTAS, delta_folder(making.target.sequence)}
        self._epoch.in_background |= names
        try:
            making.background = self.work.start(lambda: self._run(making))
        except RuntimeError as error:  # no more threads
            making.outcome = NoDelta(making.target.sequence, making.base, f"{error}", error)
            self._epoch.in_background -= names

    def finished(self) -> list[DeltaMade | NoDelta]:
        """The outcomes since the previous call; also ends work that shows no progress."""
        if self._making is not None and self._clock() - self._making.told_at > _SILENCE:
            self._making.ended.set()
        self._collect()
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def leave(self) -> None:
        """Cancel the work, and wait at most 5 s for its end."""
        if self._making is not None and self._making.background is not None:
            self._making.ended.set()
            self._making.background.join(_PATIENCE)

    def _collect(self) -> None:
        making = self._making
        if making is None or making.outcome is None:
            return
        if making.background is not None and making.background.is_alive():
            return  # the thread ends soon
        self._outcomes.append(making.outcome)
        self._making = None
        if isinstance(making.outcome, DeltaMade):
            self._seconds.append(making.outcome.seconds)

    def _why_not_now(self, target: Manifest) -> str:
        if target.digests == "off":
            return "versions have no digests (digests = false), which deltas need"
        if why := self.work.why_not_here():
            return why
        self._collect()
        if self._making is not None:
            return f"the work on {delta_folder(self._making.target.sequence)} has not ended yet"
        return ""

    def _run(self, making: _Making) -> None:
        version, why = making.target.sequence, ""
        name = delta_folder(version)
        outcome: DeltaMade | NoDelta
        try:
            outcome = self._made(making, name)
        except (NoDeltaError, OSError, SyncdError, MemoryError) as error:
            why = str(error) or type(error).__name__
            outcome = NoDelta(version, making.base, why, error)
        except Exception as error:  # noqa: BLE001 - a bug in syncd is logged with its traceback
            why = f"a bug in syncd: {type(error).__name__}: {error}"
            DeltaFault(version, why).tell(log)
            outcome = NoDelta(version, making.base, why, error)
        try:
            self._tell(making, "none" if why else "made", why=why)
        except (OSError, SyncdError) as error:
            log.debug("cannot write %s: %s", self._job.layout.delta_progress, error)
        self._epoch.in_background -= {ALL_DELTAS, name}
        making.outcome = outcome

    def _made(self, making: _Making, name: str) -> DeltaMade:
        job, target = self._job, making.target
        folder = self._epoch.start_build(name)  # mkdir building/d000017
        try:
            base = self._base(making.base)

            def cancel() -> None:
                if making.ended.is_set():
                    raise NoDeltaError("the daemon stops, or the work made no progress")

            def progress(done: int, total: int) -> None:
                if self._clock() - making.told_at >= DELTA_SIGN:
                    self._tell(making, "making", done=done, total=total)

            # Write the blocks, and then delta.json. Fsync each file, and then the folder.
            delta = self.work.make(job, base, target, folder, cancel=cancel, progress=progress)
            job.storage.sync_folder(folder)
            cancel()
            # Rename building/d000017 to deltas/d000017. Fsync deltas/.
            self._epoch.commit_delta(name)
        finally:
            if job.storage.exists(folder):
                job.storage.remove_tree(folder)
        return DeltaMade(
            version=target.sequence,
            base=making.base,
            bytes=delta.bytes,
            changed=delta.changed / delta.elements if delta.elements else 0.0,
            seconds=round(self._clock() - making.begun, 3),
        )

    def _base(self, sequence: int) -> Manifest:
        try:
            return read_manifest(self._job.storage, self._job.layout.version(sequence))
        except FileNotFoundError as error:
            raise NoDeltaError(f"{version_folder(sequence)} is gone") from error

    def _tell(
        self,
        making: _Making,
        state: Literal["making", "made", "none"],
        *,
        done: int = 0,
        total: int = 0,
        why: str = "",
    ) -> None:
        making.told_at = self._clock()
        progress = DeltaProgress(
            sequence=making.target.sequence,
            base=making.base,
            state=state,
            done=done,
            total=total,
            seconds=max(self._seconds, default=None),
            why=why or None,
            time=self._wall(),
        )
        path = self._job.layout.delta_progress
        self._epoch.replace_file(path, encode(progress), durable=False)


def _total(manifest: Manifest) -> int:
    return sum(file.size for file in manifest.files)
