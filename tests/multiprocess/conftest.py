from collections.abc import Iterator
from pathlib import Path

import pytest

from syncd.storage.fsio import Storage
from syncd.storage.job import Job
from tests.multiprocess.processes import LEASE_TIME
from tests.multiprocess.shared_job import SharedJob


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job that counts processes as dead after two seconds, not thirty."""
    path = tmp_path / "job"
    path.mkdir()
    Job.at(path, Storage()).open(lease_time=LEASE_TIME)
    return path


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[SharedJob]:
    """Such a job on two mounts; the daemon is to be on one of them, all others on the other."""
    made = SharedJob.made_in(tmp_path, lease_time=LEASE_TIME)
    yield made
    made.remove()
