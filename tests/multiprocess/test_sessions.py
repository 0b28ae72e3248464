"""Heartbeats that their owner keeps up."""

from __future__ import annotations

import os
from pathlib import Path

from syncd.protocol.layout import JobLayout
from syncd.storage.sessions import Session
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


def test_a_session_beats_on_when_its_folder_was_away(job: Path) -> None:
    layout = JobLayout(job)
    away = job.with_name("unmounted")
    with Session(layout, 0.6) as session:
        path = layout.session(session.id)
        job.rename(away)
        moved = away / path.relative_to(job)
        before = moved.stat().st_mtime_ns
        wait_until(lambda: moved.stat().st_mtime_ns != before, "it beats where it is")
        away.rename(job)
        before = path.stat().st_mtime_ns
        wait_until(lambda: path.stat().st_mtime_ns != before, "it beats again")
