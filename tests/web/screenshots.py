"""``python -m tests.web.screenshots``: the pictures of docs/web.md, of a demo with explorers."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from tests.multiprocess.processes import ENVIRONMENT, latest, wait_until
from tests.web.chromium import Browser, browser
from tests.web.served import served

_TO: Final = Path(__file__).parents[2] / "docs" / "images"
_STEPS: Final = 16
#: Seconds; a machine that has nothing else to do needs a tenth of it.
_DEADLINE: Final = 300.0
#: name → seconds of rollouts, beside the demo's own two.
_MORE: Final = {"node-1": 0.6, "node-2": 1.1, "node-3": 1.7}


def main() -> None:
    """Run the demo, and photograph its page shortly before its end."""
    with tempfile.TemporaryDirectory() as name:
        room = Path(name)
        demo = ["syncd", "demo", "--steps", str(_STEPS), "--no-tty"]
        processes = [_start(demo, room, TMPDIR=name)]
        try:
            job: Path = wait_until(
                lambda: next(room.glob("syncd-demo-*/job"), None), "a job", _DEADLINE
            )
            wait_until(lambda: _step(job), "a version", _DEADLINE)
            processes += [_start(_explorer(job, *one), room) for one in _MORE.items()]
            wait_until(lambda: _step(job) >= _STEPS - 3, "most of the steps", _DEADLINE)
            with browser(room / "profile") as page, served(job) as server:
                _photograph(page, server.address, "web", 1280, dark=False, height=1060)
                _photograph(page, server.address, "web-phone", 360, dark=True, height=1500)
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait(60)


def _start(module: list[str], room: Path, **more: str) -> subprocess.Popen[bytes]:
    env = {**ENVIRONMENT, **more, "PYTHONPATH": os.getcwd()}
    return subprocess.Popen([sys.executable, "-m", *module], cwd=room, env=env)


def _step(job: Path) -> int:
    found = latest(job)
    return 0 if found is None else found.step


def _explorer(job: Path, name: str, seconds: float) -> list[str]:
    held = job.with_name(f"{name}.safetensors")
    given: dict[str, object] = {
        "job": job,
        "name": name,
        "held": held,
        "last-step": _STEPS,
        "timeout": _DEADLINE,
    }
    given["rollout-seconds"] = seconds
    return ["explorer_hooks.demo", *(str(x) for key in given for x in (f"--{key}", given[key]))]


def _photograph(
    page: Browser, address: str, name: str, width: int, *, dark: bool, height: int
) -> None:
    page.open(address, width=width, dark=dark)
    page.wait("return document.querySelector('.chart circle')", "the charts")
    clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
    told = page.tell("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
    _TO.mkdir(exist_ok=True)
    (_TO / f"{name}.png").write_bytes(base64.b64decode(told["data"]))


if __name__ == "__main__":
    main()
