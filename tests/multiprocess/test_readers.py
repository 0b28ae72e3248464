"""Readers among publishing and pruning."""

import os
import random
import signal
import subprocess
import sys
import threading

import pytest

from explorer_hooks.reader import Reader
from syncd.protocol.errors import CancelledError
from tests.multiprocess.by_hand import TrainerByHand, numbers
from tests.multiprocess.processes import (
    DEADLINE,
    ENVIRONMENT,
    Daemon,
    newest,
    published,
    wait_for_step,
    wait_until,
    wait_until_gone,
)
from tests.multiprocess.shared_job import IS_NETWORK, SharedJob

pytestmark = pytest.mark.mounts

STEPS = 6 if IS_NETWORK else 20


def test_leased_readers_miss_no_file_while_the_pruner_keeps_one(shared: SharedJob) -> None:
    layout, job = shared.seen, shared.b.job
    trainer = TrainerByHand(job, megabytes=2)
    read: list[int] = []

    def follow(reader: Reader) -> None:
        held = None
        try:
            while True:
                version = reader.next_version(held.sequence if held else 0)
                if held is not None:
                    held.verify()  # still all there, with a newer one out and pruning going on
                    held.release()
                held = version
                held.verify()
                read.append(held.sequence)
        except CancelledError:
            if held is not None:
                held.verify()
                held.release()

    with Daemon(shared.a, "--keep", "1") as daemon, Reader(job, "slow") as slow:
        trainer.save(1)
        first = slow.next_version(0, DEADLINE)
        readers = [Reader(job, f"reader-{number}", poll=0.02) for number in range(3)]
        threads = [threading.Thread(target=follow, args=[reader]) for reader in readers]
        for thread in threads:
            thread.start()
        for step in range(2, STEPS + 1):
            trainer.save(step)
            wait_for_step(layout.root, step)
        daemon.wait_for_log("pruned version")
        wait_until(lambda: {STEPS} <= set(read), "the readers have the last version")
        first.verify()
        assert first.sequence == 1
        assert layout.version(1).exists()
        for reader, thread in zip(readers, threads, strict=True):
            reader.cancel()
            thread.join(DEADLINE)
            reader.close()
        wait_until(
            lambda: published(layout.root) == ["v000001", f"v{STEPS:06d}"],
            "all but the leased one and LATEST are pruned",
        )
        first.release()
        wait_until_gone(layout.version(1))
        wait_until_gone(layout.lease_folder(1))
        wait_until(lambda: '"name":"v000001"' in layout.audit.read_text(), "it is told of")
    audit = layout.audit.read_text()
    for number in range(1, STEPS):
        assert audit.count(f'"name":"v{number:06d}"') == 1
        assert audit.count(f'"name":"global_step_{number}"') == 1


READER = """
import sys
from explorer_hooks.reader import Reader
reader = Reader(sys.argv[1], "doomed")
version = reader.next_version(0, 60)
assert "torch" not in sys.modules
print(version.sequence, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("grace", [0.5, 3600.0])
def test_a_dead_readers_version_goes_after_the_grace_and_not_before(
    shared: SharedJob, grace: float
) -> None:
    layout, trainer = shared.seen, TrainerByHand(shared.b.job)
    options = ["--keep", "1", "--dead-reader-grace", str(grace)]
    with Daemon(shared.a, *options) as daemon:
        trainer.save(1)
        reader = subprocess.Popen(
            [*shared.b.runs, sys.executable, "-c", READER, str(shared.b.job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=ENVIRONMENT,
        )
        try:
            assert reader.stdout is not None
            assert reader.stdout.readline() == b"1\n"
            trainer.save(2)
            wait_for_step(layout.root, 2)
            os.kill(reader.pid, signal.SIGKILL)
        finally:
            reader.kill()
            reader.communicate()
        if grace < 60:
            wait_until_gone(layout.version(1))
            daemon.wait_for_log("its explorer has been dead")
        else:
            trainer.save(3)
            wait_until_gone(layout.version(2))
            assert layout.version(1).exists()
            assert os.listdir(layout.lease_folder(1))


def test_a_save_that_is_written_again_while_it_is_merged_is_never_a_mixture(
    shared: SharedJob,
) -> None:
    trainer = TrainerByHand(shared.b.job, megabytes=6 if IS_NETWORK else 60, tensors=12)
    stop = threading.Event()
    written: list[int] = []

    def save_again_and_again() -> None:
        while not stop.is_set():
            number = len(written) + 1
            trainer.save(1, number)
            written.append(number)
            wait_until(lambda: random.random() < 0.05, "a random moment in a merge, or after it")

    with (
        Daemon(shared.a, "--keep", "1") as daemon,
        Reader(shared.b.job, "explorer", poll=0.1) as reader,
    ):
        served: list[float] = []
        sequence = 0

        def pull() -> None:
            nonlocal sequence
            version = reader.next_version(sequence, DEADLINE)
            version.verify()
            found = numbers(version.folder)
            version.release()
            assert len(found) == 1, f"a mixture of the saves {found}"
            served.extend(found)
            sequence = version.sequence

        saver = threading.Thread(target=save_again_and_again)
        saver.start()
        try:
            for _ in range(6):
                pull()
        finally:
            stop.set()
            saver.join(DEADLINE)
        while served[-1] != written[-1]:  # else the wait for the next one ends the test
            pull()
        assert served == sorted(set(served))
        assert not any("quarantine" in line or "quarantined step" in line for line in daemon.log)
    assert newest(shared.seen.root).step == 1
