"""kill -9 at every call that changes storage: in a process of its own, and then a restart."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.crash.children import child, was_killed
from tests.crash.invariants import look
from tests.crash.scenarios import LOAD, RESUME, SCENARIOS, Scenario
from tests.jobs import SmallJob
from tests.storages import CHANGES, Clock, FastStorage, RuledStorage

#: How far apart the moments are; 1 for every one.
STRIDE = int(os.environ.get("SYNCD_KILL_STRIDE", "31"))


class DeadlyStorage(RuledStorage):
    """Kills its process at the k-th moment: before each change, and in the middle of each write."""

    def __init__(self, moment: int) -> None:
        super().__init__()
        self._left = moment
        self._last: tuple[str, Any] = ("", None)

    def _before(self, method: str, *given: Any) -> None:
        if method not in CHANGES:
            return
        # torch.save writes in hundreds of pieces: one moment for them, unless all are asked for.
        before, self._last = self._last, (method, given[0])
        if "SYNCD_DEEP" not in os.environ and method == "write" and before == self._last:
            return
        self._count()
        if method in {"write", "pwrite"}:
            fd, data, *where = given
            half = memoryview(data).cast("B")[: memoryview(data).nbytes // 2]
            if self._left == 1:
                getattr(FastStorage, method)(self, fd, half, *where)
            self._count()

    def _count(self) -> None:
        self._left -= 1
        if not self._left:
            os.kill(os.getpid(), signal.SIGKILL)


def killed(job: SmallJob, scenario: Scenario, moment: int) -> bool:
    """Let a child do the work until it is killed; False where it came to its end before that."""

    def act() -> None:
        job.storage = DeadlyStorage(moment)
        scenario.act(job, Clock())

    return was_killed(child(act), f"moment {moment}")


@pytest.mark.parametrize("scenario", [*SCENARIOS, RESUME, LOAD], ids=str)
def test_whatever_call_is_the_last_one_a_restart_converges(
    in_memory: Path, scenario: Scenario
) -> None:
    moment = 1 - STRIDE
    going_on = True
    while going_on:
        moment += STRIDE
        job = SmallJob(in_memory / "job")
        scenario.prepare(job)
        before = look(job, rewritten=scenario.rewritten)
        going_on = killed(job, scenario, moment)
        try:
            scenario.recover(job, before, Clock())
        except BaseException as error:
            error.add_note(f"after a kill at moment {moment} of {scenario}")
            raise
        shutil.rmtree(in_memory)
        in_memory.mkdir()
    assert moment > 5
    print(f"{moment} moments")
