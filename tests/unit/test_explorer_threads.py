"""A hook that several threads, signal handlers and forks of its process have to do with."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from explorer_hooks.engines.fake import FakeEngine
from explorer_hooks.hook import ExplorerHook
from syncd.protocol.errors import CancelledError, InvalidSettingsError, WaitTimeoutError
from syncd.protocol.policy import Version
from tests.explorers import LONG, publish
from tests.jobs import Job
from tests.storages import RuledStorage, once
from tests.unit.test_explorer_policy import Aside, hook_of


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


def test_a_step_is_not_waited_for_while_something_follows(job: Job, engine: FakeEngine) -> None:
    publish(job, 1)
    with hook_of(job, engine) as hook:
        hook.start()
        asking = Aside(lambda: hook.pull_step(1, 0))
        try:
            assert isinstance(asking.join(5), InvalidSettingsError)
        finally:
            hook.stop()


def test_a_pull_waits_no_longer_than_it_was_told_for_that_of_another_thread(
    job: Job, engine: FakeEngine
) -> None:
    publish(job, 1)
    with hook_of(job, engine) as hook, engine.hanging("load") as hang:
        first = Aside(lambda: hook.pull(LONG))
        assert hang.reached.wait(LONG)
        calls: list[Callable[[], object]] = [
            lambda: hook.pull(0.05),
            lambda: hook.pull(0),
            lambda: hook.pull_step(1, 0.05),
        ]
        others = [Aside(call) for call in calls]
        unbounded = Aside(lambda: hook.pull(None))
        try:
            for other in others:
                assert isinstance(other.join(5), WaitTimeoutError)
            hook.cancel()
            assert isinstance(unbounded.join(5), CancelledError)
        finally:
            hang.release()
        first.join()


def test_a_cancel_between_the_look_and_the_wait_of_its_own_thread_is_not_lost(
    job: Job, engine: FakeEngine
) -> None:
    hook = hook_of(job, engine)

    def until(_: Version | None) -> bool:
        seen = hook._cancel.is_done
        hook.cancel()  # as a signal handler does, there
        return seen

    assert Aside(lambda: hook._pipeline.wait(until, None)).join(5) is None
    hook.close()


def test_a_cancel_waits_for_no_storage(job: Job, engine: FakeEngine) -> None:
    storage = RuledStorage()
    begun, free = threading.Event(), threading.Event()

    def hang(*_: object) -> None:
        begun.set()
        free.wait(LONG)

    with ExplorerHook(job.layout.root, "explorer", engine, poll=0.02, storage=storage) as hook:
        hook.start()
        publish(job, 1)
        first = hook.wait_until_served(LONG)
        storage.rules.append(once("unlink", hang, where="leases"))
        publish(job, 2)
        assert begun.wait(LONG)
        try:
            # What is served is known, though the lease before does not go.
            assert Aside(lambda: hook.wait_until_served(1, newer_than=first)).join(5).step == 2
            Aside(hook.cancel).join(5)
        finally:
            free.set()
