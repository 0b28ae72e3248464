"""Makes: new versions that a child process makes beside the loop, by a merge or by a fold."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from syncd.checkpoint.merging.options import Work
from syncd.checkpoint.save import WholeSave
from syncd.daemon.blocks import Obstacle
from syncd.daemon.decide import Fold
from syncd.daemon.maker import MakerProcess
from syncd.daemon.orders import MergeOrder, Order
from syncd.daemon.publish import take_notice_down
from syncd.daemon.tenure import Tenure
from syncd.deltas.needs import missing_extra
from syncd.protocol.errors import NoRoomError
from syncd.protocol.records import Manifest, PublishNotice, encode
from syncd.protocol.reports import MergeProgress
from syncd.storage.job import Job

#: The most seconds between two attempts at a fold that storage refuses.
_LONGEST_WAIT: Final = 30.0


@dataclass(frozen=True)
class MakeWork:
    """Makes versions, and gives the reason if this host cannot use deltas; tests replace both."""

    maker: Callable[[Job], MakerProcess] = MakerProcess
    missing_extra: Callable[[], str | None] = missing_extra


@dataclass
class Makes:
    """Makes one version, or prepares one save, at a time; folds take at most half of the time.

    Attributes:
        save: the save that is merged or prepared; None if none is.
        fold: the fold that has begun, if any.
        folder: what is made, in the daemon's room; None if nothing is.
        begun, took: when the last make was begun, and the seconds that the last fold took.
        whole_since: when the save was first seen in its present state.
        progress: of the make, if any.
        damaged: the number of the last delta to which a damaged one leads, if any.
        obstacle: of the last fold, if it failed.
    """

    tenure: Tenure
    work: MakeWork
    hang_time: float

    def __post_init__(self) -> None:
        self._clock, self._epoch = self.tenure.clock, self.tenure.epoch
        self.maker = self.work.maker(self.tenure.job)
        self._made: Manifest | None = None
        self._heard = self._again_at = self._wait = 0.0
        self.begun = self.took = self.whole_since = 0.0
        self._has_notice = False
        self.save: WholeSave | None = None
        self.fold: Fold | None = None
        self.folder: Path | None = None
        self.progress: MergeProgress | None = None
        self.damaged: int | None = None
        self.obstacle: Obstacle | None = None

    def is_of(self, save: WholeSave) -> bool:
        """True if this save is merged."""
        return self.save is not None and self.save.identity == save.identity

    def room(self, name: str) -> Path:
        """The folder in which what gets this name is made."""
        return self._epoch.building / name

    def begin(self, order: Order, step: int, work: Work) -> None:
        """Begin to make a version."""
        self.begun = self._heard = self._clock()
        self.folder = self._epoch.start_build(order.folder.name)
        self._epoch.in_background.add(order.folder.name)

        def progress(done: int, total: int) -> None:
            self._heard = self._clock()
            seconds = self._heard - self.begun
            self.progress = MergeProgress(step=step, done=done, total=total, seconds=seconds)
            work.progress(done, total)

        self._has_notice = isinstance(order, MergeOrder)
        if isinstance(order, MergeOrder):
            # Written and renamed without fsync: the file is only a hint.
            session = self.tenure.session.id
            notice = PublishNotice(sequence=order.sequence, step=step, session=session)
            path = self.tenure.job.layout.publish_lock
            self._epoch.replace_file(path, encode(notice), durable=False)
        self.progress = MergeProgress(step=step, done=0, total=0, seconds=0.0)
        self.maker.begin(order, work._replace(progress=progress))

    def poll(self) -> Manifest | None:
        """The manifest of the version in ``folder``, once it is made.

        Call :meth:`end` when it is published, or after an error.

        Raises:
            SupersededError: another daemon has taken over.
            OSError: storage failed, or the child process, or it makes no progress.
        """
        try:
            self._made = self._made or self.maker.poll()
        except OSError as error:
            self._epoch.raise_if_superseded(error)
            raise
        silent = self._clock() - self._heard
        if self._made is None and silent >= self.hang_time:
            why = f"the process that makes versions has made no progress for {silent:.0f} s"
            raise OSError(errno.ETIMEDOUT, why)
        return self._made

    def poll_fold(self, fold: Fold, order: Order, work: Work) -> Manifest | None:
        """Begin a fold, or go on; for the errors see :meth:`poll`.

        Raises:
            DeltaError, CheckpointError: a delta is damaged, or a whole save.
            NoRoomError: the fold can be tried again.
        """
        if self.folder is None:
            if self._clock() < self._again_at:
                return None
            free = self.tenure.job.storage.free(self._epoch.building).bytes
            self.begun = self._clock()
            if free is not None and free < fold.size:
                need = f"a fold needs {fold.size / 1e6:.1f} MB, {free / 1e6:.1f} are free"
                raise NoRoomError(need)
            self.fold = fold
            self.begin(order, fold.tip.step, work)
        return self.poll()

    def end(self, obstacle: Obstacle | None = None) -> None:
        """End the make, if any, and delete its files.

        After a fold of deltas the next one waits as long as this one took; if it met an
        ``obstacle``, longer each time.
        """
        now, folder, save, fold = self._clock(), self.folder, self.save, self.fold
        # First, because storage may refuse the rest, and what is half deleted is never published.
        self.folder = self.save = self.fold = self.progress = self._made = None
        if save is None:
            self.obstacle = obstacle
            self._wait = min(_LONGEST_WAIT, 2 * self._wait or 1.0) if obstacle else 0.0
            self._again_at = max(self._again_at, now + self._wait)
        if folder is not None:
            if fold is not None:
                self.took = now - self.begun
                waits = 0 if fold.tip.root else self.took
                self._again_at = max(self._again_at, now + waits)
            self.maker.stop()
            self._epoch.in_background.discard(folder.name)
            if self.tenure.job.storage.exists(folder):
                self.tenure.job.storage.remove_tree(folder)
        if self._has_notice and self._epoch.is_live():  # else it is the successor's
            self._has_notice = False
            take_notice_down(self.tenure.job)
