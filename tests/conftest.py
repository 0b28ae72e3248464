"""What most tests begin with."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

from tests.jobs import Job
from tests.lagging import Hosts, LaggingHosts
from tests.storages import Clock


def pytest_configure(config: pytest.Config) -> None:
    for line in (
        "browser: in a real Chromium; skipped where there is none",
        "engine: with a real inference engine; skipped where there is none",
        "lagging: run once on a local disk, and once on a filesystem that lags",
        "mounts: also to be run on two mounts of a share, SYNCD_TEST_MOUNTS=A:B, without torch",
        "local_only(why): in a module that is marked lagging, not to be run on it",
    ):
        config.addinivalue_line("markers", line)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marks = {mark.name for mark in metafunc.definition.iter_markers()}
    if "hosts" in metafunc.fixturenames and "lagging" in marks and "local_only" not in marks:
        metafunc.parametrize("hosts", ["local", "lagging"], indirect=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Workers tell of a test in UTF-8, which has no words for what some of them log."""
    report = yield
    report.sections = [
        (head, text.encode(errors="backslashreplace").decode()) for head, text in report.sections
    ]
    return report


@pytest.fixture
def hosts(request: pytest.FixtureRequest, tmp_path: Path) -> Hosts:
    return LaggingHosts(tmp_path) if getattr(request, "param", "local") == "lagging" else Hosts()


@pytest.fixture
def job(tmp_path: Path, hosts: Hosts) -> Job:
    return Job(tmp_path / "job", hosts=hosts)


@pytest.fixture
def clock() -> Clock:
    return Clock()
