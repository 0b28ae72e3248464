"""A hook that several threads, signal handlers and forks of its process have to do with."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from explorer_hooks import bench
from explorer_hooks.engines.fake import FakeEngine
from explorer_hooks.hook import ExplorerHook
from explorer_hooks.staging import Staging
from syncd.protocol.errors import CancelledError, InvalidSettingsError, WaitTimeoutError
from syncd.protocol.policy import Version
from tests.explorers import LONG, held, leased, publish, report
from tests.jobs import SmallJob
from tests.multiprocess.processes import wait_until
from tests.storages import RuledStorage
from tests.unit.test_explorer_policy import aside, hook_of


def test_a_step_is_not_waited_for_while_something_follows(
    job: SmallJob, engine: FakeEngine
) -> None:
    publish(job, 1)
    with hook_of(job, engine) as hook:
        hook.start()
        asking = aside(hook.pull_step, 1, 0)
        try:
            assert isinstance(asking.exception(30), InvalidSettingsError)
        finally:
            hook.stop()


def test_a_pull_waits_no_longer_than_it_was_told_for_that_of_another_thread(
    job: SmallJob, engine: FakeEngine
) -> None:
    publish(job, 1)
    with hook_of(job, engine) as hook, engine.hanging("load") as hang:
        first = aside(hook.pull, LONG)
        assert hang.reached.wait(LONG)
        calls = [
            lambda: hook.pull(0.05),
            lambda: hook.pull_step(1, 0.05),
        ]
        assert hook.pull(0) is None
        others = [aside(call) for call in calls]
        unbounded = aside(hook.pull, None)
        try:
            for other in others:
                assert isinstance(other.exception(30), WaitTimeoutError)
            hook.cancel()
            assert isinstance(unbounded.exception(30), CancelledError)
        finally:
            hang.release()
        first.exception(LONG)


def test_a_cancel_between_the_look_and_the_wait_of_its_own_thread_is_not_lost(
    job: SmallJob, engine: FakeEngine
) -> None:
    hook = hook_of(job, engine)

    def until(_: Version | None) -> bool:
        seen = hook._cancel.is_done
        hook.cancel()  # as a signal handler does, there
        return seen

    assert aside(hook._pipeline.wait, until, None).result(30) is None
    hook.close()


def test_a_cancel_waits_for_no_storage(job: SmallJob, engine: FakeEngine) -> None:
    storage = RuledStorage()
    begun, free = threading.Event(), threading.Event()

    def hang(*_: object) -> None:
        begun.set()
        free.wait(LONG)

    with ExplorerHook(job.root, "explorer", engine, poll=0.02, storage=storage) as hook:
        hook.start()
        publish(job, 1)
        first = hook.wait_until_served(LONG)
        storage.once("unlink", hang, where="leases")
        publish(job, 2)
        assert begun.wait(LONG)
        try:
            # What is served is known, though the lease before does not go.
            assert aside(hook.wait_until_served, 1, newer_than=first).result(30).step == 2
            aside(hook.cancel).result(30)
        finally:
            free.set()


def in_a_fork(act: Callable[[], object]) -> None:
    """Do something in a fork of this process; one that hangs is killed, and fails."""
    child = os.fork()
    if child == 0:
        try:
            act()
        except BaseException:  # noqa: BLE001 - it is the status that is looked at
            os._exit(1)
        os._exit(0)
    timer = threading.Timer(5, os.kill, [child, signal.SIGKILL])
    timer.start()
    try:
        assert os.waitpid(child, 0)[1] == 0
    finally:
        timer.cancel()


@pytest.mark.parametrize("follows", [True, False])
def test_a_fork_that_closes_the_hook_lets_nothing_go(
    job: SmallJob, engine: FakeEngine, follows: bool
) -> None:
    publish(job, 1)
    with hook_of(job, engine) as hook:
        if follows:
            hook.start()
            hook.wait_until_served(LONG)
            wait_until(lambda: report(job).sequence == 1, "it is reported")
        else:
            hook.pull(0)
        in_a_fork(hook.close)
        assert leased(job) == [1]
        assert report(job).status == "running"


def test_a_fork_that_ends_an_iterator_keeps_the_parents_lease(
    job: SmallJob, engine: FakeEngine
) -> None:
    publish(job, 1)
    with hook_of(job, engine) as hook:
        tensors = hook.synchronizer.get_model_state_dict_iterator()
        next(tensors)
        in_a_fork(tensors.close)
        assert leased(job) == [1]
        tensors.close()
        assert leased(job) == []


def test_a_staged_copy_is_let_go_though_forks_live_and_none_of_them_lets_it_go(
    job: SmallJob, tmp_path: Path
) -> None:
    publish(job, 1)
    staging = Staging(tmp_path / "stage")
    with held(job) as version:
        copy = staging.stage(version)
    in_a_fork(copy.release)
    staging.tidy()
    assert copy.folder.exists()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    try:
        copy.release()
        staging.tidy()
        assert not copy.folder.exists()
    finally:
        os.close(writing)
        os.waitpid(child, 0)
        os.close(reading)


def test_an_engine_that_cannot_be_closed_keeps_neither_lease_nor_name(
    job: SmallJob, engine: FakeEngine
) -> None:
    publish(job, 1)
    hook = hook_of(job, engine)
    hook.pull(0)
    engine.fail("close", ConnectionError("down"))
    with pytest.raises(ConnectionError):
        hook.close()
    hook.close()
    assert leased(job) == []
    assert report(job).status == "stopped"


def test_serving_a_hook_that_was_cancelled_before_ends_at_once(
    job: SmallJob, engine: FakeEngine
) -> None:
    with hook_of(job, engine) as hook:
        hook.cancel()
        bench.serve(hook, lambda _: None)
