"""Explorers on one host, as processes: they share copies, are killed, and follow a daemon."""

import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from explorer_hooks.engines.fake import FakeEngine
from explorer_hooks.hook import ExplorerHook
from syncd.coordination import TrainerSynchronizer
from syncd.protocol.layout import JobLayout
from syncd.protocol.policy import RunningStatus
from tests.jobs import SmallJob
from tests.multiprocess.explorer_processes import ended, following, serves, staging
from tests.multiprocess.processes import (
    DEADLINE,
    LEASE_TIME,
    Daemon,
    explorer_report,
    wait_for_step,
    wait_until,
    wait_until_gone,
)


def told(process: subprocess.Popen[str], event: str) -> dict[str, Any]:
    """Wait until a process says so."""
    lines = process.stdout
    assert lines is not None
    for line in lines:
        said = json.loads(line)
        if said["event"] == event:
            return said
    raise AssertionError(f"it never said {event!r}")


def test_one_process_of_a_host_copies_and_hands_over_when_it_is_killed(
    job: Path, tmp_path: Path
) -> None:
    stage = tmp_path / "stage"
    made = SmallJob(job)
    made.save(1)
    made.run()
    with ExitStack() as stack:
        killed = stack.enter_context(ended(staging(job, "killed", stage, "--hangs")))
        told(killed, "copies")
        others = [
            stack.enter_context(ended(staging(job, f"other-{number}", stage)))
            for number in range(2)
        ]
        for other in others:
            told(other, "found")
        killed.kill()
        held = [told(other, "holds") for other in others]
        assert len({one["folder"] for one in held}) == 1
        copied = sorted(one["copied"] for one in held)
        assert copied[0] == 0
        assert copied[1] > 0
        others[0].communicate("")
        folder = Path(held[0]["folder"])
        assert folder.exists()  # the other one holds it
        others[1].communicate("")
        assert [other.returncode for other in others] == [0, 0]
        assert os.listdir(folder.parent) == [".copier"]


def test_a_follower_moves_a_link_ends_at_sigterm_and_survives_kills(
    job: Path, tmp_path: Path
) -> None:
    trainer, layout = SmallJob(job), JobLayout(job)
    link, stage = tmp_path / "model", tmp_path / "stage"
    options = ("--link", link, "--stage", stage)
    with Daemon(job, "--keep", "1") as daemon:
        trainer.save(1)
        with ended(following(job, "server", *options)) as follower:
            wait_until(lambda: serves(job, "server", 1), "version 1 is linked")
            assert stage in link.resolve().parents
            found = explorer_report(job, "server")
            assert found.reload is not None
            assert (found.reload.staged, found.requests) == (True, 0)
            trainer.save(2)
            wait_until(lambda: serves(job, "server", 2), "version 2 is linked")
            follower.kill()
        trainer.save(3)
        wait_for_step(job, 3)
        assert (link / "config.json").exists()  # nobody holds it now, and it is still there
        with ended(following(job, "server", *options)) as follower:
            wait_until(lambda: serves(job, "server", 3), "version 3 is linked")
            daemon.kill()
            layout.latest.write_bytes(b"torn")
            with Daemon(job, "--keep", "1"):
                trainer.save(4)
                wait_until(lambda: explorer_report(job, "server").step == 4, "it has the last step")
                follower.terminate()
                assert follower.wait(DEADLINE) == 0
        assert explorer_report(job, "server").status == "stopped"
        assert not any(any(folder.iterdir()) for folder in layout.leases.iterdir())
        assert (link / "config.json").exists()
        assert len(list(link.resolve().parent.iterdir())) == 2  # that copy, and the lock


def test_a_follower_gives_versions_to_a_command_and_refuses_what_it_does_not_take(
    job: Path, tmp_path: Path
) -> None:
    trainer, told_to = SmallJob(job), tmp_path / "told"
    run = f'echo "$SYNCD_STEP" >> {told_to}; test "$SYNCD_STEP" != 2'
    with Daemon(job), ended(following(job, "server", "--command", run)) as follower:
        trainer.save(1)
        wait_until(lambda: serves(job, "server", 1), "version 1 is taken")
        trainer.save(2)
        wait_until(lambda: explorer_report(job, "server").refused, "version 2 is refused")
        assert explorer_report(job, "server").sequence == 1
        trainer.save(3)
        wait_until(lambda: serves(job, "server", 3), "version 3 is taken")
        assert explorer_report(job, "server").refused is None
        follower.terminate()
        assert follower.wait(DEADLINE) == 0
    assert told_to.read_text().split() == ["1", "2", "1", "3"]


def test_an_engine_that_hangs_in_a_load_keeps_its_lease(job: Path) -> None:
    trainer, layout, engine = SmallJob(job), JobLayout(job), FakeEngine()
    options = ("--keep", "1", "--dead-reader-grace", "0.1")
    with Daemon(job, *options) as daemon:
        trainer.save(1)
        wait_for_step(job, 1)
        with ExplorerHook(job, "explorer", engine) as hook, engine.hanging("load") as hang:
            hook.start()
            assert hang.reached.wait(DEADLINE)
            for step in (2, 3):
                trainer.save(step)
                wait_for_step(job, step)
            heartbeat = layout.session(hook.synchronizer.session_id)
            beats = {heartbeat.stat().st_mtime_ns}
            wait_until(
                lambda: beats.add(heartbeat.stat().st_mtime_ns) or len(beats) > 3 * LEASE_TIME,
                "it was alive for more than a lease time",
            )
            daemon.wait_for_log("pruned version v2")
            assert layout.version(1).exists()
            hang.release()
            assert hook.wait_until_served(DEADLINE).sequence >= 1
            wait_until(lambda: hook.version and hook.version.step == 3, "it has the last")
        wait_until_gone(layout.version(1))


def test_the_last_save_of_a_run_is_served_by_an_explorer_that_came_before_its_trainer(
    job: Path,
) -> None:
    saves = SmallJob(job)
    with (
        ThreadPoolExecutor(1) as aside,
        Daemon(job),
        ExplorerHook(job, "explorer", FakeEngine()) as hook,
    ):
        first = aside.submit(hook.after_step, 1)
        with TrainerSynchronizer(job) as trainer:
            trainer.set_trainer_status(RunningStatus.RUNNING)
            for step in (1, 2):
                saves.save(step)
                trainer.set_model_state_dict(None, step)
                if step == 1:
                    wait_for_step(job, 1)
                    served = first.result(DEADLINE)
                    assert served is not None
                    assert served.step == 1
        # Its trainer has closed, and the daemon has seen the pointer move, at best.
        last = hook.after_step(2)
        assert last is not None
        assert last.step == 2
        assert hook.after_step(3) == last
