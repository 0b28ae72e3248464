"""A page that is served in this process, and what explorers and daemons say of themselves."""

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from syncd.protocol.policy import Version
from syncd.protocol.reports import DaemonReport, ExplorerReport, loads_with
from syncd.web.jobs import Jobs
from syncd.web.server import Server
from tests.jobs import SmallJob
from tests.ports import listening


def served(*folders: Path, port: int = 0, **more: Any) -> AbstractContextManager[Server]:
    """The server of some jobs, which reads them whenever it is asked."""
    jobs = Jobs(folders, 200, **{"every": 0.0, "patience": 60.0, **more})
    return listening(Server(jobs, port))


def explorer(
    job: SmallJob, name: str, sequence: int | None, *, file: str = "", **more: Any
) -> None:
    """An explorer's report, its lease and its heartbeat."""
    version = None if sequence is None else Version(sequence, sequence)
    told = {"name": name, "session": f"s-{file or name}", "status": "running", "sequence": sequence,
            "step": sequence, "time": 1.0, **more}  # fmt: skip
    report = ExplorerReport.model_validate(told)
    loads = loads_with((), version, report.time, report.reload)
    report = report.model_copy(update={"loads": loads})
    job.put_record(job.layout.explorers / f"{file or name}.json", report)
    if sequence is not None:
        job.lease(sequence, f"s-{file or name}", file or name)
    job.session(f"s-{file or name}").touch()


def daemon(job: SmallJob, time: float, heartbeat: float | None = None, **more: Any) -> None:
    """What a daemon says of itself, and when its heart beat last: by default at this ``time``."""
    path, beat = job.session("daemon"), time if heartbeat is None else heartbeat
    path.touch()
    os.utime(path, (beat, beat))
    told = {"session": "daemon", "host": "trainer-7", "pid": 4242, "epoch": 3, "state": "watching",
            "builds": {"max_shard_size": 10**9, "digests": True, "tick": 1},
            "time": time, **more}  # fmt: skip
    job.put_record(job.layout.daemon_report, DaemonReport(**told))
