"""The child process that makes versions, and what its daemon hears from it."""

import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from syncd.checkpoint.merging.options import MergeOptions, Work
from syncd.checkpoint.sandbox import child_process
from syncd.daemon import maker as module
from syncd.daemon import maker_child
from syncd.daemon.maker import MakerProcess
from syncd.daemon.orders import MergeOrder
from syncd.storage.job import Job
from tests.jobs import SmallJob
from tests.makers import end_idle_makers
from tests.multiprocess.processes import wait_until


@pytest.fixture
def order(job: SmallJob, tmp_path: Path) -> MergeOrder:
    folder = tmp_path / "made"
    folder.mkdir()
    return MergeOrder(folder, 1, job.save(1), 1, MergeOptions())


@pytest.fixture
def maker(job: SmallJob) -> Iterator[MakerProcess]:
    maker = MakerProcess(job)
    yield maker
    maker.stop()


def pid(maker: MakerProcess) -> int:
    assert maker._child is not None
    return maker._child.pid


def ended(maker: MakerProcess) -> bool:
    assert maker._child is not None
    return not maker._child.is_running


def test_a_new_process_is_prepared_only_after_the_answer_was_heard(
    maker: MakerProcess, order: MergeOrder
) -> None:
    maker.prepare()
    os.kill(module._idle[-1].pid, signal.SIGSTOP)
    maker.begin(order, Work(lambda: None))
    os.kill(pid(maker), signal.SIGKILL)
    wait_until(lambda: ended(maker), "the process has ended")
    maker.prepare()
    with pytest.raises(OSError, match="SIGKILL"):
        maker.poll()


def test_the_last_progress_told_is_that_all_is_done(maker: MakerProcess, order: MergeOrder) -> None:
    told = [(0, 0)]
    maker.begin(order, Work(lambda: None, lambda *so_far: told.append(so_far)))
    assert wait_until(maker.poll, "the version is made").step == 1
    done, total = told[-1]
    assert done == total > 0


def test_what_a_module_prints_is_no_answer(
    maker: MakerProcess, order: MergeOrder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_idle_makers()
    (tmp_path / "sitecustomize.py").write_text("print('loaded', flush=True)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    maker.begin(order, Work(lambda: None))
    assert wait_until(maker.poll, "the version is made").step == 1


def test_only_answers_of_storage_are_signs_of_life(
    job: SmallJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[object] = []

    class Hangs:
        folder = tmp_path

        def make(self, job: Job, work: Work) -> None:
            work.progress(1, 2)
            for _ in range(9):
                work.cancel()
            assert told == []
            job.storage.names(tmp_path)
            work.cancel()
            assert told == [("at", 1, 2)]

    monkeypatch.setattr(maker_child, "_SIGN", 0)
    monkeypatch.setattr(maker_child, "_tell", lambda *what: told.append(what))
    monkeypatch.setattr(maker_child, "decoded", lambda *_: Hangs())
    maker_child._carry_out(str(job.layout.root), [])
    assert told[-1] == ("made",)


def test_an_order_that_an_ending_process_missed_is_given_again(
    maker: MakerProcess, order: MergeOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_idle_makers()
    with monkeypatch.context() as patch:
        patch.setattr(child_process, "_PROGRAM", "input()")
        maker.begin(order, Work(lambda: None))
    assert wait_until(maker.poll, "the version is made").step == 1


def test_an_order_that_no_process_takes_is_an_error(
    maker: MakerProcess, order: MergeOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_idle_makers()
    monkeypatch.setattr(child_process, "_PROGRAM", "pass")
    maker._flaws = ["x" * 2**20]  # more than a pipe takes
    with pytest.raises(OSError, match="process that makes versions ended"):
        maker.begin(order, Work(lambda: None))


def test_many_jobs_keep_few_processes(tmp_path: Path) -> None:
    makers = []
    for number in range(4):
        job, folder = SmallJob(tmp_path / f"job-{number}"), tmp_path / f"made-{number}"
        folder.mkdir()
        makers.append(MakerProcess(job))
        makers[-1].begin(MergeOrder(folder, 1, job.save(1), 1, MergeOptions()), Work(lambda: None))
    assert len({pid(maker) for maker in makers}) == 4
    for maker in makers:
        assert wait_until(maker.poll, "the version is made").step == 1
        maker.prepare()
    assert len(module._idle) == 2


def test_an_answer_can_be_waited_for_until_it_is_heard(
    maker: MakerProcess, order: MergeOrder
) -> None:
    def readable(seconds: float) -> bool:
        return bool(maker.output and select.select([maker.output], [], [], seconds)[0])

    maker.begin(order, Work(lambda: None))
    assert readable(60)
    assert readable(0)
    made = wait_until(maker.poll, "the version is made")
    assert (made.step, maker.output) == (1, None)
