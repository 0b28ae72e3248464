"""``python -m tests.web.screenshots``: the pictures of docs/web.md and docs/operations.md.

A real daemon publishes what this program saves, step by step, and real explorers take it. The files
are made small by pngquant.
"""

import base64
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from syncd.protocol.reports import TrainerReport
from tests.jobs import SmallJob
from tests.multiprocess.explorer_processes import serves
from tests.multiprocess.mounts import Filler, tmpfs
from tests.multiprocess.processes import ENVIRONMENT, Daemon, wait_for_step, wait_until
from tests.web.chromium import Browser, browser
from tests.web.served import served

_TO = Path(__file__).parents[2] / "docs" / "images"
_STEPS = 14
#: Seconds between two saves.
_PACE = 6.0
#: Seconds that an explorer takes to load a version.
_LOADS = {"node-0": 0.3, "node-1": 0.8, "node-2": 1.5, "node-3": 4.0}
_WEIGHTS = [1.0] * 500_000


def main() -> None:
    """Work for some minutes, then photograph the page."""
    with tempfile.TemporaryDirectory() as name, browser(Path(name) / "profile") as page:
        with working(Path(name) / "qwen-grpo") as job, served(job.root) as server:
            for step in range(1, _STEPS + 1):
                time.sleep(_PACE)
                save(job, step)
            wait_for_step(job.root, _STEPS)
            _photograph(page, server.address, "web", 1280, dark=False)
            _photograph(page, server.address, "web-phone", 360, dark=True)
        with without_room(Path(name) / "disk", 5) as full, served(full.root) as server:
            page.open(server.address)
            page.sees("nothing is published", ".note.bad")
            _photograph(page, server.address, "web-fault", 1280, dark=False)


@contextmanager
def working(folder: Path) -> Iterator[SmallJob]:
    """A job with a daemon and explorers."""
    job = SmallJob(folder)
    with Daemon(job.root) as daemon, ExitStack() as stack:
        daemon.wait_for_log("in epoch")
        for explorer, seconds in _LOADS.items():
            stack.callback(_end, _follow(job.root, explorer, seconds))
        yield job


@contextmanager
def without_room(disk: Path, versions: int) -> Iterator[SmallJob]:
    """A job on a disk that has no room for one more version."""
    with tmpfs(disk, megabytes=32), working(disk / "qwen-grpo") as job:
        for step in range(1, versions + 1):
            save(job, step)
            for name in _LOADS:
                wait_until(partial(serves, job.root, name, step), f"{name} serves step {step}")
        Filler(disk).fill("bytes", leave=2_400_000)
        save(job, versions + 1)
        yield job


def save(job: SmallJob, step: int) -> None:
    """What a trainer saves and reports."""
    job.save(step, *_WEIGHTS)
    told = TrainerReport(run_id="r", world_size=8, status="running", step=step, time=time.time())
    job.put_record(job.layout.trainer_report, told)


def _follow(job: Path, name: str, seconds: float) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", "syncd", "follow", str(job), "--name", name]
    return subprocess.Popen([*argv, "--command", f"sleep {seconds}"], env=ENVIRONMENT)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait()


def _photograph(page: Browser, address: str, name: str, width: int, *, dark: bool) -> None:
    page.open(address, width=width, dark=dark)
    page.wait("return document.querySelector('.chart circle')", "the charts")
    end = page.run("return document.querySelector('.charts').getBoundingClientRect().bottom")
    clip = {"x": 0, "y": 0, "width": width, "height": min(end, 3 * width), "scale": 1}
    told = page.tell("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
    _TO.mkdir(exist_ok=True)
    small = subprocess.run(
        ["pngquant", "-"], input=base64.b64decode(told["data"]), capture_output=True, check=True
    )
    (_TO / f"{name}.png").write_bytes(small.stdout)


if __name__ == "__main__":
    main()
