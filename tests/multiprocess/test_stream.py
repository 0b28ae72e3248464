"""``WeightStream`` of real processes, and the program of named-tensors.md.

Its memory, its files, and what the daemon moves for them.
"""

import subprocess
import sys
from pathlib import Path

from safetensors.torch import load_file

from explorer_hooks import ExplorerHook, TransformersModel
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import part_name
from tests import tiny_language
from tests.merging import assert_equal, loaded
from tests.multiprocess.processes import (
    DEADLINE,
    ENVIRONMENT,
    Daemon,
    latest,
    newest,
    wait_for_step,
)
from tests.multiprocess.test_examples import run
from tests.rank_programs import ROOT

MIB = 1024 * 1024
#: A writer of 256 MiB in tensors of 32 MiB, which all use the same memory.
_WRITER = """
import resource, sys
import torch
from trainer_hooks import WeightStream

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

def tensors(step):
    for number in range(8):
        yield f"{rank}.{number}", memory.fill_(step + number)

job, rank = sys.argv[1], int(sys.argv[2])
memory = torch.zeros(8 * 1024 * 1024)
with WeightStream(job, rank=rank, world_size=2) as stream:
    before = peak()
    for step in (1, 2):
        stream.save(step, tensors(step))
    stream.wait()
    print(peak() - before)
"""


def moved(pid: int) -> int:
    """The bytes that a process and its ended children have read and written, of any file."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))


def test_a_writer_holds_its_part_once_and_the_daemon_moves_no_weights(job: Path) -> None:
    with Daemon(job) as daemon:
        before = moved(daemon.pid)
        writers = [
            subprocess.Popen(
                [sys.executable, "-c", _WRITER, str(job), str(rank)],
                env=ENVIRONMENT | {"PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        told = [writer.communicate(timeout=3 * DEADLINE)[0] for writer in writers]
        assert [writer.returncode for writer in writers] == [0, 0]
        wait_for_step(job, 2)
        assert moved(daemon.pid) - before < 64 * MIB  # of 1 GiB; most is Python's modules
    for peak in told:
        assert int(peak) < 256 + 64 + 32 + 64  # a copy, a bucket, a tensor; and what is not ours
    layout, found = JobLayout(job), latest(job)
    assert found is not None
    for rank in range(2):
        published = layout.version(found.sequence) / part_name(2, rank)
        assert published.stat().st_ino == (layout.actor(2) / part_name(2, rank)).stat().st_ino
        tensors = load_file(published)
        assert {name: float(tensor.min()) for name, tensor in tensors.items()} == {
            f"{rank}.{number}": 2.0 + number for number in range(8)
        }


def test_the_example_of_named_tensors_reaches_an_explorer(job: Path, tmp_path: Path) -> None:
    base, model = tmp_path / "base", tiny_language.model()
    model.save_pretrained(base)
    with Daemon(job), ExplorerHook(job, "explorer", TransformersModel(model)) as hook:
        arguments = (job, base, 2)
        other = subprocess.Popen(
            [sys.executable, ROOT / "docs/examples/named_tensors.py", *map(str, arguments), "1"],
            env=ENVIRONMENT | {"PYTHONPATH": str(ROOT)},
        )
        said = run(tmp_path, "named_tensors.py", *arguments, 0)
        assert other.wait(DEADLINE) == 0
        assert said.startswith("step 1: ")
        while hook.pull(DEADLINE).step < 2:
            pass
    expected = {name: value * 1.02 for name, value in load_file(base / "model.safetensors").items()}
    found = newest(job)
    assert_equal(loaded(JobLayout(job).version(found.sequence)), expected)
    held = dict(model.state_dict())
    assert_equal({name: held[name] for name in expected}, expected)
