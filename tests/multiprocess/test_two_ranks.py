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
from tests.multiprocess.peers import forked
from tests.multiprocess.processes import DEADLINE, Daemon, report
from tests.multiprocess.ranks import STEPS, train


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
    given = (job, tmp_path / "store", truth, ("explorer", "witness"))
    witness = Witness(job)
    witness.start()
    served: list[tuple[int, int]] = []
    try:
        with (
            Daemon(job, "--keep", "2") as daemon,
            forked(train, *given) as processes,
            ExplorerHook(job, "explorer", TorchModule(model), poll=0.2) as hook,
        ):
            for step in range(1, STEPS + 1):
                version = hook.pull(3 * DEADLINE)  # torch may have to be imported first
                served.append((version.sequence, version.step))
                assert version.step == step
                told = load_file(truth / f"{step}.safetensors")
                held = model.state_dict()
                assert told.keys() == held.keys()
                assert all(torch.equal(told[name], held[name]) for name in told)
            for process in processes:
                process.join(DEADLINE)
                assert process.exitcode == 0
            found = report(job)
            assert found is not None
            assert found.counters.published == STEPS
            assert daemon.terminate() == 0
    finally:
        seen = witness.finish()
    assert seen == served
    assert {name: value.data_ptr() for name, value in model.state_dict().items()} == pointers
