"""A trainer whose weights are elsewhere, a daemon and an explorer."""

from pathlib import Path

from explorer_hooks.reader import Reader
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import REMOTE_PATH
from tests.multiprocess.processes import DEADLINE, IMPATIENT, Daemon, wait_for_step, wait_until


def test_an_explorer_gets_each_path_and_one_that_never_comes_stops_nobody(job: Path) -> None:
    layout = JobLayout(job)
    with (
        Daemon(job, program=IMPATIENT),
        Reader(job, "explorer", poll=0.2) as reader,
    ):
        for step, path in ((1, "tinker://run/1"), (2, ""), (3, "tinker://run/3")):
            layout.step(step).mkdir()
            (layout.step(step) / REMOTE_PATH).write_text(path)
            layout.state_pointer.write_text(f"{step}\n")
            if not path:
                wait_until(lambda: list(layout.quarantine.glob("step_2-*")), "it is given up")
                continue
            version = reader.next_version(wait_for_step(job, step).sequence - 1, DEADLINE)
            version.verify()
            assert (version.step, version.remote_path) == (step, path)
            version.release()
