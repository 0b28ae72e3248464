"""The queue of the saves that one rank still has to write."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
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

#: The longest wait for one save, in save_timeouts: one to write it, and one for the other ranks. If
#: the ranks write in turns, this is multiplied by the number of ranks.
_PATIENCE: Final = 2
#: Seconds: longer than any training, but within the limit of locks.
_FOREVER: Final = 1e9
#: Seconds to clean up after a save that is given up.
_LAST: Final = 30.0


def patience_of(settings: SyncSettings, saving: SaveSettings, world_size: int) -> float:
    """The longest wait for one save, in seconds."""
    in_turns = saving.write_concurrency is WriteConcurrency.ONE_AT_A_TIME
    turns = world_size if in_turns else 1  # each within the save_timeout
    return min(_PATIENCE * settings.save_timeout * turns, _FOREVER)


@dataclass
class SaveQueue:
    """Holds at most two saves, each in its own memory, and writes them in the background.

    If a save cannot be written, this rank reports the failure, so that no other rank waits for it.

    Args:
        patience: the longest wait for one save, in seconds.
        begin_save: called with the step, in the writing thread, before the first byte is written.
    """

    patience: float
    progress: Progress
    begin_save: Callable[[int], None]

    def __post_init__(self) -> None:
        self.thread = SaveThread()
        # The set used last comes first, so that the second set is filled only when both are needed.
        self._buffers = deque(HostBuffers() for _ in range(LIMIT))

    def has_room(self) -> bool:
        """Wait until at most one save is unfinished; return False if that takes too long."""
        return self.thread.wait(most=LIMIT - 1, timeout=self.patience)

    def buffers(self) -> HostBuffers:
        """Return free buffers for a copy; :meth:`has_room` must have returned True."""
        return self._buffers.pop()

    def submit(
        self,
        writer: RankWriter,
        save_id: SaveId,
        contents: RankContents,
        buffers: HostBuffers | None = None,
    ) -> None:
        """Queue a save. Its end frees the buffers."""

        def work() -> int:
            try:
                try:
                    # Otherwise the pruner could delete a step that a resumed trainer writes again.
                    writer.again(save_id, lambda: self.begin_save(save_id.step))
                except BaseException:
                    writer.say_failed(save_id)
                    raise
                return writer.save(save_id, contents)
            except BaseException:
                self.progress.failed.add(save_id)
                raise
            finally:
                contents.close()
                if buffers is not None:
                    self._buffers.append(buffers)

        self.thread.submit(save_id.step, work)

    def leave_out(
        self, writer: RankWriter, save_id: SaveId, buffers: HostBuffers | None = None
    ) -> None:
        """Tell the other ranks that this rank will not write its part."""
        self.progress.failed.add(save_id)
        if buffers is not None:
            self._buffers.append(buffers)
        self.thread.submit(save_id.step, lambda: writer.say_failed(save_id))

    def refuse(self, what: str) -> None:
        """Record that a save is skipped because two saves took too long."""
        before = self.thread.under_way
        # An earlier save may have ended by now, while the ranks gathered this one.
        why = _being_written(before) if before else "two saves were unfinished"
        self.thread.fail(
            SaveFailedError(f"{what} is not saved, because {why} after {self.patience:g} s")
        )

    def wait(self) -> None:
        """Wait until all saves have ended.

        Raises:
            SaveFailedError: a save has not ended after twice the patience.
        """
        timeout = LIMIT * self.patience
        if not self.thread.wait(most=0, timeout=timeout):
            now = _being_written(self.thread.under_way)
            raise SaveFailedError(f"{now} after {timeout:g} s; syncd goes on writing")

    def raise_failure(self) -> None:
        """Raise the oldest error that was not raised yet."""
        error = self.thread.take_error()
        if error is not None:
            raise error

    def close(self, stop_waiting: Callable[[], None]) -> list[SaveFailedError]:
        """Wait for unfinished saves, and end the thread; return the errors, oldest first.

        ``stop_waiting`` must end the waits for other ranks. It is called if the saves take too
        long.
        """
        left = self.thread.close(timeout=self.patience)
        if left:
            stop_waiting()
            self.thread.close(timeout=_LAST)
        errors: list[SaveFailedError] = []
        while (failed := self.thread.take_error()) is not None:
            errors.append(failed)
        if left:
            errors.append(
                SaveFailedError(
                    f"{_being_written(left)} after {self.patience:g} s, so syncd cancelled the "
                    "writing. Saves announced earlier are unaffected"
                )
            )
        return errors


def _being_written(steps: tuple[int, ...]) -> str:
    if len(steps) == 1:
        return f"step {steps[0]} is still being written"
    return f"steps {' and '.join(map(str, steps))} are still being written"
