"""Folds: full versions that a child process makes in the background, of LATEST's and deltas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from syncd.daemon.blocks import Obstacle
from syncd.daemon.decide import Fold
from syncd.daemon.tenure import Tenure
from syncd.deltas.fold_process import FoldChild, missing_extra
from syncd.protocol.errors import NoRoomError
from syncd.protocol.names import version_folder
from syncd.protocol.records import Latest, Manifest
from syncd.protocol.reports import MergeProgress
from syncd.storage.job import Job

#: The most seconds between two attempts that storage refuses.
_LONGEST_WAIT: Final = 30.0


@dataclass(frozen=True)
class FoldWork:
    """Begins a fold, and gives the reason if this host cannot; tests replace both."""

    fold: Callable[[Job, Latest, Sequence[int], Path], FoldChild] = FoldChild
    missing_extra: Callable[[], str | None] = missing_extra


@dataclass
class Folds:
    """Makes one fold at a time, at most half of the time.

    Attributes:
        folder: the new version, in the daemon's room; None if nothing is folded.
        begun: when the last fold was begun.
        damaged: the number of the last delta to which a damaged one leads, if any.
        obstacle: of the last fold, if it failed.
    """

    tenure: Tenure
    work: FoldWork

    def __post_init__(self) -> None:
        self._clock, self._epoch = self.tenure.clock, self.tenure.epoch
        self._child: FoldChild | None = None
        self._step = 0
        self._again_at = self._wait = 0.0
        self.begun = 0.0
        self.folder: Path | None = None
        self.damaged: int | None = None
        self.obstacle: Obstacle | None = None

    @property
    def progress(self) -> MergeProgress | None:
        """The progress of the fold, if any."""
        if (child := self._child) is None:
            return None
        seconds = self._clock() - self.begun
        return MergeProgress(step=self._step, done=child.done, total=child.total, seconds=seconds)

    def poll(self, latest: Latest, fold: Fold) -> Manifest | None:
        """Begin a fold; return the new version once it has ended.

        Call :meth:`end` when it is published, or after an error.

        Raises:
            DeltaError: a delta is damaged.
            NoRoomError, OSError: the fold can be tried again.
        """
        if self._child is None:
            if self._clock() < self._again_at:
                return None
            free = self.tenure.job.storage.free(self._epoch.building).bytes
            self.begun, self._step = self._clock(), fold.tip.step
            if free is not None and free < fold.size:
                need = f"a fold needs {fold.size / 1e6:.1f} MB, {free / 1e6:.1f} are free"
                raise NoRoomError(need)
            chain = [delta.sequence for delta in fold.chain]
            name = f"fold-{version_folder(chain[-1])}"
            self.folder = self._epoch.start_build(name)
            self._epoch.in_background.add(name)
            latest = latest.model_copy(update={"tip": fold.tip})
            self._child = self.work.fold(self.tenure.job, latest, chain, self.folder)
        return self._child.poll()

    def end(self, obstacle: Obstacle | None = None) -> None:
        """End the fold, if any, and delete its files.

        The next one waits as long as this one took; if it met an ``obstacle``, longer each time.
        """
        self.obstacle = obstacle
        now, child, self._child = self._clock(), self._child, None
        folder, self.folder = self.folder, None
        self._wait = min(_LONGEST_WAIT, 2 * self._wait or 1.0) if obstacle else 0.0
        self._again_at = max(self._again_at, now + self._wait)
        if child is not None:
            self._again_at = max(self._again_at, 2 * now - self.begun)
            child.close()
        if folder is not None:
            self._epoch.in_background.discard(folder.name)
            self.tenure.job.storage.remove_tree(folder)
