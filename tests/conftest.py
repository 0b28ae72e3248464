"""What most tests begin with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs import Job
from tests.storages import Clock


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path / "job")


@pytest.fixture
def clock() -> Clock:
    return Clock()
