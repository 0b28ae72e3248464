"""The trainer's hook on real ranks: what they agree on, and what is left when one of them dies."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from syncd.coordination.explorer import ExplorerSynchronizer
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import SAVING
from syncd.protocol.policy import RunningStatus
from syncd.storage.fsio import Storage
from syncd.storage.job import open_job
from tests.multiprocess.processes import (
    DEADLINE,
    ENVIRONMENT,
    LEASE_TIME,
    Daemon,
    wait_for_step,
    wait_until,
)
from trainer_hooks import latest_checkpoint

Answer = dict[str, Any]


class RankProcess:
    """A rank that is told what to do, one line at a time."""

    def __init__(self, job: Path, rendezvous: Path, rank: int, world_size: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.multiprocess.trainer_ranks", "--job", str(job),
             "--rendezvous", str(rendezvous), "--rank", str(rank),
             "--world-size", str(world_size)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT,
        )  # fmt: skip
        self._answers: queue.Queue[Answer | None] = queue.Queue()
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()

    def tell(self, command: str, *arguments: object) -> None:
        assert self._process.stdin is not None
        print(json.dumps([command, *arguments]), file=self._process.stdin, flush=True)

    def answer(self) -> Answer:
        found = self._answers.get(timeout=DEADLINE)
        assert found is not None, "the rank is gone"
        return found

    def has_answered(self, *, within: float) -> bool:
        try:
            self._answers.put(self._answers.get(timeout=within))
        except queue.Empty:
            return False
        return True

    def ask(self, command: str, *arguments: object) -> Answer:
        self.tell(command, *arguments)
        return self.answer()

    def is_killed(self) -> bool:
        return self._process.wait(DEADLINE) == -signal.SIGKILL

    def end(self) -> None:
        self._process.kill()
        self._process.wait(DEADLINE)
        self._listener.join(DEADLINE)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                pass  # of what it was told after its end

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(json.loads(line))
        self._answers.put(None)


class Ranks(list[RankProcess]):
    def all(self, command: str, *arguments: object) -> list[Answer]:
        for rank in self:
            rank.tell(command, *arguments)
        return [rank.answer() for rank in self]

    def fine(self, command: str, *arguments: object) -> list[dict[str, float]]:
        answers = self.all(command, *arguments)
        assert all("metrics" in answer for answer in answers), answers
        return [answer["metrics"] for answer in answers]


@contextmanager
def started(job: Path, tmp_path: Path, name: str, world_size: int = 2) -> Iterator[Ranks]:
    ranks = Ranks()
    try:
        for rank in range(world_size):
            ranks.append(RankProcess(job, tmp_path / name, rank, world_size))
        yield ranks
    finally:
        for one in ranks:
            one.end()


def pointed(job: Path) -> int | None:
    path = JobLayout(job).state_pointer
    return int(path.read_text()) if path.exists() else None


def numbers(folder: Path) -> set[float]:
    """What is in the weights of a version."""
    return {
        number
        for file in folder.glob("*.safetensors")
        for tensor in load_file(file).values()
        for number in tensor.flatten().tolist()
    }


def test_ranks_decide_alike_and_a_rank_that_fails_fails_the_save_alone(
    job: Path, tmp_path: Path
) -> None:
    layout = JobLayout(job)
    memory = tmp_path / "shm"
    memory.mkdir()
    open_job(Storage(), JobLayout(memory), lease_time=LEASE_TIME)
    with started(job, tmp_path, "one") as ranks, Daemon(job) as daemon:
        first, second = ranks
        # What one rank finds wrong is an error on all, and not a hang.
        first.tell("open", {}, {}, str(job))
        second.tell("open", {}, {}, str(tmp_path / "nowhere"))
        for rank in ranks:
            answer = rank.answer()
            assert answer["error"] == "JobUnavailableError", answer
            assert "nowhere" in answer["says"]

        # Also where it can be read alone, and everything is there already.
        second.ask("read_only")
        answers = ranks.all("open", {})
        assert {answer["error"] for answer in answers} == {"JobUnavailableError"}, answers
        second.ask("heal")

        ranks.fine("open", {"save_timeout": 60, "sync_interval": 2})
        # Rank 0 waits for nobody.
        assert "time/sync_weight" in first.ask("step", 2)["metrics"]
        assert "time/sync_weight" in second.ask("step", 2)["metrics"]
        ranks.fine("over")
        wait_for_step(job, 2)
        assert numbers(layout.version(1)) == {2.0}

        # A full checkpoint of that step completes the save: nothing is published twice.
        ranks.fine("checkpoint", 2)
        assert latest_checkpoint(job) == 2

        # The disk is full on one rank only.
        second.ask("full_disk", "rank_1.pt")
        ranks.fine("step", 4)
        ranks.fine("over")
        assert pointed(job) == 2
        assert not (layout.step(4) / SAVING).exists()
        second.ask("heal")
        for rank, says in zip(ranks, ("rank 1 of 2 has not written", "No space left"), strict=True):
            rank.tell("step", 6)
            answer = rank.answer()
            assert answer["error"] == "SaveFailedError"
            assert "step 4" in answer["says"]
            assert says in answer["says"]
        ranks.fine("over")
        assert pointed(job) == 6
        assert list(layout.actor(4).glob("*.pt")) == []  # also what rank 0 had written
        assert wait_for_step(job, 6).sequence == 2  # step 2 was published once

        # A sync that rank 0 leaves out is left out by all, and made up for by all.
        second.ask("hold", "create", "rank_1.pt")
        ranks.fine("step", 8)
        assert [one["sync/skipped"] for one in ranks.fine("step", 10)] == [1, 1]
        second.ask("release")
        ranks.fine("over")
        assert all("time/sync_weight" in one for one in ranks.fine("step", 11))
        ranks.fine("close")
        wait_for_step(job, 11)

        # Explorers decide: rank 0 sees them, and all ranks save.
        ranks.fine("open", {"save_timeout": 60, "style": "explorer_driven"})
        with ExplorerSynchronizer(job, "explorer") as explorer:
            explorer.set_explorer_status(RunningStatus.RUNNING)
            assert not any("time/sync_weight" in one for one in ranks.fine("step", 12))
            explorer.set_explorer_status(RunningStatus.REQUIRE_SYNC)
            assert all("time/sync_weight" in one for one in ranks.fine("wait_for_data"))
            ranks.fine("over")
        wait_for_step(job, 12)
        ranks.fine("close")

        # Rank 0 waits for an explorer that lags: the others wait for its word, in no collective.
        ranks.fine("open", {"save_timeout": 60, "max_explorer_lag": 1, "sync_interval": 100})
        with ExplorerSynchronizer(job, "explorer") as explorer:
            explorer.set_explorer_status(RunningStatus.RUNNING)
            for rank in ranks:
                rank.tell("step", 12)
            assert not any(rank.has_answered(within=0.2) for rank in ranks)
        for rank in ranks:
            assert rank.answer()["metrics"]["time/wait_for_explorers"] > 0.2
        ranks.fine("close")

        # Gathered on rank 0, into a memory folder; full checkpoints stay sharded in the job.
        settings = {"save_timeout": 60, "method": "memory", "save_interval": 13}
        ranks.fine("open", settings, {"save_as_hf": "always"}, None, str(memory))
        with Daemon(memory):
            for metrics in ranks.fine("step", 13):
                assert {"time/sync_weight", "time/save_checkpoint"} <= metrics.keys()
            ranks.fine("over")
            wait_for_step(memory, 13)
            ranks.fine("close")
        assert numbers(JobLayout(memory).version(1)) == {13.0}
        assert numbers(layout.actor(13) / "huggingface") == {13.0}
        assert len(list(layout.actor(13).glob("model_world_size_2_*.pt"))) == 2
        assert latest_checkpoint(job) == 13
        assert daemon.terminate() == 0


def test_a_killed_rank_costs_its_save_alone(job: Path, tmp_path: Path) -> None:
    layout = JobLayout(job)
    settings = {"save_timeout": 2}
    saving = {"write_concurrency": "one_at_a_time"}
    with Daemon(job) as daemon:
        with started(job, tmp_path, "one") as ranks:
            first, second = ranks
            ranks.fine("open", settings, saving)
            ranks.fine("step", 1)
            wait_for_step(job, 1)
            ranks.fine("over")
            # A rank is killed in the middle of a save: rank 0 gives it up, and says so.
            second.ask("die_at", "rename", "model_world_size_2_rank_1.pt")
            first.ask("step", 2)
            second.tell("step", 2)
            assert second.is_killed()
            first.ask("over")
            answer = first.ask("close")
            assert answer["error"] == "SaveFailedError"
            assert "rank 1 of 2 has not written its part of the save of step 2" in answer["says"]
            assert pointed(job) == 1
            assert not (layout.step(2) / SAVING).exists()
        with started(job, tmp_path, "two") as ranks:
            first, second = ranks
            ranks.fine("open", settings, saving)
            ranks.fine("step", 2)
            wait_for_step(job, 2)
            ranks.fine("over")
            # Rank 0 is killed when all have written, and before the pointer moves.
            first.ask("die_at", "rename", "latest_state_dict")
            second.tell("step", 3)
            first.tell("step", 3)
            assert first.is_killed()
            second.answer()
            assert pointed(job) == 2
            answer = second.ask("step", 4)
            assert "rank 0 did not say what to save" in answer["says"], answer
        assert sorted(path.name for path in layout.actor(3).glob("*.pt")) == [
            f"model_world_size_2_rank_{rank}.pt" for rank in (0, 1)
        ]
        with started(job, tmp_path, "three") as ranks:
            saving = {"write_concurrency": "per_node"}
            ranks.fine("open", settings, saving)  # once the dead trainer's name is free
            ranks.fine("step", 3)
            found = wait_for_step(job, 3)
            ranks.fine("close")
        assert found.sequence == 3  # nothing of the dead was published
        assert numbers(layout.version(3)) == {3.0}
        wait_until(lambda: not layout.step(2).exists(), "step 2 is pruned")
        assert daemon.terminate() == 0
