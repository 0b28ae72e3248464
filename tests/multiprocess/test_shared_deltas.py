"""A stage on one client of a share, while the daemon on another prunes what it reads.

Without ``SYNCD_TEST_MOUNTS`` the two are paths of the local disk. The stage is in memory.
"""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest

from explorer_hooks.reader import Reader
from explorer_hooks.staging import Staging
from syncd.coordination.leased_version import LeasedVersion
from syncd.deltas.delta_folder import BLOCKS, INDEX
from syncd.protocol.names import DELTA, delta_folder
from tests.multiprocess.by_hand import TrainerByHand, numbers
from tests.multiprocess.processes import DEADLINE, Daemon, wait_until
from tests.multiprocess.shared_job import IS_NETWORK, SharedJob
from tests.storages import RuledStorage

pytestmark = pytest.mark.mounts

#: No save of the test differs from the one before in more than a few elements.
_ERA: Final = 100
#: A copy of a few kilobytes counts as one of gigabytes, so that a delta is waited for.
_SLOWER: Final = 1e6


class Pause:
    """A rule for storage: a thread that is about to read a file of a delta is held there.

    Args:
        file: the name of the file.
        reads: after so many reads of the open file; before it is opened, if None.
    """

    def __init__(self, file: str, reads: int | None) -> None:
        self.file = file
        self._reads = reads
        self._delta = ""
        self._seen = 0
        self.reached = threading.Event()
        self.goes_on = threading.Event()

    def begin(self, sequence: int) -> None:
        """Hold the next read of this version's delta."""
        self._delta = delta_folder(sequence)

    def __call__(self, method: str, given: tuple[Any, ...]) -> None:
        if self._reads is None:
            path = given[0] if method == "open_read" else None
        elif method in {"pread", "pread_into"}:
            path = Path(os.readlink(f"/proc/self/fd/{given[0]}"))
        else:
            path = None
        if path is None or (path.parent.name, path.name) != (self._delta, self.file):
            return
        self._seen += 1
        if self._seen > (self._reads or 0):
            self.reached.set()
            assert self.goes_on.wait(DEADLINE)


def test_a_copy_is_whole_though_its_delta_and_base_are_pruned_while_it_is_made(
    shared: SharedJob, memory: Path
) -> None:
    """The delta is gone before it is opened, before its first block is read, or after some."""
    seen, trainer = shared.seen, TrainerByHand(shared.b.job, era=_ERA)
    staging = Staging(memory, clock=lambda: _SLOWER * time.monotonic())
    storage = RuledStorage()
    options = ("--keep", "1", "--deltas", "on", "--keep-deltas", "1")

    def save(sequence: int) -> None:
        trainer.save(sequence)
        if sequence > 1:
            wait_until((seen.delta(sequence) / DELTA).exists, f"the delta to {sequence} is there")

    def leased(sequence: int) -> LeasedVersion:
        found = reader.next_version(sequence - 1, DEADLINE)
        assert found.sequence == sequence
        return found

    def check(copy: LeasedVersion, step: int) -> None:
        copy.verify()
        assert numbers(copy, _ERA) == {step}

    with (
        Daemon(shared.a, *options) as daemon,
        Reader(shared.b.job, "host", storage=storage, poll=0.1) as reader,
        ThreadPoolExecutor(1) as pool,
    ):
        save(1)
        version = leased(1)
        held = staging.stage(version)
        version.release()
        last = 1
        pauses = [Pause(INDEX, None), Pause(BLOCKS, 0)]
        if not IS_NETWORK:  # a client reads such a file in one piece
            pauses.append(Pause(BLOCKS, 2))
        for pause in pauses:
            base, last = last, last + 1
            save(last)
            version = leased(last)
            storage.rules[:] = [pause]
            pause.begin(last)
            staged = pool.submit(staging.stage, version)
            wait_until(lambda p=pause, s=staged: p.reached.is_set() or s.done(), "a read, or none")
            assert not staged.done(), staging.fetched
            save(last + 1)
            wait_until(lambda n=last: not seen.delta(n).exists(), "the delta is pruned")
            wait_until(lambda n=base: not seen.version(n).exists(), "its base is pruned")
            pause.goes_on.set()
            copy = staged.result(DEADLINE)
            storage.rules.clear()
            check(held, base)
            check(copy, last)
            by_delta = staging.fetched.delta_bytes is not None
            assert by_delta or staging.fetched.no_delta
            # A file that is open can be read to its end on the local disk; a server may refuse it.
            assert by_delta == (pause.file == BLOCKS) or IS_NETWORK, staging.fetched
            held.release()
            version.release()
            # And nothing is wrong with the next one.
            last += 1
            version = leased(last)
            held = staging.stage(version)
            check(held, last)
            assert staging.fetched.delta_bytes is not None, staging.fetched
            version.release()
            copy.release()
        wait_until(
            lambda: os.listdir(seen.published) == [seen.version(last).name], "old versions go"
        )
        held.release()
        assert daemon.terminate() == 0
        assert "Traceback" not in "".join(daemon.log)
    staging.tidy()
    (room,) = memory.iterdir()
    assert set(os.listdir(room)) == {".copier", ".speed"}
