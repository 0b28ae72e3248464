"""Heartbeats that their owner keeps up."""

import errno
import logging
import os
from pathlib import Path

import pytest

from syncd.protocol.layout import JobLayout
from syncd.storage.fsio import Storage
from syncd.storage.job import Job
from syncd.storage.judge import Judge
from syncd.storage.sessions import DaemonLock, Session
from tests.multiprocess.processes import wait_until


def test_a_session_whose_heartbeat_was_taken_away_beats_again_under_its_name(job: Path) -> None:
    layout = JobLayout(job)
    with Session(layout, 0.6) as session:
        path = layout.session(session.id)
        for _ in range(2):
            os.unlink(path)
            wait_until(path.exists, "the heartbeat is back")
        before = path.stat().st_mtime_ns
        wait_until(lambda: path.stat().st_mtime_ns != before, "and it beats")
    assert not path.exists()


def test_a_session_whose_folder_became_a_link_makes_nothing_where_that_leads(
    job: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "syncd")
    layout = JobLayout(job)
    outside, aside = tmp_path / "outside", tmp_path / "aside"
    outside.mkdir()
    with Session(layout, 0.3) as session:
        layout.sessions.rename(aside)
        layout.sessions.symlink_to(outside)
        (aside / layout.session(session.id).name).unlink()
        wait_until(lambda: "cannot be renewed yet" in caplog.text, "it tried to beat again")
        assert "'sessions' is a link, and links are not followed" in caplog.text
        assert os.listdir(outside) == []
        layout.sessions.unlink()
        aside.rename(layout.sessions)
        wait_until(layout.session(session.id).exists, "it beats again")
    assert "/proc/" not in caplog.text
    assert os.listdir(layout.sessions) == []


@pytest.mark.parametrize("duration", [0.3, 7.0])
def test_a_session_beats_again_when_what_took_its_name_is_gone(
    job: Path, caplog: pytest.LogCaptureFixture, duration: float
) -> None:
    caplog.set_level(logging.DEBUG, "syncd")
    layout = JobLayout(job)
    other = job / "other"
    other.write_text(
        f"filelock/2\npid=1\nhost=elsewhere\nmode=lease\ntoken=1\nduration={duration}\n"
    )
    with Session(layout, 0.3) as session:
        path = layout.session(session.id)
        other.rename(path)
        wait_until(lambda: "cannot be renewed yet" in caplog.text, "it tried to beat again")
        path.unlink(missing_ok=True)
        wait_until(lambda: path.exists() and f"pid={os.getpid()}\n" in path.read_text(), "it beats")
    assert not path.exists()


def test_a_daemon_whose_folder_became_a_link_takes_no_lock_where_that_leads(
    job: Path, tmp_path: Path
) -> None:
    layout, storage = JobLayout(job), Storage(job)
    lock = DaemonLock(Job(storage, layout), 0.6, Judge(storage, 0.6))
    outside = tmp_path / "outside"
    layout.state.rename(outside)
    layout.state.symlink_to(outside)
    for _ in range(2):
        with pytest.raises(OSError, match="is a link") as refused:
            lock.try_acquire()
        assert refused.value.errno == errno.ELOOP
    assert not (outside / layout.daemon_lock.name).exists()
