"""Four explorers, as processes with engines, take turns to load, and two of them are killed."""

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from syncd.protocol.layout import JobLayout
from tests.jobs import SmallJob
from tests.multiprocess.explorer_processes import ended, serves
from tests.multiprocess.processes import ENVIRONMENT, Daemon, explorer_report, wait_until

#: Says in a file when its engine stops and goes on; a load ends with a line on stdin.
PROGRAM = """
import sys
from explorer_hooks.engines.fake import FakeEngine
from explorer_hooks.hook import ExplorerHook
job, name, log = sys.argv[1:]
class Engine(FakeEngine):
    def say(self, sign):
        with open(log, "a") as file:
            file.write(f"{sign}{name}\\n")
    def pause(self):
        self.say("+")
    def load(self, version):
        super().load(version)
        sys.stdin.readline()
    def resume(self):
        self.say("-")
with ExplorerHook(job, name, Engine()) as hook:
    while True:
        hook.pull()
"""


@pytest.mark.parametrize("most", [1, 2])
def test_no_more_stand_still_than_may_and_a_killed_one_holds_up_nobody(
    job: Path, tmp_path: Path, most: int
) -> None:
    log, layout, trainer = tmp_path / "log", JobLayout(job), SmallJob(job)
    with Daemon(job, "--max-loading", str(most)), ExitStack() as stack:
        wait_until(layout.daemon_report.exists, "the explorers can know the limit")
        running = {
            name: stack.enter_context(
                ended(
                    subprocess.Popen(
                        [sys.executable, "-c", PROGRAM, str(job), name, str(log)],
                        stdin=subprocess.PIPE, env=ENVIRONMENT, text=True,
                    )
                )
            )
            for name in ("e0", "e1", "e2", "e3")
        }  # fmt: skip

        def those(*, load: bool) -> list[str]:
            return [name for name in running if explorer_report(job, name).loading is load]

        def round_begins(step: int) -> None:
            trainer.save(step)
            wait_until(lambda: len(those(load=True)) == most, "as many load as may")
            wait_until(lambda: len(those(load=False)) == len(running) - most, "the others wait")

        def round_ends(step: int) -> None:
            for process in running.values():
                assert process.stdin is not None
                process.stdin.write("\n")
                process.stdin.flush()
            wait_until(lambda: all(serves(job, name, step) for name in running), "all serve it")

        wait_until(lambda: all(layout.explorer(name).exists() for name in running), "all are there")
        round_begins(1)
        round_ends(1)
        round_begins(2)
        for victim in (those(load=False)[0], those(load=True)[0]):
            running.pop(victim).kill()
            with log.open("a") as file:
                file.write(f"-{victim}\n")
        round_ends(2)
    still: set[str] = set()
    for sign, name in ((line[0], line[1:]) for line in log.read_text().split()):
        (still.add if sign == "+" else still.discard)(name)
        assert len(still) <= most, log.read_text()
    assert not still
