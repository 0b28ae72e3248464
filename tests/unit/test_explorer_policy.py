"""When a hook syncs: by its settings, in the background, by a step's number; and with whom."""

import errno
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from explorer_hooks import bench
from explorer_hooks.engines.fake import FakeEngine
from explorer_hooks.hook import ExplorerHook
from explorer_hooks.reader import Reader
from syncd.coordination import TrainerSynchronizer
from syncd.coordination.member import Doubles
from syncd.daemon.config import DaemonConfig
from syncd.protocol.errors import (
    CancelledError,
    EngineMismatchError,
    InvalidSettingsError,
    NameTakenError,
    NotFollowingError,
    SyncdError,
    VerificationError,
    WaitTimeoutError,
)
from syncd.protocol.layout import JobLayout
from syncd.protocol.policy import RunningStatus, SyncSettings, Version
from tests.explorers import LONG, leased, publish, pulls, report
from tests.jobs import SmallJob, flip
from tests.multiprocess.processes import wait_until
from tests.refusals import engine_broken, invalid, too_late, unfit
from tests.storages import RuledStorage
from tests.unit.test_benches import at_work

DOUBLES = Doubles(poll=0.02)


@pytest.fixture
def trainer(job: SmallJob) -> Iterator[TrainerSynchronizer]:
    with TrainerSynchronizer(job.root, doubles=DOUBLES) as made:
        made.set_trainer_status(RunningStatus.RUNNING)
        yield made


def hook_of(
    job: SmallJob, engine: FakeEngine, name: str = "explorer", **options: Any
) -> ExplorerHook:
    settings = options.pop("settings", {})
    return ExplorerHook(
        job.root, name, engine, settings=SyncSettings(**settings), poll=0.02, **options
    )


@pytest.fixture
def hook(job: SmallJob, engine: FakeEngine) -> Iterator[ExplorerHook]:
    with hook_of(job, engine) as made:
        yield made


def aside(call: Callable[..., Any], *given: Any, **named: Any) -> Future[Any]:
    """A call in a thread, which a run of tests does not wait for at its end."""
    future = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(call(*given, **named))
        except Exception as error:  # noqa: BLE001 - looked at by the test
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def times_out(hook: ExplorerHook, match: str, timeout: float = 0.05) -> None:
    with too_late(match):
        hook.pull(timeout)


def serves_after_first(hook: ExplorerHook, number: int) -> None:
    assert hook.wait_until_served(LONG, newer_than=Version(1, 1)) == Version(number, number)


def test_a_step_syncs_where_the_settings_say_so(job: SmallJob, engine: FakeEngine) -> None:
    publish(job, 1)
    with hook_of(job, engine, settings={"sync_interval": 2, "sync_offset": 1}) as hook:
        for step, due in ((1, False), (2, False), (3, True), (4, False), (5, True)):
            assert hook.sync_is_due(step) is due
            before = hook.version
            if due:
                publish(job, step)
            after = hook.after_step(step)
            assert (after != before) is due
            assert after == hook.version
        with invalid(r"^step is '6': it must be a whole number"):
            hook.after_step("6")  # type: ignore[arg-type]


def test_a_timeout_of_another_type_is_refused_by_name(hook: ExplorerHook) -> None:
    calls = [
        hook.pull, partial(hook.load_step, 1), partial(hook.pull_step, 1),
        hook.wait_until_served,
    ]  # fmt: skip
    for call in calls:
        with invalid(r"^timeout is '5': it must be a number"):
            call("5")


def test_a_step_waits_for_the_trainer_until_it_has_something_or_says_that_it_has_not(
    job: SmallJob, engine: FakeEngine, trainer: TrainerSynchronizer
) -> None:
    with hook_of(job, engine) as hook:
        waiting = aside(hook.after_step, 1)
        wait_until(trainer.explorer_requires_sync, "it asks")
        trainer.set_model_state_dict(None, 1)
        publish(job, 1)
        assert waiting.result(LONG) == Version(1, 1)
        waiting = aside(hook.after_step, 2)
        wait_until(trainer.explorer_requires_sync, "it asks")
        trainer.notify_no_new_model_state_dict()
        assert waiting.result(LONG) == Version(1, 1)
        assert engine.asked("load") == [1]
        assert report(job).status == "running"
    with hook_of(job, engine, settings={"sync_timeout": 0.05}) as hook:
        hook.pull(0)
        with pytest.raises(WaitTimeoutError):
            hook.after_step(1)


def test_a_step_goes_on_with_what_it_has_where_a_version_is_refused(
    job: SmallJob, engine: FakeEngine, hook: ExplorerHook
) -> None:
    publish(job, 1)
    hook.after_step(1)
    publish(job, 2)
    engine.fail("check", EngineMismatchError("other names"))
    assert hook.after_step(2) == Version(1, 1)
    assert "other names" in str(report(job).refused)
    publish(job, 3)
    engine.fail("check", OSError(errno.EIO, "no"))
    assert hook.after_step(3) == Version(1, 1)
    assert hook.after_step(4) == Version(3, 3)


def test_a_pull_asks_again_whenever_the_trainer_had_nothing_newer(
    job: SmallJob, hook: ExplorerHook, trainer: TrainerSynchronizer
) -> None:
    pulling = aside(hook.pull, LONG)
    for _ in range(2):
        wait_until(trainer.explorer_requires_sync, "it asks")
        trainer.notify_no_new_model_state_dict()
    wait_until(trainer.explorer_requires_sync, "it asks once more")
    assert report(job).requests == 3
    trainer.close()
    publish(job, 1)  # by another trainer, say
    assert pulling.result(LONG) == Version(1, 1)


@pytest.mark.usefixtures("trainer")
def test_a_pull_of_no_time_requires_nothing(job: SmallJob, hook: ExplorerHook) -> None:
    assert hook.pull(0) is None
    assert report(job).requests == 0


def test_a_pull_goes_on_where_it_cannot_ask(job: SmallJob, engine: FakeEngine) -> None:
    storage = RuledStorage()
    with hook_of(job, engine, storage=storage) as hook:
        storage.refuse("rename", errno.ENOSPC, where="explorer.json")
        pulling = aside(hook.pull, LONG)
        wait_until(lambda: storage.count("rename", job.layout.drafts) > 3, "it tries to ask")
        publish(job, 1)
        assert pulling.result(LONG) == Version(1, 1)
        storage.rules.clear()


def test_two_live_hooks_have_two_names(job: SmallJob, engine: FakeEngine) -> None:
    job.layout.format.write_bytes(b'{"lease_time": 4}')
    with hook_of(job, engine), pytest.raises(NameTakenError):
        hook_of(job, FakeEngine())
    hook_of(job, FakeEngine()).close()


def test_an_engine_that_cannot_be_attached_gives_the_name_back(
    job: SmallJob, engine: FakeEngine
) -> None:
    engine.fail("attach", ConnectionError("down"))
    with pytest.raises(ConnectionError):
        hook_of(job, engine)
    hook_of(job, engine).close()


def test_an_engine_that_takes_no_broadcasts_follows_the_versions_and_holds_nobody_up(
    job: SmallJob,
    engine: FakeEngine,
    trainer: TrainerSynchronizer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    publish(job, 1)
    with hook_of(job, engine, settings={"method": "nccl"}) as hook:
        assert "cannot receive broadcasts" in caplog.text
        pulls(hook, 1, 1)
        assert (trainer.takers().working, trainer.takers().by_broadcast) == (1, 0)
        assert trainer.ready_to_nccl_sync(2) is None  # at once
    engine.kinds = frozenset({"adapter"})
    with hook_of(job, engine, settings={"method": "nccl"}):
        assert "method nccl cannot be used with LoRA" in caplog.text


def test_a_memory_folder_has_the_versions_and_the_job_the_reports(
    job: SmallJob, engine: FakeEngine, tmp_path: Path
) -> None:
    memory = SmallJob(tmp_path / "memory")
    publish(memory, 1)
    settings = {"method": "memory"}
    with hook_of(job, engine, settings=settings, memory_dir=memory.root) as hook:
        pulls(hook, 1, 1)
        assert hook.folder == memory.version(1)
        assert leased(memory) == [1]
        assert report(job).sequence == 1


def test_staleness_is_counted_from_what_is_served(job: SmallJob, engine: FakeEngine) -> None:
    publish(job, 1)
    with hook_of(job, engine, settings={"max_staleness": 1}) as hook:
        hook.pull(0)
        publish(job, 2)
        assert hook.may_produce()
        publish(job, 3)
        assert not hook.may_produce()
        hook.pull(0)
        assert hook.may_produce()


# -- in the background -----------------------------------------------------------------------------


def test_a_hook_follows_in_the_background(job: SmallJob, engine: FakeEngine) -> None:
    with hook_of(job, engine, settings={"style": "fully_async"}) as hook:
        with invalid(r"start\(\)"):
            hook.after_step(1)
        hook.start()
        hook.start()
        publish(job, 1)
        first = hook.wait_until_served(LONG)
        assert first == Version(1, 1)
        with invalid("already follows the job"):
            hook.pull(0)
        publish(job, 2)
        engine.fail("check", EngineMismatchError("no"), sequence=3)
        assert hook.wait_until_served(LONG, newer_than=first) == Version(2, 2)
        publish(job, 3)
        wait_until(lambda: report(job).refused, "it is refused")
        publish(job, 4)
        hook.wait_until_served(LONG, newer_than=Version(2, 2))
        assert hook.after_step(7) == Version(4, 4)
        assert report(job).requests == 0
        hook.stop()
        publish(job, 5)
        pulls(hook, 5, 5)
        with invalid(r"no thread follows .* Call start\(\) or"):
            hook.wait_until_served(newer_than=Version(5, 5))
        hook.start()
        with too_late(r"no version newer than .* 'syncd status'"):
            hook.wait_until_served(0.01, newer_than=Version(5, 5))


def test_who_waits_to_be_served_by_nobody_is_told_at_once(hook: ExplorerHook) -> None:
    with invalid(r"no thread follows .* Call start\(\) or"):
        hook.wait_until_served()
    hook.start()
    waiting = aside(hook.wait_until_served)
    hook.stop()
    assert isinstance(waiting.exception(LONG), InvalidSettingsError)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            {"engine": FakeEngine},
            r"^engine is FakeEngine, .* because it is a class. Pass TorchModule",
        ),
        ({"engine": object()}, r"^engine is object, .* Pass TorchModule\(model\)"),
        ({"engine": None}, "^engine is NoneType, "),
        (
            {"settings": {"sync_interval": 2}},
            "^settings is of type dict: it must be a SyncSettings",
        ),
        ({"staging": "/srv/copies"}, r"^staging is '/srv/copies': it must be a Staging, such as"),
        ({"name": 7}, "^the explorer's name 7 cannot be part of a file name"),
    ],
)
def test_an_argument_of_another_type_is_refused_by_name(
    job: SmallJob, engine: FakeEngine, wrong: dict[str, Any], said: str
) -> None:
    given = {"name": "explorer", "engine": engine, **wrong}
    with invalid(said):
        ExplorerHook(job.root, **given)


def test_a_pull_that_times_out_says_whether_a_daemon_works(
    tmp_path: Path, engine: FakeEngine
) -> None:
    root = tmp_path / "a job"
    root.mkdir()
    with ExplorerHook(root, "explorer", engine, poll=0.02) as hook:
        trainer = f"no trainer works in {root}"
        without = (
            rf"in {root} in time; no daemon works there: start `syncd run '{root}'`; {trainer}$"
        )
        times_out(hook, without)
        JobLayout(root).step(1).mkdir()
        with too_late(r"^step 1 was not published .*; no daemon"):
            hook.pull_step(1, 0.05)
        with Reader(root, "reader") as reader, too_late("no daemon"):
            reader.wait(0, 0.05)
        JobLayout(root).daemon_lock.touch()
        times_out(hook, rf"; see `syncd status '{root}'`")
    in_memory = rf"start `syncd run JOB --memory-dir {tmp_path}`"
    with (
        ExplorerHook(root, "explorer", engine, memory_dir=tmp_path, poll=0.02) as hook,
        too_late(in_memory),
    ):
        hook.pull(0.05)


def test_a_pull_soon_says_that_no_trainer_works(
    job: SmallJob, hook: ExplorerHook, caplog: pytest.LogCaptureFixture
) -> None:
    told = f"explorer waits for a trainer, or a first version: no trainer works in {job.root}"
    for _ in range(2):
        with (
            job.daemon(),
            too_late("; no trainer works in "),
        ):
            hook.pull(1)
    assert caplog.text.count(told) == 1
    publish(job, 1)
    hook.pull(0)
    caplog.clear()
    with pytest.raises(WaitTimeoutError):
        hook.pull(0.1)
    assert told not in caplog.text


def test_a_pull_that_finds_a_damaged_latest_names_the_file(
    job: SmallJob, hook: ExplorerHook
) -> None:
    publish(job, 1)
    job.put(job.layout.latest, b"{garbage")
    job.hosts.settle()
    damaged = rf"^no version was found in time, because {job.layout.latest} is damaged\. The "
    times_out(hook, damaged)
    job.run()
    job.hosts.settle()
    pulls(hook, 1, 1)


def test_a_pull_from_a_job_that_was_removed_says_so(tmp_path: Path, engine: FakeEngine) -> None:
    root = tmp_path / "job"
    root.mkdir()
    with ExplorerHook(root, "explorer", engine, poll=0.02) as hook:
        shutil.rmtree(root)
        times_out(hook, rf"; {JobLayout(root).format} is not there: is its storage mounted\?$")


@pytest.mark.parametrize("call", ["pull", "wait_until_served"])
def test_what_was_refused_is_named_by_the_next_timeout(
    job: SmallJob, engine: FakeEngine, hook: ExplorerHook, call: str
) -> None:
    publish(job, 1)
    engine.fail("check", EngineMismatchError("other names"), sequence=1)
    if call == "pull":
        with pytest.raises(EngineMismatchError):
            hook.pull(0)
        times_out(hook, r"; explorer refused v1: other names$")
    else:
        hook.start()
        wait_until(lambda: report(job).refused, "it is refused")
        with too_late(r"s: it refused v1: other names$"):
            hook.wait_until_served(0.05)
        hook.stop()
    publish(job, 2)
    pulls(hook, 2, 2)
    times_out(hook, r"; no trainer works in [^;]*$", 0.001)


def test_a_follower_outlives_what_passes(
    job: SmallJob, engine: FakeEngine, hook: ExplorerHook
) -> None:
    publish(job, 1)
    engine.fail("load", ConnectionError("down"), torn=True, times=2)
    hook.start()
    assert hook.wait_until_served(LONG) == Version(1, 1)
    assert hook.fault is None
    engine.fail("load", ConnectionError("down"), torn=True, times=3)
    publish(job, 2)
    serves_after_first(hook, 2)


@pytest.mark.parametrize("call", ["pull", "after_step", "may_produce", "wait_until_served"])
def test_the_death_of_a_follower_is_raised_once_and_reported(
    job: SmallJob, engine: FakeEngine, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    is_ours = call == "pull"

    def finish(version: Any) -> None:
        if version.sequence == 2:
            raise (SyncdError if is_ours else ZeroDivisionError)("in a callback")

    publish(job, 1)
    with hook_of(job, engine, before_load=finish) as hook:
        hook.start()
        hook.wait_until_served(LONG)
        publish(job, 2)
        wait_until(lambda: report(job).fault, "its death is reported")
        assert "in a callback" in str(hook.fault)
        assert ("Traceback" in caplog.text) != is_ours
        arguments = [1] if call == "after_step" else []
        with pytest.raises(NotFollowingError, match="in a callback"):
            getattr(hook, call)(*arguments)
        assert not hook.may_produce()
        publish(job, 3)
        hook.start()
        serves_after_first(hook, 3)
        assert (hook.fault, report(job).fault) == (None, None)


def test_one_that_a_callback_has_stopped_dies_no_death_of_the_next_one(
    job: SmallJob, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []

    def start_anew(version: Any) -> None:
        calls.append(version.sequence)
        if len(calls) == 1:
            hook.stop()
            hook.start()
            raise ZeroDivisionError("in a callback")

    publish(job, 1)
    with hook_of(job, engine, before_load=start_anew) as hook:
        hook.start()
        assert hook.wait_until_served(LONG) == Version(1, 1)
        wait_until(lambda: "does not follow the job any more" in caplog.text, "the first has ended")
        publish(job, 2)
        serves_after_first(hook, 2)
        assert hook.fault is None


def test_closing_ends_a_follower_once_its_load_is_done(job: SmallJob, engine: FakeEngine) -> None:
    publish(job, 1)
    hook = hook_of(job, engine)
    with engine.hanging("load") as hang:
        hook.start()
        assert hang.reached.wait(LONG)
        closing = aside(hook.close)
        time.sleep(0.05)  # closing has nothing that could be waited for
        assert closing.running()
        hang.release()
        closing.result(LONG)
    assert leased(job) == []
    assert report(job).status == "stopped"
    with pytest.raises(CancelledError):
        hook.start()


def test_cancelling_ends_who_waits_to_be_served(hook: ExplorerHook) -> None:
    hook.start()
    waiting = aside(hook.wait_until_served, LONG)
    hook.cancel()
    assert isinstance(waiting.exception(LONG), CancelledError)


# -- kinds -----------------------------------------------------------------------------------------


def point_to(job: SmallJob, step: int, path: str) -> None:
    """Let a Tinker-style trainer's step be published, once it has lain still."""
    job.step(step).mkdir()
    (job.step(step) / "remote_sampler_path.txt").write_text(path)
    job.point(step)
    job.run(rounds=3, seconds=20)


def test_a_remote_path_is_handed_to_the_callback(job: SmallJob, engine: FakeEngine) -> None:
    given: list[tuple[str, int]] = []

    def use(path: str, version: Any) -> None:
        if path.endswith("bad"):
            raise EngineMismatchError("no such sampler")
        given.append((path, version.sequence))

    with hook_of(job, engine, on_remote=use) as hook:
        point_to(job, 1, "tinker://one")
        pulls(hook, 1, 1)
        point_to(job, 2, "tinker://bad")
        with unfit("no such sampler"):
            hook.pull(0)
        assert given == [("tinker://one", 1), ("tinker://one", 1)]  # it was given back
        assert hook.version == Version(1, 1)
        assert "no such sampler" in str(report(job).refused)
    assert engine.asked("load") == []
    assert engine.asked("check") == []


@pytest.mark.parametrize("failures", [1, 2])  # the second: nor is what it had given back
@pytest.mark.parametrize("how", ["pull", "after_step", "start"])
def test_a_path_that_the_callback_fails_for_is_tried_again(
    job: SmallJob, engine: FakeEngine, how: str, failures: int
) -> None:
    class RateLimitError(Exception):
        """One of a service's own."""

    left = 0

    def use(path: str, _: Any) -> None:
        nonlocal left
        if left:
            left -= 1
            raise RateLimitError(f"{path}: too many requests")

    point_to(job, 1, "tinker://one")
    with hook_of(job, engine, on_remote=use) as hook:
        pulls(hook, 1, 1)
        point_to(job, 2, "tinker://two")
        left = failures
        if how == "start":
            hook.start()
            serves_after_first(hook, 2)
        elif failures == 2:
            with engine_broken("tinker://one: too many requests"):
                hook.pull(0) if how == "pull" else hook.after_step(1)
            assert not hook.may_produce()
        elif how == "pull":
            with pytest.raises(RateLimitError):
                hook.pull(0)
        else:
            assert hook.after_step(1) == Version(1, 1)
        if how == "pull":
            pulls(hook, 2, 2)
        assert hook.after_step(2) == Version(2, 2)
        assert (hook.fault, report(job).refused) == (None, None)


@pytest.mark.parametrize("takes", [True, False])
def test_only_an_engine_that_takes_a_kind_is_given_it(job: SmallJob, takes: bool) -> None:
    point_to(job, 1, "tinker://one")
    kinds = frozenset({"full", "remote"}) if takes else frozenset({"full"})
    engine = FakeEngine(kinds=kinds)
    with hook_of(job, engine) as hook:
        if takes:
            pulls(hook, 1, 1)
            assert engine.asked("load") == [1]
        else:
            with unfit("tinker://one"):
                hook.pull(0)
            assert engine.asked("check") == []


def test_a_damaged_version_is_refused_whether_it_is_staged_or_not(
    job: SmallJob, engine: FakeEngine, tmp_path: Path
) -> None:
    from explorer_hooks.staging import Staging  # noqa: PLC0415 # of this test

    publish(job, 1)
    flip(job.version(1) / "model.safetensors")
    with hook_of(job, engine, staging=Staging(tmp_path / "stage")) as hook:
        with pytest.raises(VerificationError):
            hook.pull(0)
        assert engine.asked("check") == []
        assert str(report(job).refused).startswith("v1: ")
        assert leased(job) == []


# -- bench -----------------------------------------------------------------------------------------


@pytest.fixture
def served(job: SmallJob) -> Iterator[SmallJob]:
    """A daemon that works behind; steps 1 to 4, of which 2 and 4 are full, and 3 is being saved."""
    for step in (1, 2, 3, 4):
        job.save(step, point=step == 1)
    for step in (2, 3, 4):
        (job.step(step) / ".full_checkpoint").touch()
    (job.step(3) / ".saving").touch()
    with at_work(job, DaemonConfig(keep=1, prune_steps=False)):
        yield job


def test_a_bench_loads_the_latest_and_a_step_once_and_knows_the_full_checkpoints(
    served: SmallJob, engine: FakeEngine
) -> None:
    root = served.root
    assert bench.full_checkpoints(root) == [2, 4]
    with hook_of(served, engine) as hook:
        assert bench.latest(hook, LONG).step == 1
        assert bench.latest(hook, LONG).step == 1
        assert bench.step(hook, 2, LONG).step == 2
        assert bench.step(hook, 2, LONG).step == 2
        assert list(bench.every_full_checkpoint(hook, root, after=4)) == []
        assert len(engine.asked("load")) == 2
        with TrainerSynchronizer(root, doubles=DOUBLES) as trainer:
            trainer.set_trainer_status(RunningStatus.RUNNING)
            assert bench.step(hook, 1, LONG) == Version(1, 1)
            with invalid("the trainer is running"):
                hook.pull_step(2, LONG)


def test_full_checkpoints_of_trainers_without_markers_are_known_by_their_optimizers(
    job: SmallJob,
) -> None:
    job.save(5)
    job.save(6)
    (job.actor(6) / "optim_world_size_1_rank_0.pt").touch()
    assert bench.full_checkpoints(job.root) == [6]


def test_serving_says_each_version_until_it_is_cancelled(job: SmallJob, engine: FakeEngine) -> None:
    said: list[Version] = []
    with hook_of(job, engine) as hook:
        serving = aside(bench.serve, hook, said.append, interval=0.05)
        for step in (1, 2):
            publish(job, step)
            wait_until(lambda: said and said[-1].step == step, "it is said")  # noqa: B023 # now
        hook.cancel()
        assert serving.result(LONG) is None
    assert said == [Version(1, 1), Version(2, 2)]
