from __future__ import annotations

from pathlib import Path

import pytest

from syncd.protocol.layout import JobLayout
from syncd.storage.fsio import Storage
from syncd.storage.job import open_job
from tests.multiprocess.processes import LEASE_TIME


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job that counts processes as dead after two seconds, not thirty."""
    path = tmp_path / "job"
    path.mkdir()
    open_job(Storage(), JobLayout(path), lease_time=LEASE_TIME)
    return path
