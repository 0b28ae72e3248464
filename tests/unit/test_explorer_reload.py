"""What a hook asks of its engine, in which order, and what it does when the engine fails."""

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from explorer_hooks.engines.fake import Call, FakeEngine
from explorer_hooks.hook import ExplorerHook
from explorer_hooks.staging import Staging
from syncd.protocol.errors import EngineBrokenError, EngineMismatchError
from syncd.protocol.policy import Version
from tests.explorers import leased, publish, pulls, report
from tests.jobs import SmallJob
from tests.refusals import engine_broken
from tests.storages import RuledStorage, refuse

PER_VERSION = ("check", "prepare", "pause", "load", "reset_cache", "resume")


@pytest.fixture
def hook(job: SmallJob, engine: FakeEngine) -> Iterator[ExplorerHook]:
    publish(job, 1)
    with ExplorerHook(job.root, "explorer", engine, poll=0.02) as made:
        made.pull(0)
        publish(job, 2)
        engine.calls.clear()
        yield made


def breaks(hook: ExplorerHook, why: str) -> None:
    with engine_broken(why):
        hook.pull(0)


def test_an_engine_is_asked_in_order_and_does_not_serve_while_it_loads(
    job: SmallJob, engine: FakeEngine
) -> None:
    publish(job, 1)
    seen: list[Any] = []
    with ExplorerHook(
        job.root, "explorer", engine, before_load=lambda v: seen.append((v, engine.calls[:]))
    ) as hook:
        hook.pull(0)
        with_version = ("check", "prepare", "load")
        given = [Call(what, 1 if what in with_version else None) for what in PER_VERSION]
        assert engine.calls == [Call("attach"), *given]
        ((version, calls),) = seen
        assert version.sequence == 1
        assert calls == [Call("attach"), Call("check", 1)]
    assert engine.calls[-1] == Call("close")


def test_how_long_it_took_is_on_record(job: SmallJob, hook: ExplorerHook) -> None:
    hook.pull(0)
    told = hook.last
    assert told is not None
    assert (told.sequence, told.step, told.staged, told.not_staged) == (2, 2, None, None)
    assert 0 < told.load <= told.pause
    assert told.verify > 0
    assert told.seconds == told.verify + told.prepare + told.pause
    assert report(job).reload == told


for_now_and_for_good = pytest.mark.parametrize("passes", [True, False])


@pytest.mark.parametrize("what", ["check", "prepare", "pause", "load", "reset_cache"])
@for_now_and_for_good
def test_an_engine_that_fails_goes_on_with_what_it_had(
    job: SmallJob, hook: ExplorerHook, engine: FakeEngine, what: str, passes: bool
) -> None:
    error = OSError(errno.EIO, "no") if passes else EngineMismatchError("no")
    engine.fail(what, error, torn=what == "load")
    with pytest.raises(type(error)):
        hook.pull(0)
    assert hook.version == Version(1, 1)
    assert engine.answer().sequence == 1
    assert leased(job) == [1]
    assert hook.fault is None
    assert (report(job).refused is None) is passes
    if passes:  # it may well work the next time
        pulls(hook, 2, 2)
    else:
        assert hook.pull(0) is None


def test_an_engine_that_takes_neither_version_is_broken_until_it_takes_one(
    job: SmallJob, hook: ExplorerHook, engine: FakeEngine
) -> None:
    engine.fail("load", RuntimeError("half"), torn=True, times=3)
    breaks(hook, r"half.* not go back to v1")
    assert not engine.is_paused
    assert not hook.may_produce()
    assert "weights that the engine serves are unknown" in str(hook.fault)
    assert "weights that the engine serves are unknown" in str(report(job).fault)
    breaks(hook, "another attempt to load v1 has failed")
    assert hook.pull(0) is None  # it takes version 1 again; version 2 was refused
    assert engine.answer().sequence == 1
    assert (hook.fault, report(job).fault) == (None, None)
    assert hook.may_produce()
    publish(job, 3)
    pulls(hook, 3, 3)


def test_a_broken_engine_tries_a_version_again_that_was_not_to_blame(
    job: SmallJob, hook: ExplorerHook, engine: FakeEngine
) -> None:
    engine.fail("load", ConnectionError("down"), torn=True, times=2)
    with pytest.raises(EngineBrokenError):
        hook.pull(0)
    assert report(job).refused is None
    pulls(hook, 2, 2)
    assert engine.answer().sequence == 2
    assert report(job).fault is None


def test_an_engine_that_has_lost_its_version_is_broken_until_it_has_it_again(
    job: SmallJob, hook: ExplorerHook, engine: FakeEngine
) -> None:
    pulls(hook, 2, 2)
    engine.restart()
    breaks(hook, "lost v2")
    assert not hook.may_produce()
    assert "lost v2" in str(report(job).fault)
    assert hook.pull(0) is None
    assert engine.answer().sequence == 2
    assert report(job).fault is None
    assert hook.may_produce()


def test_an_engine_that_has_lost_its_version_has_it_again_after_the_next_sync(
    hook: ExplorerHook, engine: FakeEngine
) -> None:
    """Also where the trainer has nothing newer, which ends a sync."""
    pulls(hook, 2, 2)
    engine.restart()
    assert hook.after_step(1) == Version(2, 2)
    assert engine.answer().sequence == 2
    assert hook.may_produce()


def test_a_broken_engine_takes_a_newer_version_where_what_it_had_is_gone(
    job: SmallJob, hook: ExplorerHook, engine: FakeEngine
) -> None:
    engine.fail("load", RuntimeError("half"), torn=True, sequence=2)
    engine.fail("load", FileNotFoundError("gone"), sequence=1, times=99)
    for _ in range(2):
        with pytest.raises(EngineBrokenError):
            hook.pull(0)
    publish(job, 3)
    pulls(hook, 3, 3)
    assert engine.answer().sequence == 3
    assert (hook.fault, report(job).fault) == (None, None)


@for_now_and_for_good
def test_an_engine_that_fails_at_its_first_version_is_not_relied_on(
    job: SmallJob, engine: FakeEngine, passes: bool
) -> None:
    publish(job, 1)
    with ExplorerHook(job.root, "explorer", engine) as hook:
        error = OSError(errno.EIO, "no") if passes else RuntimeError("no")
        engine.fail("load", error, torn=True)
        with pytest.raises(type(error)):
            hook.pull(0)
        assert not hook.may_produce()
        assert "its first version" in str(report(job).fault)
        publish(job, 2)
        pulls(hook, 2, 2)
        assert hook.may_produce()
        assert report(job).fault is None


def test_an_engine_that_does_not_resume_is_broken(hook: ExplorerHook, engine: FakeEngine) -> None:
    engine.fail("resume", ConnectionError("down"))
    breaks(hook, "could not be resumed")
    assert hook.version == Version(1, 1)
    assert not hook.may_produce()
    pulls(hook, 2, 2)
    assert hook.may_produce()


def test_a_load_that_is_cut_off_is_a_fault(hook: ExplorerHook, engine: FakeEngine) -> None:
    engine.fail("load", KeyboardInterrupt(), torn=True)
    with pytest.raises(KeyboardInterrupt):
        hook.pull(0)
    assert not engine.is_paused
    assert "interrupted" in str(hook.fault)
    pulls(hook, 2, 2)
    assert hook.fault is None


def test_work_in_flight_that_fails_is_no_fault_of_the_version(
    job: SmallJob, engine: FakeEngine
) -> None:
    publish(job, 1)
    failing = [True]

    def finish(_: object) -> None:
        if failing.pop() if failing else False:
            raise RuntimeError("a rollout failed")

    with ExplorerHook(job.root, "explorer", engine, before_load=finish) as hook:
        with pytest.raises(RuntimeError, match="a rollout failed"):
            hook.pull(0)
        assert engine.asked("pause") == []
        pulls(hook, 1, 1)


def test_a_staged_version_is_loaded_from_its_copy_and_needs_no_lease(
    job: SmallJob, engine: FakeEngine, tmp_path: Path
) -> None:
    publish(job, 1)
    stage = tmp_path / "stage"
    with ExplorerHook(job.root, "explorer", engine, staging=Staging(stage)) as hook:
        hook.pull(0)
        assert leased(job) == []
        first = hook.folder
        assert first is not None
        assert stage in first.parents
        assert engine.answer().folder == first
        assert hook.last is not None
        assert hook.last.staged is True
        publish(job, 2, 3, keep=1)
        assert not job.version(1).exists()
        engine.fail("load", RuntimeError("no"), torn=True)
        with pytest.raises(RuntimeError):
            hook.pull(0)  # it had version 1 given back, which is nowhere else
        assert engine.answer().folder == first
        publish(job, 4)
        hook.pull(0)
        assert not first.exists()
        assert hook.folder is not None
        room = hook.folder.parent
    assert [path.name for path in room.iterdir()] == [".copier"]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"budget_bytes": 10}, "do not fit into the stage folder's budget of 10 B"),
        ({"storage": RuledStorage(refuse("create", errno.EIO))}, "[Errno 5]"),
    ],
)
def test_what_cannot_be_staged_is_loaded_from_where_it_is_and_said_once(
    job: SmallJob,
    engine: FakeEngine,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    given: dict[str, Any],
    why: str,
) -> None:
    staging = Staging(tmp_path / "stage", **given)
    with ExplorerHook(job.root, "explorer", engine, staging=staging) as hook:
        for step in (1, 2):
            publish(job, step)
            hook.pull(0)
            assert hook.folder == job.version(step)
        assert caplog.text.count(why) == 1
        told = report(job).reload
        assert told is not None
        assert told.staged is False
        assert why in str(told.not_staged)


def test_an_engine_that_reads_elsewhere_gets_the_published_folder(
    job: SmallJob, tmp_path: Path
) -> None:
    publish(job, 1)
    engine = FakeEngine(is_local=False)
    staging = Staging(tmp_path / "stage")
    with ExplorerHook(job.root, "explorer", engine, staging=staging) as hook:
        hook.pull(0)
        assert hook.folder == job.version(1)
        assert hook.last is not None
        assert hook.last.staged is None
