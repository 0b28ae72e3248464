"""What ``docs/getting-started.md`` has people type, in three terminals and a fourth."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from tests.doc_blocks import ROOT, blocks
from tests.multiprocess.processes import newest, report, wait_until
from tests.multiprocess.terminal import LONG, Terminal

PAGE = "getting-started.md"
INSTALL, MAKE, RUN, TRAIN, EXPLORE, LOOK, KILL, RUN_AGAIN, LOOK_AGAIN, CLEAN = blocks(PAGE, "sh")
FILES = dict(zip(("model.py", "train.py", "explore.py"), blocks(PAGE), strict=True))
#: As many steps as it takes to kill a daemon in between; the page has time to look at it.
STEPS = 6


def fewer(block: str) -> str:
    """The same command of fewer and shorter steps."""
    program, found, seconds = block.strip().partition(" 300")
    assert found
    return f"{program} {STEPS} {'0.3' if seconds else ''}"


def numbers(pattern: str, lines: list[str]) -> list[float]:
    """The one number of each line."""
    return [float(number) for line in lines for number in re.findall(pattern, line)]


def works(job: Path, epoch: int) -> bool:
    found = report(job)
    return found is not None and found.epoch == epoch


def test_what_a_newcomer_types_trains_serves_and_outlives_a_daemon(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path)
    terminal.run(MAKE)
    terminal.folder = tmp_path / "first"
    for name, text in FILES.items():
        assert f"`{name}`" in (ROOT / "docs" / PAGE).read_text()
        (terminal.folder / name).write_text(text)
    job = terminal.folder / "job"

    with (
        terminal.started(fewer(TRAIN)) as trainer,
        terminal.started(fewer(EXPLORE)) as explorer,
    ):
        with terminal.started(RUN) as daemon:
            wait_until(lambda: explorer.lines, "the explorer has a version", LONG)
            seen = terminal.run(LOOK)
            assert "explorer-0" in seen
            assert "announced step" in seen
            terminal.run(KILL)
            assert daemon.status() == -signal.SIGKILL
        assert trainer.status() == 0, "nobody waits for the daemon"
        with terminal.started(RUN_AGAIN) as daemon:
            # Where much else is done here, all was published before the first one was killed.
            wait_until(lambda: works(job, 2), "the second daemon works")
            assert explorer.status() == 0
            assert newest(job).step == STEPS
            daemon.ctrl_c()
            assert daemon.status() == 0
    losses = numbers(r"loss ([\d.]+), stood still \d+ ms$", trainer.lines)
    assert len(losses) == STEPS
    assert losses[-1] < losses[0]
    steps = numbers(r"^step (\d+): after 3, 4, 5, 6 comes \d+$", explorer.lines)
    assert steps == sorted(set(steps))
    assert steps[-1] == STEPS

    seen = terminal.run(LOOK_AGAIN)
    assert "explorer-0" in seen
    terminal.run(CLEAN)
    assert not terminal.folder.exists()
