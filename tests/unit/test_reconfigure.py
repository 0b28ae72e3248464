"""A loop that is told something else between two rounds works as if it had been told so before."""

import subprocess
import sys
from pathlib import Path

import pytest

from syncd.checkpoint.version import read_manifest
from syncd.daemon.config import LIVE_KEYS, DaemonConfig
from syncd.daemon.service import Participants
from syncd.storage.judge import Liveness
from syncd.storage.sessions import Session
from tests.commands import invoke
from tests.jobs import LEASE_TIME, SmallJob
from tests.places import ROOT
from tests.storages import Clock


@pytest.mark.slow
def test_the_next_version_is_made_by_the_new_configuration(job: SmallJob) -> None:
    with job.daemon(DaemonConfig()) as loop:
        loop.publish(1)
        loop.config = DaemonConfig(cast="bf16", digests=False)
        loop.publish(2)
    first, second = (read_manifest(job.storage, job.version(n)) for n in (1, 2))
    assert (first.tensors[0].dtype, first.digests) == ("F32", "xxh3-128")
    assert (second.tensors[0].dtype, second.digests) == ("BF16", "off")


def test_what_was_kept_goes_at_the_next_round(job: SmallJob) -> None:
    with job.daemon(DaemonConfig(keep=9, prune_steps=False)) as loop:
        loop.publish(1, 2, 3)
        loop.run_once()
        assert (len(job.versions), job.audit) == (3, [])
        loop.config = DaemonConfig(keep=1)
        loop.run_once()
        loop.run_once()
        assert job.versions == ["v000003"]
        assert {name for what, name in job.audit if what == "step"} == {
            "global_step_1",
            "global_step_2",
        }


def test_a_dead_explorer_s_lease_goes_by_the_new_grace(job: SmallJob) -> None:
    with job.daemon(DaemonConfig(dead_reader_grace=10_000)) as loop:
        loop.publish(1)
        job.lease(1, "nobody-1")
        loop.rounds(20, 5)
        assert job.audit == []
        loop.config = DaemonConfig(dead_reader_grace=0)
        loop.run_once()
        assert [what for what, _ in job.audit] == ["lease"]


def test_explorers_are_told_of_a_new_limit(job: SmallJob) -> None:
    with job.daemon() as loop:
        loop.config = DaemonConfig(max_loading=2)
        loop.run_once()
        assert job.daemon_says.max_loading == 2


def test_a_longer_tick_lets_nobody_live_longer(job: SmallJob, clock: Clock) -> None:
    sessions = [Session(job.layout, LEASE_TIME) for _ in range(40)]
    looked = Participants(job, LEASE_TIME, clock=clock)
    looked.look(0.2)
    # Nobody beats any more, by this clock; each is looked at three times a lease at least.
    for _ in range(8):
        clock.advance(LEASE_TIME / 4)
        looked.look(LEASE_TIME / 4)
    states = set(looked._lookout._last.values())
    for session in sessions:
        session.close()
    assert states == {Liveness.DEAD}


def test_what_a_running_daemon_hears_of_is_what_the_loop_takes_over() -> None:
    # Each of these is read from the configuration that each round is handed; one that is added here
    # needs a test above, or in tests/multiprocess/test_reload.py.
    assert {
        "tick", "keep", "deltas", "keep_deltas", "digests", "cast", "names", "max_shard_size",
        "max_loading",
        "prune_steps", "prune_foreign", "refuse_nonfinite", "dead_reader_grace", "exit_when_idle",
        "log_format", "log_level",
    } == LIVE_KEYS  # fmt: skip


def test_a_daemon_without_metrics_does_not_load_what_makes_them() -> None:
    code = (
        "import sys, syncd.cli.run, syncd.daemon.host.services;"
        "assert 'prometheus_client' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize("say", ["option", "file", "environment"])
def test_prune_goes_by_the_rules_that_a_daemon_would_be_told(
    job: SmallJob, tmp_path: Path, say: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with job.daemon(DaemonConfig(keep=9, prune_steps=False)) as loop:
        loop.publish(1, 2, 3, 4)
    words = ["prune", str(job.root), "--dry-run", "--no-prune-steps"]
    if say == "option":
        words += ["--keep", "3"]
    elif say == "file":
        (tmp_path / "job.toml").write_text("keep = 3\nprune_steps = true\n")
        words += ["--config", str(tmp_path / "job.toml")]
    else:
        monkeypatch.setenv("SYNCD_KEEP", "3")
    result = invoke(*words)
    assert result.exit_code == 0
    assert [line.split(":")[0] for line in result.output.splitlines()] == ["would prune version v1"]
