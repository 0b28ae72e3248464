"""The processes of a soak that are not the daemon's: a trainer's rank, and an explorer.

A rank saves what it is ordered to, by a ``TrainerHook`` with deltas. An explorer,
``python -m tests.multiprocess.soak_programs JOB NAME AWAY [STAGE]``, loads one version after the
other, reads all of each when it takes it and before it lets it go, and says so on stdout as JSON
lines. With a stage folder it holds copies there, and follows ahead.
"""

import json
import logging
import random
import signal
import sys
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from explorer_hooks import ExplorerHook, LeasedVersion
from explorer_hooks.engines.base import InProcessEngine
from explorer_hooks.staging import Staging
from syncd.protocol.errors import CancelledError, SyncdError, VerificationError, WaitTimeoutError
from tests.multiprocess.by_hand import elements, numbers
from tests.multiprocess.processes import latest

#: Of each version, in all tensors together.
MEGABYTES: Final = 1.0
#: So many saves differ in few elements, and links lead from one to the next.
ERA: Final = 20
_TENSORS: Final = 4
_SAVE_TIMEOUT: Final = 10.0
_AGAIN: Final = 0.2


# -- a trainer's rank ----------------------------------------------------------------------------


def rank_of_a_trainer(
    orders: Connection, job: Path, rank: int, world_size: int, rendezvous: Path
) -> None:
    """Answer ``True`` when it has begun, and to each order whether it was saved.

    An order is a step, and the number that all weights are. Ends where it cannot begin.
    """
    import torch  # noqa: PLC0415 - explorers need none of it
    from torch import distributed, nn  # noqa: PLC0415
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

    from tests.hooks import written  # noqa: PLC0415
    from trainer_hooks import SaveSettings, SyncSettings, TrainerHook  # noqa: PLC0415

    logging.disable(logging.ERROR)  # what fails is told in the answer
    model = nn.ParameterList(
        # Two make one float32.
        torch.zeros(2 * int(MEGABYTES * 1e6 / 4 / _TENSORS), dtype=torch.bfloat16)
        for _ in range(_TENSORS)
    )

    def save(step: int, number: float) -> None:
        for value in model.state_dict().values():
            part = value.to_local()
            count = len(part) // 2
            data = elements(number, range(rank * count, (rank + 1) * count), ERA)
            part.copy_(torch.frombuffer(bytearray(data), dtype=part.dtype))
        hook.save_state_dict(step)
        written(hook)

    try:
        distributed.init_process_group(
            "gloo",
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=2 * _SAVE_TIMEOUT),
        )
        fully_shard(model)
        hook = TrainerHook(
            job,
            model,
            settings=SyncSettings(deltas=True, save_timeout=_SAVE_TIMEOUT),
            saving=SaveSettings(final=False),
        )
    except (SyncdError, OSError, RuntimeError) as error:  # full, or a rank was killed
        print(f"rank {rank} does not begin: {error}", file=sys.stderr)
        return
    orders.send(True)
    while True:
        try:
            order = orders.recv()
        except EOFError:
            return  # the driver is gone
        try:
            save(*order)
        except (SyncdError, OSError, RuntimeError):
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


class Loaded(InProcessEngine):
    """Reads all of a version when it takes it, and before it lets it go.

    Attributes:
        number: that all its weights are.
        is_back: whether it is a rollback.
        is_ahead: whether it came before its full version.
    """

    def __init__(self, job: Path) -> None:
        self._job = job
        self._held: LeasedVersion | None = None
        self.number = 0.0
        self.is_back = self.is_ahead = False

    def check(self, version: LeasedVersion) -> None:
        """Any will do."""

    def load(self, version: LeasedVersion) -> None:
        if self._held is not None:
            self._held.verify()
        found = numbers(version, ERA)
        assert len(found) == 1, f"version {version.sequence} is a mixture of the saves {found}"
        newest = latest(self._job)
        self._held, self.number = version, found.pop()
        self.is_back = version.manifest.rolled_back is not None
        self.is_ahead = newest is not None and newest.sequence < version.sequence

    def close(self) -> None:
        if self._held is not None:
            self._held.verify()


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
        self._engine = Loaded(job)
        self._hook: ExplorerHook | None = None
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
            except (AssertionError, VerificationError) as error:
                if not self._away.excuses(before):
                    tell(violation=f"{self._name}: {error!r}")
                time.sleep(_AGAIN)
            except (OSError, SyncdError) as error:
                tell(refused=str(error))
                time.sleep(_AGAIN)
        if self._hook is not None:
            self._hook.close()

    def _look(self) -> None:
        if self._hook is None:
            self._hook = ExplorerHook(
                self._job, self._name, self._engine, staging=self._staging, poll=0.1
            )
        version, engine = self._hook.pull(1.0), self._engine
        read = self._hook.last
        assert read is not None
        tell(
            holds=version.sequence,
            step=version.step,
            number=engine.number,
            is_back=engine.is_back,
            is_ahead=engine.is_ahead,
            read=read.model_dump(include={"full_bytes", "delta_bytes", "no_delta", "not_staged"})
            if self._staging
            else None,
        )
        time.sleep(random.random())

    def _stop(self, *_: object) -> None:
        self._stopping = True
        if self._hook is not None:
            self._hook.cancel()


def main() -> None:
    job, name, away, *stage = sys.argv[1:]
    logging.disable(logging.WARNING)  # what matters is told
    Explorer(Path(job), name, Away(Path(away)), Path(*stage) if stage else None).run()


if __name__ == "__main__":
    main()
