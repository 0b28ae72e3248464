"""A step's folder is made, whatever else happens to its draft."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from syncd.daemon.collect import Collector
from syncd.storage.steps import make_step_folder
from tests.jobs import Job
from tests.storages import Clock, FastStorage, RuledStorage, once, refuse


@pytest.mark.parametrize("there", [False, True])
def test_a_step_folder_is_made_though_its_draft_is_collected_at_that_moment(
    job: Job, clock: Clock, there: bool
) -> None:
    if there:
        job.save(3)
    collector = Collector(FastStorage(), job.layout, 60.0, clock=clock)

    def collect(*_: Path) -> None:
        clock.advance(60)
        collector.run_once(())

    storage = RuledStorage(once("rename", collect, where="global_step_3"))
    make_step_folder(storage, job.layout, 3)
    assert job.layout.step(3).is_dir()
    assert storage.count("mkdir", job.layout.drafts) == 2
    assert list(job.layout.drafts.iterdir()) == []


def test_where_the_job_goes_away_it_is_not_tried_for_ever(job: Job) -> None:
    storage = RuledStorage(refuse("rename", errno.ESTALE))
    with pytest.raises(OSError, match="Stale"):
        make_step_folder(storage, job.layout, 3)
    assert list(job.layout.drafts.iterdir()) == []
