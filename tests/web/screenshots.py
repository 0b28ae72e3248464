"""``python -m tests.web.screenshots``: the pictures of docs/web.md.

A real daemon publishes what this program saves, step by step, and real explorers take it. The files
are made small by pngquant.
"""

import base64
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from syncd.protocol.reports import TrainerReport
from tests.jobs import SmallJob
from tests.multiprocess.processes import ENVIRONMENT, Daemon, wait_for_step
from tests.web.chromium import Browser, browser
from tests.web.served import served

_TO = Path(__file__).parents[2] / "docs" / "images"
_STEPS = 14
#: Seconds between two saves.
_PACE = 6.0
#: Seconds that an explorer takes to load a version.
_LOADS = {"node-0": 0.3, "node-1": 0.8, "node-2": 1.5, "node-3": 4.0}


def main() -> None:
    """Work for some minutes, then photograph the page."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        job = SmallJob(Path(name) / "qwen-grpo")
        stack.enter_context(Daemon(job.root))
        for explorer, seconds in _LOADS.items():
            stack.callback(_end, _follow(job.root, explorer, seconds))
        server = stack.enter_context(served(job.root))
        page = stack.enter_context(browser(Path(name) / "profile"))
        for step in range(1, _STEPS + 1):
            time.sleep(_PACE)
            job.save(step, *map(float, range(500_000)))
            told = TrainerReport(
                run_id="r", world_size=8, status="running", step=step, time=time.time()
            )
            job.put_record(job.layout.trainer_report, told)
        wait_for_step(job.root, _STEPS)
        _photograph(page, server.address, "web", 1280, 1172, dark=False)
        _photograph(page, server.address, "web-phone", 360, 1100, dark=True)


def _follow(job: Path, name: str, seconds: float) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", "syncd", "follow", str(job), "--name", name]
    return subprocess.Popen([*argv, "--command", f"sleep {seconds}"], env=ENVIRONMENT)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait()


def _photograph(
    page: Browser, address: str, name: str, width: int, height: int, *, dark: bool
) -> None:
    page.open(address, width=width, dark=dark)
    page.wait("return document.querySelector('.chart circle')", "the charts")
    clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
    told = page.tell("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
    _TO.mkdir(exist_ok=True)
    small = subprocess.run(
        ["pngquant", "-"], input=base64.b64decode(told["data"]), capture_output=True, check=True
    )
    (_TO / f"{name}.png").write_bytes(small.stdout)


if __name__ == "__main__":
    main()
