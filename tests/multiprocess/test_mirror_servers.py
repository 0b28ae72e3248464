"""Mirrors through real S3 servers: kills at random, lines that fail, other clocks, and memory."""

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import pytest

pytest.importorskip("obstore")

from syncd.checkpoint.version import read_manifest
from syncd.mirror.object_store import MirrorStore, StoreError
from syncd.protocol.layout import JobLayout
from syncd.storage.fsio import Storage
from tests.multiprocess.explorer_processes import ended, following
from tests.multiprocess.mirroring import Mirrored, trainer_report
from tests.multiprocess.object_stores import KINDS, Line, environment, object_store
from tests.multiprocess.processes import (
    ENVIRONMENT,
    Daemon,
    Program,
    explorer_report,
    said_by_syncd,
    verified,
    wait_for_step,
    wait_until,
)
from tests.rank_programs import ROOT
from tests.unit.test_mirror_store import names, put, s3_at, version

#: A guard, for hundreds of versions.
LONG = 280.0
SEED = random.SystemRandom().randrange(10**6)


@pytest.fixture(params=KINDS)
def port(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[int]:
    with object_store(request.param, tmp_path) as port:
        yield port


@pytest.mark.parametrize(
    "kills", [30, pytest.param(500, marks=[pytest.mark.deep, pytest.mark.timeout(3600)])]
)
def test_no_kill_brings_a_wrong_version_and_the_last_arrives(
    port: int, tmp_path: Path, memory: Path, kills: int
) -> None:
    print(f"seed {SEED}")
    chance = random.Random(SEED)
    with Mirrored(tmp_path, f"s3://jobs/{uuid4()}", environment(port)) as mirrored:
        mirrored.enter(Daemon(mirrored.near))
        far = mirrored.far(pulls=False)
        trainer = mirrored.trainer(megabytes=2, deltas=True)
        arrivals = mirrored.arrivals(far, trainer)

        def start(which: str) -> Program:
            """So slow that many a kill comes in the middle of a version; it sweeps soon."""
            if which == "pull":
                return mirrored.pull(far, "--rate", "2MB")
            stage = ("--stage", memory / "near") * chance.randrange(2)
            return mirrored.push("--rate", "2MB", "--keep", 1, "--min-age", 12, *stage)

        running = {which: start(which) for which in ("push", "pull")}
        link, step = tmp_path / "link", 0
        follower = following(far, "follower", "--stage", memory / "far", "--link", link)
        with ThreadPoolExecutor(1) as pool, ended(follower):
            last = sum(kill % 6 != 0 for kill in range(kills)) - 1
            seen = pool.submit(arrivals.until, last, max(LONG, 6.0 * kills))
            for kill in range(kills):
                if kill % 6 != 0:
                    step = max(0, step + chance.choice((1, 1, 1, 1, -1)))
                    trainer.changed = chance.choice((0.02, 0.02, 1.0))
                    trainer.next(step)
                which = chance.choice(list(running))
                time.sleep(chance.uniform(0, 2.5))
                running[which].kill()
                running[which] = start(which)
            seen.result()
        for program in running.values():  # one may just have begun
            program.kill()
        assert arrivals.seen == sorted(set(arrivals.seen))
        print(f"of {len(trainer.saves)} saves {len(arrivals.seen)} arrived")
        for log in (program.log for program in mirrored.programs):
            assert "Traceback" not in "".join(log)


def test_a_line_that_fails_brings_no_wrong_version_and_is_told_while_it_blocks(
    port: int, tmp_path: Path
) -> None:
    line = Line(port)
    with (
        line.open() as way,
        Mirrored(tmp_path, f"s3://jobs/{uuid4()}", environment(way)) as mirrored,
    ):
        near = mirrored.near
        mirrored.enter(Daemon(near))
        far = mirrored.far(pulls=False)
        trainer = mirrored.trainer(megabytes=1)
        arrivals = mirrored.arrivals(far, trainer)
        mirrored.pull(far)
        mirrored.push()

        def tells(job: Path) -> bool:
            return "403 Forbidden" in said_by_syncd("status", job, "--json")

        arrivals.until(trainer.next(1))
        for step, fault in enumerate(Line.FAULTS, 2):
            line.fails(fault)
            trainer.changed = 1.0
            number = trainer.next(step)
            wait_until(line.has_failed, f"the line {fault}")
            for job in (near, far) if fault == "403" else ():
                wait_until(lambda job=job: tells(job), "its status tells what is wrong")
            line.lift()
            arrivals.until(number)
        wait_until(
            lambda: trainer_report(far).fault is explorer_report(near, "mirror").fault is None,
            "both are well",
        )


def test_a_missing_bucket_is_named_as_the_reason(tmp_path: Path) -> None:
    with object_store("moto", tmp_path) as port:
        store = MirrorStore("s3://none", store=s3_at(port, "none"))
        for request in (store.check_conditions, store.now, store.newest):
            with pytest.raises(StoreError, match="NoSuchBucket"):
                request()


@pytest.mark.parametrize("days", [-3, 3])
def test_a_sweep_goes_by_the_clock_of_the_server(tmp_path: Path, days: float) -> None:
    with object_store("moto", tmp_path, days=days) as port:
        store = MirrorStore("s3://jobs", store=s3_at(port))
        store.check_conditions()
        files = put(store, b"a", b"b", b"c")
        for sequence, file in enumerate(files[:2], 1):
            store.add(version(sequence, file))
        before, hour = names(store), timedelta(hours=1)
        assert all(store.has(file, hour, store.now()) for file in files)
        assert store.sweep(keep=1, min_age=hour) == 0
        assert names(store) == before
        assert store.sweep(keep=1, min_age=-hour) == 3  # as if all were old
        assert store.newest() == version(2, files[1])
        assert len(names(store)) == 2


#: Saves 1 GB, and then again with a few other values.
_WRITER = """
import sys
import numpy
from trainer_hooks import WeightStream

def tensors(step):
    for number in range(16):
        memory[0] = step
        yield str(number), memory

memory = numpy.random.default_rng(0).random(2**23)  # 64 MiB
with WeightStream(sys.argv[1]) as stream:
    for step in (1, 2):
        stream.save(step, tensors(step))
        stream.wait_published()
        sys.stdin.readline()
"""


def _peak(program: Program) -> int:
    """The most bytes that a process has held in memory."""
    lines = Path(f"/proc/{program.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def test_push_and_pull_of_a_gigabyte_stay_below_300_megabytes(tmp_path: Path) -> None:
    with (
        object_store("seaweedfs", tmp_path) as port,
        Mirrored(tmp_path, "s3://jobs/large", environment(port)) as mirrored,
    ):
        near = mirrored.near
        mirrored.enter(Daemon(near))
        far = mirrored.far(pulls=False)
        both = mirrored.push(), mirrored.pull(far)
        writer = subprocess.Popen(
            [sys.executable, "-c", _WRITER, near],
            env=ENVIRONMENT | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
        )
        with writer:
            for step in (1, 2):
                found = wait_for_step(far, step)
                whole, arrived = (
                    read_manifest(Storage(), JobLayout(job).version(found.sequence)).tensors
                    for job in (near, far)
                )
                assert arrived == whole
                writer.stdin.write(b"\n")
                writer.stdin.flush()
        verified(far, found.sequence)
        for program in both:
            assert _peak(program) < 300_000_000, program.log
