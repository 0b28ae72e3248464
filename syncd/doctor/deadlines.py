"""The longest waits of a run, and calls that end although storage hangs."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import NamedTuple, TypeVar, cast

from syncd.doctor.finding import fail

T = TypeVar("T")


class Deadlines(NamedTuple):
    """The longest waits, in seconds.

    Attributes:
        look: until another process's change is visible.
        answer: for another process's answer, in addition to the call's own time.
        meeting: for the other host.
    """

    look: float = 30.0
    answer: float = 60.0
    meeting: float = 120.0

    @property
    def probe(self) -> float:
        """The seconds for one probe: a look and an answer in each direction."""
        return 2 * (self.look + self.answer)


class HungError(Exception):
    """Raised when storage does not answer: further probes are useless."""

    def __init__(self, probe: str, seconds: float) -> None:
        super().__init__(f"storage did not answer within {seconds:.0f} s")
        self.finding = fail(
            probe,
            f"{self}, so the remaining probes were skipped",
            "check whether the server can be reached; a hard mount waits for the server forever",
        )


def bounded(probe: str, seconds: float, work: Callable[[], T]) -> T:
    """Call ``work`` in a thread, and raise HungError if it does not end in time."""
    done: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def do() -> None:
        try:
            done.put((work(), None))
        except BaseException as error:  # noqa: BLE001 - raised again in the waiting thread
            done.put((None, error))

    threading.Thread(target=do, name="syncd-doctor", daemon=True).start()
    try:
        result, error = done.get(timeout=seconds)
    except queue.Empty:
        raise HungError(probe, seconds) from None
    if error is not None:
        raise error
    return cast("T", result)
