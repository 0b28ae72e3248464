"""What the page shows of a job is of one moment, whatever the job does while it is read."""

from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncd.daemon.config import DaemonConfig
from syncd.protocol.reports import ExplorerReport
from syncd.storage.fsio import Storage
from syncd.web.jobs import Seen, View
from tests.jobs import SmallJob
from tests.storages import READS


def test_tiles_and_table_of_a_busy_job_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, steps, due = SmallJob(tmp_path / "job"), count(1), [0]
    view = View(job.root, 200)

    def interrupted(name: str) -> Any:
        real = getattr(Storage, name)

        def method(self: Storage, *given: Any) -> Any:
            if due:
                due[0] -= 1
                if due[0] < 0:
                    rest, due[:] = due[1:], []  # its own calls are not interrupted
                    go_on()
                    due[:] = rest
            return real(self, *given)

        return method

    with job.daemon(DaemonConfig(keep=2)) as loop:

        def go_on() -> None:
            """A version is published, live on an explorer, and an older one pruned."""
            step = next(steps)
            loop.publish(step)
            served = {"sequence": step, "time": 1.0}
            told = ExplorerReport.model_validate(
                {"name": "node", "session": "s", "status": "running", "step": step, **served,
                 "loads": [served]}
            )  # fmt: skip
            job.put_record(job.layout.explorers / "node.json", told)
            loop.run_once()

        go_on()
        for name in READS:
            monkeypatch.setattr(Storage, name, interrupted(name))

        @given(st.lists(st.integers(0, 60), max_size=4))
        def agree(calls: list[int]) -> None:
            due[:] = calls
            view.want_history()
            seen = view.look()
            due[:] = []
            check(seen)

        agree()


def check(seen: Seen) -> None:
    status, rows = seen.status, (seen.history or {})["versions"]
    latest = status["latest"]["sequence"]
    assert [row["version"] for row in rows if row["latest"]] == [latest]
    assert rows[-1]["version"] == latest
    on_disk = {version["sequence"] for version in status["versions"]}
    assert {row["version"] for row in rows if row["on_disk"]} == {n for n in on_disk if n <= latest}
    assert not any(row["on_disk"] and row["pruned"] for row in rows)
    events = [event for event in status["events"] if "version" in event]
    assert all(event["version"] <= latest for event in events)
    (served,) = {explorer["sequence"] for explorer in status["explorers"]}
    assert max(row["version"] for row in rows if row["live"]) <= served <= latest
