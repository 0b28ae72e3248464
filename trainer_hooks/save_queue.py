"""The saves of one rank that are under way, with their memory and their outcomes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from syncd.protocol.errors import SaveFailedError
from syncd.protocol.policy import SyncSettings
from syncd.protocol.records import SaveId
from trainer_hooks.background import LIMIT, SaveThread
from trainer_hooks.progress import Progress
from trainer_hooks.settings import SaveSettings, WriteConcurrency
from trainer_hooks.state.host_buffers import HostBuffers
from trainer_hooks.writing.contents import RankContents
from trainer_hooks.writing.writer import RankWriter

#: save_timeouts that anything waits for one save (for each rank where they write in turns): one to
#: write it, one for the other ranks.
_PATIENCE: Final = 2
#: Seconds: longer than any training; what locks take has a bound.
_FOREVER: Final = 1e9
#: Seconds for a save that is given up to be put away.
_LAST: Final = 30.0


def patience_of(settings: SyncSettings, saving: SaveSettings, world_size: int) -> float:
    """Seconds that anything waits for one save to come to its end."""
    in_turns = saving.write_concurrency is WriteConcurrency.ONE_AT_A_TIME
    turns = world_size if in_turns else 1  # each within the save_timeout
    return min(_PATIENCE * settings.save_timeout * turns, _FOREVER)


class SaveQueue:
    """At most two saves, each in memory of its own, written behind the training one by one.

    Promised: of a save that is not written this rank says so, that no other rank waits for it; and
    the memory of one that is over is there for the next.

    Args:
        patience: seconds that a save waits for those before it, and the end for each.
        progress: is told what failed.
        begin_save: called in the thread before the first byte.

    Attributes:
        thread: what is under way.
    """

    def __init__(
        self, *, patience: float, progress: Progress, begin_save: Callable[[int], None]
    ) -> None:
        self.thread = SaveThread()
        self._patience = patience
        self._progress = progress
        self._begin_save = begin_save
        # The one that was used last first: the second one is filled only when both are needed.
        self._buffers = deque(HostBuffers() for _ in range(LIMIT))

    def has_room(self) -> bool:
        """Wait until at most one save is under way; False where it is not in time."""
        return self.thread.wait(most=LIMIT - 1, timeout=self._patience)

    def buffers(self) -> HostBuffers:
        """What a save is copied to, where there is room for one."""
        return self._buffers.pop()

    def submit(
        self,
        writer: RankWriter,
        save_id: SaveId,
        contents: RankContents,
        buffers: HostBuffers | None = None,
    ) -> None:
        """Have a save written; what it was copied to is another one's when it is over."""

        def work() -> int:
            """In the thread: storage must not stop the training for longer than a copy."""
            try:
                try:
                    # What lies below a step that a resumed trainer is about to write again is not
                    # for the pruner.
                    writer.again(save_id, lambda: self._begin_save(save_id.step))
                except BaseException:
                    writer.say_failed(save_id)
                    raise
                return writer.save(save_id, contents)
            except BaseException:
                self._progress.failed(save_id)
                raise
            finally:
                contents.close()
                if buffers is not None:
                    self._buffers.append(buffers)

        self.thread.submit(save_id.step, work)

    def leave_out(
        self, writer: RankWriter, save_id: SaveId, buffers: HostBuffers | None = None
    ) -> None:
        """Tell the other ranks that this rank will not write its part of a save."""
        self._progress.failed(save_id)
        if buffers is not None:
            self._buffers.append(buffers)
        self.thread.submit(save_id.step, lambda: writer.say_failed(save_id))

    def refuse(self, what: str) -> None:
        """Keep it as an error that there was no room for something in time."""
        before = self.thread.under_way
        # By now those may be over, as ranks have gathered what is not saved.
        why = f"{_steps(before)} is still being written" if before else "two others were not over"
        self.thread.fail(SaveFailedError(f"{what} is not saved: after {self._patience:g} s {why}"))

    def wait(self) -> None:
        """Wait until nothing is under way.

        Raises:
            SaveFailedError: something is, after the patience for as many saves as may be.
        """
        timeout = LIMIT * self._patience
        if not self.thread.wait(most=0, timeout=timeout):
            steps = _steps(self.thread.under_way)
            raise SaveFailedError(f"{steps} is still being written after {timeout:g} s; it goes on")

    def raise_failure(self) -> None:
        """Raise the oldest error of a save that was not raised yet, if there is one."""
        error = self.thread.take_error()
        if error is not None:
            raise error

    def close(self, stop_waiting: Callable[[], None]) -> list[SaveFailedError]:
        """Wait for what is under way, and end.

        Args:
            stop_waiting: called when that takes too long: gives up what other ranks have not done.

        Returns:
            What failed, the oldest first.
        """
        left = self.thread.close(timeout=self._patience)
        if left:
            stop_waiting()
            self.thread.close(timeout=_LAST)
        errors: list[SaveFailedError] = []
        while (failed := self.thread.take_error()) is not None:
            errors.append(failed)
        if left:
            errors.append(
                SaveFailedError(
                    f"{_steps(left)} was still being written after {self._patience:g} s: that is "
                    "not waited for any longer; what was announced before stays"
                )
            )
        return errors


def _steps(steps: tuple[int, ...]) -> str:
    return "step " + " and ".join(map(str, steps))
