"""The processes of a soak that are not the daemon's: a trainer's rank, and an explorer.

A rank saves what it is ordered to, through the writer of ``TrainerHook``. An explorer,
``python -m tests.multiprocess.soak_programs JOB NAME AWAY [STAGE]``, holds one version after the
other, reads all of each when it takes it and before it lets it go, and says so on stdout as JSON
lines. With a stage folder it holds copies there.
"""

import json
import logging
import random
import signal
import sys
import time
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from explorer_hooks.reader import LeasedVersion, Reader
from explorer_hooks.staging import NotStagedError, Staging
from syncd.protocol.errors import (
    CancelledError,
    JobUnavailableError,
    SaveFailedError,
    VerificationError,
    WaitTimeoutError,
)
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import shard_name
from syncd.protocol.policy import RunningStatus
from syncd.protocol.records import SaveId, encode
from syncd.protocol.reports import TrainerReport
from syncd.storage.fsio import Storage
from syncd.storage.job import Job
from tests.multiprocess.by_hand import TrainerByHand, numbers

#: Of each version, in all tensors together.
MEGABYTES: Final = 1.0
#: So many saves differ in few elements, and deltas lead from one to the next.
ERA: Final = 20
_SAVE_TIMEOUT: Final = 10.0
_AGAIN: Final = 0.2


# -- a trainer's rank ----------------------------------------------------------------------------


def rank_of_a_trainer(orders: Connection, job: Path, rank: int, world_size: int, run: str) -> None:
    """Answer ``True`` when it has begun, and to each order whether it was saved.

    An order is a step, a counter, and the number that all weights are.
    """
    from trainer_hooks.writing.writer import RankContents, RankWriter  # noqa: PLC0415 - it needs torch

    logging.disable(logging.WARNING)  # what fails is told in the answer
    storage, layout = Storage(job), JobLayout(job)
    content = TrainerByHand(job, megabytes=MEGABYTES, ranks=world_size, era=ERA)
    writer = RankWriter(Job(storage, layout), rank, world_size, save_timeout=_SAVE_TIMEOUT)

    def report(step: int | None) -> None:
        if rank == 0:
            told = TrainerReport(
                run_id=run, world_size=world_size, status="running", step=step, time=time.time()
            )
            storage.replace(layout.trainer_report, encode(told), room=layout.drafts)

    def save(step: int, counter: int, number: float) -> None:
        path = layout.actor(step) / shard_name(world_size, rank)
        report(step)
        writer.save(
            SaveId(run, step, counter),
            RankContents(
                written_by=lambda: path.write_bytes(content.shard(rank, number)),
                model_files=(lambda folder: (folder / "config.json").write_text("{}"),),
            ),
        )

    while True:
        try:
            report(None)
            break
        except OSError:  # full, or away: it begins when it can
            time.sleep(_AGAIN)
    orders.send(True)
    while True:
        try:
            order = orders.recv()
        except EOFError:
            return  # the driver is gone
        try:
            save(*order)
        except (SaveFailedError, OSError):
            orders.send(False)
        else:
            orders.send(True)


# -- an explorer ---------------------------------------------------------------------------------


def tell(**said: object) -> None:
    print(json.dumps(said), flush=True)


class Away:
    """How often the job went away and came back, as the driver counts it in a file: odd is away.

    What fails in between says nothing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def count(self) -> int:
        return int(self._path.read_text())

    def excuses(self, before: int) -> bool:
        return bool(before % 2) or self.count() != before


class Explorer:
    """Takes versions, and never lets one go before it has read it twice.

    Args:
        job: as its host has it.
        name: its own.
        away: says when the job is not there.
        stage: where it makes copies, which it holds in place of the versions; None to make none.
    """

    def __init__(self, job: Path, name: str, away: Away, stage: Path | None) -> None:
        self._job = job
        self._name = name
        self._away = away
        self._staging: Staging | None = None
        if stage is not None:
            # With the first link otherwise: the memory that it takes is no growth.
            import syncd.deltas.folding  # noqa: F401, PLC0415

            self._staging = Staging(stage)
        self._held: LeasedVersion | None = None
        self._reader: Reader | None = None
        self._stopping = False
        signal.signal(signal.SIGTERM, self._stop)

    def run(self) -> None:
        while not self._stopping:
            before = self._away.count()
            try:
                self._look()
            except CancelledError:
                break
            except WaitTimeoutError:
                continue
            except AssertionError as error:
                self._fail(error)
            except (VerificationError, NotStagedError) as error:
                if not self._away.excuses(before):
                    self._fail(error)
                time.sleep(_AGAIN)
            except (OSError, JobUnavailableError) as error:
                tell(refused=str(error))
                time.sleep(_AGAIN)
        while self._held is not None:
            try:
                self._replace_by(None)
            except (OSError, VerificationError) as error:  # the job may be away: it comes back
                tell(refused=str(error))
                time.sleep(_AGAIN)
        if self._reader is not None:
            self._reader.close()

    def _look(self) -> None:
        if self._reader is None:
            self._reader = Reader(self._job, self._name, poll=0.1)
        sequence = self._held.sequence if self._held else 0
        newer = self._reader.next_version(sequence, 1.0)
        using = [newer]
        try:
            read = None
            if self._staging is not None:
                using.append(self._staging.stage(newer, cancel=self._reader.check_open))
                read = asdict(self._staging.fetched)
            using[-1].verify()
            found = numbers(using[-1], ERA)
            assert len(found) == 1, f"version {newer.sequence} is a mixture of the saves {found}"
            self._replace_by(using.pop())
        finally:
            for version in using:
                version.release()
        tell(
            holds=newer.sequence,
            step=newer.step,
            save_id=newer.manifest.save_id,
            number=found.pop(),
            read=read,
        )
        self._reader.report(RunningStatus.RUNNING, sequence=newer.sequence, step=newer.step)
        time.sleep(random.random())

    def _replace_by(self, newer: LeasedVersion | None) -> None:
        if self._held is not None:
            self._held.verify()
            self._held.release()
        self._held = newer
        if self._staging is not None:
            self._staging.tidy()

    def _fail(self, error: Exception) -> None:
        """Say what must not be, and do not look at it again."""
        tell(violation=f"{self._name}: {error}")
        self._held = None

    def _stop(self, *_: object) -> None:
        self._stopping = True
        if self._reader is not None:
            self._reader.cancel()


def main() -> None:
    job, name, away, *stage = sys.argv[1:]
    Explorer(Path(job), name, Away(Path(away)), Path(*stage) if stage else None).run()


if __name__ == "__main__":
    main()
