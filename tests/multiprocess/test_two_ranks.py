"""From real FSDP ranks to a live module."""

from __future__ import annotations

import threading
from pathlib import Path

import torch
from safetensors.torch import load_file

from explorer_hooks import ExplorerHook, Reader, TorchModule
from syncd.cli.demo_model import TinyTransformer
from syncd.protocol.errors import CancelledError
from syncd.protocol.policy import RunningStatus
from tests.multiprocess.processes import DEADLINE, Daemon, report, running

STEPS = 8


class Witness(threading.Thread):
    """Opens and verifies every version that LATEST names, when it names it."""

    def __init__(self, job: Path) -> None:
        super().__init__()
        self.seen: list[tuple[int, int]] = []
        self._reader = Reader(job, "witness", poll=0.05)

    def run(self) -> None:
        last = 0
        while True:
            try:
                version = self._reader.next_version(last)
            except CancelledError:
                return
            version.verify()
            last = version.sequence
            self.seen.append((version.sequence, version.step))
            self._reader.report(RunningStatus.RUNNING, sequence=version.sequence, step=version.step)
            version.release()

    def finish(self) -> list[tuple[int, int]]:
        self._reader.cancel()
        self.join(DEADLINE)
        self._reader.close()
        return self.seen


def test_explorers_hold_full_tensor_of_the_step_that_they_report(job: Path, tmp_path: Path) -> None:
    truth = tmp_path / "truth"
    truth.mkdir()
    model = TinyTransformer()
    pointers = {name: value.data_ptr() for name, value in model.state_dict().items()}
    ranks = [
        ["tests.multiprocess.ranks", "--job", str(job), "--rendezvous", str(tmp_path / "store"),
         "--rank", str(rank), "--world-size", "2", "--steps", str(STEPS), "--truth", str(truth),
         "--wait-for", "explorer", "witness"]
        for rank in range(2)
    ]  # fmt: skip
    witness = Witness(job)
    witness.start()
    served: list[tuple[int, int]] = []
    try:
        with (
            Daemon(job, "--keep", "2") as daemon,
            running(*ranks) as processes,
            ExplorerHook(job, "explorer", TorchModule(model), poll=0.2) as hook,
        ):
            for step in range(1, STEPS + 1):
                version = hook.pull(DEADLINE)
                served.append((version.sequence, version.step))
                assert version.step == step
                told = load_file(truth / f"{step}.safetensors")
                held = model.state_dict()
                assert told.keys() == held.keys()
                assert all(torch.equal(told[name], held[name]) for name in told)
            assert [process.wait(DEADLINE) for process in processes] == [0, 0]
            found = report(job)
            assert found is not None
            assert found.counters.published == STEPS
            assert daemon.terminate() == 0
    finally:
        seen = witness.finish()
    assert seen == served
    assert {name: value.data_ptr() for name, value in model.state_dict().items()} == pointers
