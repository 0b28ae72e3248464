"""A step's folder is made, whatever else happens to its draft."""

import errno
from pathlib import Path

import pytest

from syncd.daemon.collect import Collector
from syncd.storage.job import Job, make_step_folder
from tests.jobs import SmallJob
from tests.storages import Clock, RuledStorage, once, refuse


@pytest.mark.parametrize("mark", [None, ".saving"])
@pytest.mark.parametrize("there", [False, True])
def test_a_step_folder_is_made_though_its_draft_is_collected_at_that_moment(
    job: SmallJob, clock: Clock, there: bool, mark: str | None
) -> None:
    if there:
        job.save(3)
    collector = Collector(job, 60.0, clock=clock)

    def collect(*_: Path) -> None:
        for _ in range(6):  # what lies in a draft must lie still for a while
            clock.advance(15)
            collector.run_once(())

    storage = RuledStorage(once("rename", collect, where="global_step_3"))
    make_step_folder(Job(storage, job.layout), 3, mark=mark)
    assert job.step(3).is_dir()
    assert storage.count("mkdir", job.layout.drafts) == 2
    assert list(job.layout.drafts.iterdir()) == []


def test_a_step_folder_with_a_mark_is_never_replaced_by_another_rank_that_makes_it(
    job: SmallJob,
) -> None:
    def rival(*_: Path) -> None:
        make_step_folder(job, 3, mark=".saving")
        (job.step(3) / "its").touch()

    make_step_folder(
        Job(RuledStorage(once("rename", rival, where="global_step_3")), job.layout),
        3,
        mark=".saving",
    )
    make_step_folder(job, 3, mark=".saving")
    assert {path.name for path in job.step(3).iterdir()} == {".saving", "its"}
    assert list(job.layout.drafts.iterdir()) == []


def test_the_draft_of_a_killed_trainer_is_collected_with_what_is_in_it(
    job: SmallJob, clock: Clock
) -> None:
    storage = RuledStorage(refuse("rename", errno.EIO), refuse("unlink", errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        make_step_folder(Job(storage, job.layout), 3, mark=".saving")
    assert len(list(job.layout.drafts.iterdir())) == 1
    collector = Collector(job, 60.0, clock=clock)
    for _ in range(8):
        clock.advance(15)
        collector.run_once(())
    assert list(job.layout.drafts.iterdir()) == []


def test_where_the_job_goes_away_it_is_not_tried_for_ever(job: SmallJob) -> None:
    storage = RuledStorage(refuse("rename", errno.ESTALE))
    with pytest.raises(OSError, match="Stale"):
        make_step_folder(Job(storage, job.layout), 3)
    assert list(job.layout.drafts.iterdir()) == []
