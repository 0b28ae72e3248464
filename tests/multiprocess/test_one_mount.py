"""A mount within a job: told before a save fails, and no save is lost."""

from pathlib import Path

import pytest

from syncd.daemon.config import DaemonConfig
from syncd.daemon.service import Service
from syncd.doctor.examination import judge_border
from syncd.doctor.finding import Finding
from syncd.protocol.reports import Blocked
from syncd.storage.job import Job, step_folders
from tests.jobs import SmallJob
from tests.multiprocess.mounts import inner, unmount
from tests.multiprocess.processes import report, serving, wait_for_step, wait_until

CONFIG = DaemonConfig(tick=0.1)


def blocked(root: Path) -> Blocked | None:
    """What blocks the daemon now, the worst first."""
    says = report(root)
    return says.blocked[0] if says and says.blocked else None


def judged(job: Job) -> Finding:
    """What ``syncd doctor`` says, and nothing is left of it."""
    room = job.layout.state / "room"
    room.mkdir()
    try:
        return judge_border(job, room, is_sound=True)
    finally:
        job.storage.remove_tree(room)
        assert not list(job.layout.root.rglob(".tmp-one-mount"))


@pytest.mark.parametrize(
    ("name", "kind"),
    [("published", "tmpfs"), ("published", "bind"), ("published", "overlay"), (".syncd", "bind"),
     (".syncd/epoch", "bind"), (".syncd/leases", "bind"), (".syncd/bench", "tmpfs"),
     ("deltas", "bind")],
)  # fmt: skip
def test_a_mount_in_a_job_is_told_before_any_save_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, kind: str
) -> None:
    at = tmp_path / "job" / name
    at.parent.mkdir(parents=True)
    with inner(at, kind=kind):
        job = SmallJob(tmp_path / "job")
        finding = judged(job)
        assert finding.verdict == "fail"
        assert f"{at} is a mount of its own" in finding.words
        with serving(Service(job.root, CONFIG)):
            told = f"{at} is a mount of its own"
            line = wait_until(lambda: next((x for x in caplog.messages if told in x), None), told)
            assert finding.advice in line
            if name != ".syncd/epoch":  # otherwise no report can be written either
                found = wait_until(lambda: blocked(job.root), "the report")
                assert (found.reason, found.remedy) == ("filesystem", finding.advice)


def test_nothing_is_lost_behind_a_mount_and_all_goes_on_once_it_is_gone(tmp_path: Path) -> None:
    published = tmp_path / "job" / "published"
    published.parent.mkdir()
    with inner(published):
        job = SmallJob(tmp_path / "job")
        job.save(1, receipts=False)
        with serving(Service(job.root, CONFIG)):
            for step in (1, 2, 3):
                job.save(step, receipts=False)
                said = f"step {step} could not be merged"
                wait_until(lambda: said in str(report(job.root)), said)  # noqa: B023 - called here
            assert step_folders(job) == [1, 2, 3]
            unmount(published)
            wait_for_step(job.root, 3)
            wait_until(lambda: blocked(job.root) is None, "nothing is blocked")
            (job.layout.leases / ".tmp-one-mount").mkdir()  # of a trial that was killed
            assert judged(job).verdict == "ok"


def test_a_step_that_is_a_mount_is_named(tmp_path: Path) -> None:
    job = SmallJob(tmp_path / "job")
    with inner(job.step(1)):
        job.save(1)
        finding = judged(job)
    assert (finding.verdict, str(job.step(1)) in finding.words) == ("fail", True)


def test_steps_in_the_lower_layer_of_an_overlay_are_told_and_new_ones_are_served(
    tmp_path: Path,
) -> None:
    top = tmp_path / "top"
    SmallJob(tmp_path / "top.other" / "lower" / "job").save(1)
    with inner(top, kind="overlay"):
        job = SmallJob(top / "job")
        step = str(job.step(1))
        finding = judged(job)
        assert (finding.verdict, step in finding.words) == ("fail", True)
        job.save(2)
        with serving(Service(job.root, CONFIG)):
            wait_for_step(job.root, 2)
            found = wait_until(lambda: blocked(job.root), "the daemon tells of step 1")
        assert (found.reason, step in found.what) == ("prune", True)
        assert "redirect_dir=on" in found.remedy
        assert step_folders(job) == [1, 2]
