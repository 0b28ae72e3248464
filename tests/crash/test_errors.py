"""Every call of the seam may fail: once, or from then on. Nothing is lost, and work goes on."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from syncd.daemon import collect
from syncd.protocol.errors import JobUnavailableError, SyncdError
from syncd.protocol.names import parse_step_folder, version_folder
from tests.crash.invariants import CONFIG, check, look, pass_time
from tests.crash.scenarios import SCENARIOS, Scenario
from tests.jobs import SmallJob
from tests.storages import Clock, OneByOne, RuledStorage, os_error

CODES = (
    errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.EACCES, errno.EROFS, errno.EINTR,
    errno.ETIMEDOUT, errno.ENOTCONN,
)  # fmt: skip
#: How far apart the calls that fail are at most, one a run; 1 for every call.
STRIDE = int(os.environ.get("SYNCD_STRIDE", "97"))
#: How often whoever runs a process starts it again: the service, or the trainer's launcher.
STARTS = 4


class FailingStorage(RuledStorage):
    """Refuses the k-th call, or all from there on, until it is mended."""

    def __init__(self, call: int, code: int, *, on: bool) -> None:
        super().__init__()
        self.left = call
        self.failed: list[str] = []
        self._code = code
        self._on = on

    def _before(self, method: str, *given: Any) -> None:
        if self.left <= 0 and not self._on:
            return
        self.left -= 1
        if self.left <= 0:
            self.failed.append(f"{method} {given[0]}")
            raise os_error(self._code, given[0])

    def close(self, fd: int) -> None:
        """A close that fails has closed all the same (close(2), "Dealing with error returns")."""
        try:
            super().close(fd)
        except OSError:
            os.close(fd)
            raise

    def release(self, fd: int) -> None:
        os.close(fd)

    def mend(self) -> None:
        self.left, self._on = 0, False


def work(job: SmallJob, scenario: Scenario, storage: FailingStorage, clock: Clock) -> bool:
    """Run it as a service would: what storage refuses is an error of ours or the system's."""
    job.storage = storage
    for start in range(STARTS):
        if start == STARTS - 1:
            storage.mend()
        try:
            scenario.act(job, clock)
        except (OSError, SyncdError):
            clock.advance(60)
        else:
            return True
    return False


def run(in_memory: Path, scenario: Scenario, call: int, code: int, *, on: bool) -> bool:
    """Fail one call, and see that nothing is lost; False where there are not so many."""
    job = SmallJob(in_memory / "job")
    scenario.prepare(job)
    before = look(job, rewritten=scenario.rewritten)
    storage, clock = FailingStorage(call, code, on=on), Clock()
    try:
        scenario.recover(job, before, clock, again=not work(job, scenario, storage, clock))
    except BaseException as error:
        error.add_note(f"{errno.errorcode[code]} of call {call} of {scenario}: {storage.failed}")
        raise
    finally:
        shutil.rmtree(in_memory)
        in_memory.mkdir()
    return bool(storage.failed)


each_scenario = pytest.mark.parametrize("scenario", SCENARIOS, ids=str)


@pytest.mark.parametrize("odd", [False, pytest.param(True, marks=pytest.mark.deep)])
@each_scenario
def test_whatever_call_fails_nothing_is_lost_and_work_goes_on(
    in_memory: Path, scenario: Scenario, odd: bool
) -> None:
    """The call fails once, or it and all later calls fail: this alternates."""
    number = call = 1
    while run(in_memory, scenario, call, CODES[number % len(CODES)], on=number % 2 == odd):
        number += 1
        call += min(call, STRIDE)
    print(f"{number - 1} of {call} calls")
    assert number > 2


def steps(job: SmallJob) -> list[int]:
    found = (parse_step_folder(name) for name in os.listdir(job.root))
    return [step for step in found if step is not None]


@patch.object(collect, "_GRACE", 60.0)
def goes_on(in_memory: Path, scenario: Scenario, call: int, code: int) -> bool:
    """Fail one call of a daemon that works; the very same daemon must finish what is due."""
    storage, clock = FailingStorage(0, code, on=False), Clock()
    job = SmallJob(in_memory / "job")
    scenario.prepare(job)
    before = look(job)
    job.storage = storage
    failed = True
    with job.daemon(CONFIG, clock=clock) as loop:
        storage.left = call
        for _ in range(24):
            try:
                loop.run_once()
            except JobUnavailableError:
                break  # format.json itself could not be seen: the service begins anew
            except OSError:
                pass  # the service says so, and goes on with the next round
            pass_time(job, clock)
        else:
            failed = bool(storage.failed)
            storage.mend()
            try:
                # Held, and LATEST: all others had to go.
                served = {version_folder(sequence) for sequence in before.leased}
                assert job.latest.step == max(steps(job))
                assert set(job.versions) == served | {job.latest.folder}
                check(job, before)
            except BaseException as error:
                error.add_note(f"{errno.errorcode[code]} of call {call}: {storage.failed}")
                raise
        storage.mend()
    shutil.rmtree(in_memory)
    in_memory.mkdir()
    return failed


@pytest.mark.parametrize(
    "scenario", [s for s in SCENARIOS if s.name in {"merge and publish", "prune"}], ids=str
)
def test_whatever_call_fails_once_the_same_daemon_goes_on(
    in_memory: Path, scenario: Scenario
) -> None:
    number = call = 1
    while goes_on(in_memory, scenario, call, CODES[number % len(CODES)]):
        number += 1
        call += min(call, STRIDE)
    assert number > 2


@each_scenario
def test_short_reads_and_writes_change_nothing(in_memory: Path, scenario: Scenario) -> None:
    job, clock = SmallJob(in_memory / "job"), Clock()
    scenario.prepare(job)
    before = look(job, rewritten=scenario.rewritten)
    job.storage = OneByOne()
    scenario.act(job, clock)
    scenario.recover(job, before, clock, again=False)
