"""Pins, rollbacks and pauses: the commands and the daemon as processes of their own."""

from pathlib import Path

from syncd.checkpoint.version import read_manifest
from syncd.protocol.layout import JobLayout
from syncd.protocol.records import encode
from syncd.protocol.reports import TrainerReport
from syncd.storage.fsio import Storage
from syncd.storage.sessions import DAEMON_SESSION
from tests.multiprocess.processes import (
    Daemon,
    latest,
    published,
    report,
    said_by_syncd,
    verified,
    wait_for_step,
    wait_until,
)
from tests.multiprocess.saves import Constant, save, serve, trainer


def test_a_job_is_paused_rolled_back_and_resumed_while_daemons_come_and_go(job: Path) -> None:
    model = Constant()
    with Daemon(job, "--keep", "9") as daemon:
        for step in (1, 2):
            serve(job, model, step)
        assert said_by_syncd("pause", job) == "paused"
        save(job, model, 3)
        assert said_by_syncd("rollback", job, "v1") == "v1 is served again, as v3"
        verified(job, 3)
        daemon.kill()
    layout, killed = JobLayout(job), report(job).session.removeprefix(DAEMON_SESSION)
    layout.session(killed).write_bytes(b"beats")
    trained = TrainerReport(run_id="r", world_size=1, status="running", session=killed, time=0.0)
    layout.trainer_report.write_bytes(encode(trained))
    said = said_by_syncd("rollback", job, "v2", "--timeout", 60)
    assert "no daemon runs on this job now" in said
    assert "a trainer runs" not in said
    with Daemon(job, "--keep", "9"):
        found = wait_for_step(job, 2)  # asked for while nobody was there
        assert found.sequence == 4
        wait_until(lambda: (told := report(job)) and told.paused, "it keeps to the pause")
        assert "paused by" in said_by_syncd("status", job)
        assert latest(job) == found
        assert said_by_syncd("resume", job) == "resumed"
        assert wait_for_step(job, 3).sequence == 5
        assert read_manifest(Storage(), JobLayout(job).version(5)).rolled_back is None


def test_a_rollback_beside_a_live_trainer_says_how_to_go_on_from_it(job: Path) -> None:
    model = Constant()
    with Daemon(job, "--keep", "9", "--no-prune-steps"):
        serve(job, model, 1)
        with trainer(job, model) as hook:
            hook.after_step(2)
            wait_for_step(job, 2)
            said = said_by_syncd("rollback", job, "v1")
            assert said.startswith("v1 is served again, as v3. But a trainer runs")
            hook.after_step(3)
            assert wait_for_step(job, 3).sequence == 4, "as it says"
            # What it says to do instead.
            assert said_by_syncd("pause", job) == "paused"
            hook.after_step(4)
        assert said_by_syncd("rollback", job, "v1") == "v1 is served again, as v5"
        save(job, model, 2)  # resumed from step 1
        assert latest(job).sequence == 5
        said_by_syncd("resume", job)
        assert wait_for_step(job, 2).sequence == 6, "step 4 is not published before"


def test_what_is_pinned_outlives_the_pruning_of_a_running_daemon(job: Path) -> None:
    model = Constant()
    layout = JobLayout(job)
    with Daemon(job, "--keep", "1", "--no-prune-steps"):
        serve(job, model, 1)
        assert said_by_syncd("pin", job, "v1") == "v1 is pinned"
        assert said_by_syncd("pin", job, 1) == "step 1 is pinned"
    with Daemon(job, "--keep", "1"):
        for step in (2, 3, 4):
            serve(job, model, step)
        wait_until(
            lambda: published(job) == ["v000001", "v000004"] and not layout.step(3).exists(),
            "all but what is pinned is pruned",
        )
        assert layout.step(1).exists()
        assert "v1 pinned, v4" in said_by_syncd("status", job)
        said_by_syncd("unpin", job, "v1")
        said_by_syncd("unpin", job, 1)
        save(job, model, 5)  # step folders are looked at again when something moves
        wait_until(
            lambda: published(job) == ["v000005"] and not layout.step(1).exists(),
            "what is unpinned goes",
        )
