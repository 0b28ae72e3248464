"""The scripts of docs/slurm.md, as pasted, with stand-ins for Slurm and for what they start."""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.doc_blocks import blocks

DEADLINE = 120.0
_, _, BATCH, EXPLORER = blocks("slurm.md", "bash")
#: All is told in one file; a stand-in's sleep is short.
_ENDS_BY_SIGTERM = """
trap 'echo "$NAME ended" >>"$TOLD"; exit' TERM
echo "$NAME began" >>"$TOLD"
while :; do sleep 1; done
"""
STAND_INS = {
    "sleep": "exec /bin/sleep 0.05",
    "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "scontrol": """
if [[ $1 == show ]]; then printf 'node%d\\n' 0 1 2 3; else echo "scontrol $*" >>"$TOLD"; fi
""",
    "syncd": f"""
NAME="syncd $1"
if [[ $1 == follow ]]; then {_ENDS_BY_SIGTERM} fi
if [[ ! -e $TOLD.failed ]]; then touch "$TOLD.failed"; exit 1; fi
echo "syncd $*" >>"$TOLD"
until grep -q 'syncd follow ended' "$TOLD"; do sleep 1; done
echo "$NAME ended" >>"$TOLD"
""",
    "vllm": f"NAME=vllm {_ENDS_BY_SIGTERM}",
    "python": f"NAME=rollouts {_ENDS_BY_SIGTERM}",
    "torchrun": """
echo "training of $*" >>"$TOLD"
until [[ -e ${*: -1} || -e $TOLD.trained ]]; do sleep 1; done
exit "$STATUS"
""",
}


@pytest.mark.parametrize(
    ("time_is_up", "status", "queued_again"),
    [
        pytest.param(False, 0, False, id="trained"),
        pytest.param(True, 0, True, id="time-is-up"),
        pytest.param(False, 7, False, id="failed"),
    ],
)
def test_the_batch_script_ends_what_it_has_begun(
    tmp_path: Path, *, time_is_up: bool, status: int, queued_again: bool
) -> None:
    bins = tmp_path / "bin"
    bins.mkdir()
    for name, script in STAND_INS.items():
        (bins / name).write_text(f"#!/bin/bash\n{script}\n")
        (bins / name).chmod(0o755)
    (tmp_path / "explorer.sh").write_text(EXPLORER)
    batch = tmp_path / "job.sbatch"
    batch.write_text(BATCH.replace("/scratch/", f"{tmp_path}/scratch/"))
    told = tmp_path / "told"
    told.touch()
    job = subprocess.Popen(
        ["bash", batch],
        cwd=tmp_path,
        env={
            **os.environ,
            "PATH": f"{bins}:{os.environ['PATH']}",
            "USER": "someone",
            "TMPDIR": str(tmp_path),
            "SLURM_JOB_NODELIST": "node[0-3]",
            "SLURM_JOB_ID": "42",
            "SLURM_CPUS_ON_NODE": "8",
            "TOLD": str(told),
            "STATUS": str(status),
        },
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + DEADLINE
        begun = ("training of", "syncd run", "syncd follow began", "vllm began", "rollouts began")
        while any(one not in told.read_text() for one in begun):
            assert time.monotonic() < deadline, told.read_text()
            time.sleep(0.05)
        if time_is_up:
            job.send_signal(signal.SIGUSR1)
        else:
            (tmp_path / "told.trained").touch()
        assert job.wait(DEADLINE) == status
    finally:
        with contextlib.suppress(ProcessLookupError):  # all have ended by themselves
            os.killpg(job.pid, signal.SIGKILL)  # as Slurm does with what a batch script leaves
        job.wait()
    said = told.read_text()
    folder = tmp_path / "scratch" / "someone" / "jobs" / "qwen-grpo"
    assert f"syncd run {folder} --exit-when-idle" in said, "after a failure, too"
    assert "syncd follow ended" in said
    assert ("syncd run ended" in said) or status
    assert ("scontrol requeue 42" in said) is queued_again
    assert f"train.py {folder} " in said


def test_the_trainer_is_asked_to_stop_by_a_file(tmp_path: Path) -> None:
    given: dict[str, object] = {}
    (pasted,) = blocks("slurm.md")
    exec(pasted, given)  # noqa: S102 # what users run
    asked_to_stop = given["asked_to_stop"]
    assert callable(asked_to_stop)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        stop = tmp_path / "job.stop"
        assert asked_to_stop(str(stop), "cpu") is False
        stop.touch()
        assert asked_to_stop(str(stop), "cpu") is True
    finally:
        dist.destroy_process_group()
