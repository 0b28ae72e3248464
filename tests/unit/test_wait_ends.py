"""When an explorer's wait begins and ends: before the trainer comes, and after it has gone."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from explorer_hooks.engines.fake import FakeEngine
from explorer_hooks.hook import ExplorerHook
from syncd.coordination import ExplorerSynchronizer, TrainerSynchronizer
from syncd.coordination.member import Doubles
from syncd.protocol.policy import RunningStatus, SyncMethod, SyncSettings, SyncStyle, Version
from syncd.protocol.records import SaveOutcome, SaveOutcomes
from tests.explorers import LONG, publish, report
from tests.jobs import LEASE_TIME, SmallJob
from tests.multiprocess.processes import wait_until
from tests.refusals import too_late
from tests.unit.test_fast_path import Taker

pytestmark = pytest.mark.lagging

HELD = Version(1, 1)
#: Waits for weights that end with the trainer, by the name of the method.
WAITS: dict[str, Callable[..., Any]] = {
    "wait_new_model_state_dict": ExplorerSynchronizer.wait_new_model_state_dict,
    "wait_for_weights": partial(
        ExplorerSynchronizer.wait_for_weights, joins=lambda: True, ends_with_trainer=True
    ),
}


@pytest.fixture
def aside(stack: ExitStack) -> Callable[..., Future[Any]]:
    return stack.enter_context(ThreadPoolExecutor(2)).submit


@pytest.fixture
def waits(aside: Any, job: SmallJob) -> Callable[..., Future[Any]]:
    """Begin a wait of someone who holds version 1, which is published."""
    publish(job, 1)

    def waits(wait: Callable[..., Any], *explorer: Any) -> Future[Any]:
        waiting = aside(wait, *explorer, HELD, timeout=LONG)
        wait_until(lambda: report(job).status == RunningStatus.REQUIRE_SYNC.value, "it waits")
        return waiting

    return waits


@pytest.fixture
def trainer(job: SmallJob) -> Iterator[TrainerSynchronizer]:
    with TrainerSynchronizer(job.root, doubles=Doubles(poll=0.02)) as made:
        made.set_trainer_status(RunningStatus.RUNNING)
        yield made


@pytest.fixture
def explorer(job: SmallJob) -> Iterator[ExplorerSynchronizer]:
    yield from explorer_of(job)


def explorer_of(job: SmallJob, clock: Callable[[], float] = time.monotonic) -> Iterator[Any]:
    doubles = Doubles(storage=job.explorers, poll=0.02, clock=clock)
    with ExplorerSynchronizer(job.root, "explorer", doubles=doubles) as made:
        made.set_explorer_status(RunningStatus.RUNNING)
        job.hosts.let_time_pass()
        yield made


def fast() -> float:
    """A clock that has a lease time go by in a second."""
    return LEASE_TIME * time.monotonic()


# -- after the trainer -------------------------------------------------------------------------


each_wait = pytest.mark.parametrize("wait", WAITS)


@pytest.mark.parametrize("end", ["closes", "dies", "says that nothing newer comes"])
@each_wait
def test_a_trainers_last_save_is_waited_for_after_its_end(
    job: SmallJob, trainer: TrainerSynchronizer, explorer: Any, waits: Any, wait: str, end: str
) -> None:
    with job.daemon() as loop:
        if end == "says that nothing newer comes":
            waiting = waits(WAITS[wait], explorer)
            job.save(2)
            trainer.notify_no_new_model_state_dict()
            wait_until(lambda: report(job).requests == 2, "it has heard, and asks again")
        else:
            job.save(2)
            trainer.set_model_state_dict(None, 2)
            trainer.close() if end == "closes" else trainer._me.session.close()
            waiting = waits(WAITS[wait], explorer)
        loop.run_once()
        assert waiting.result(LONG) == Version(2, 2)
        trainer.close()
        assert WAITS[wait](explorer, Version(2, 2), timeout=LONG) in {None, Version(2, 2)}


def test_a_step_that_was_saved_again_is_waited_for_and_not_taken_for_the_one_before(
    job: SmallJob, trainer: TrainerSynchronizer, explorer: Any, waits: Any
) -> None:
    assert explorer.get_latest_model_version() == HELD
    with job.daemon() as loop:
        job.save(1, 8.0, counter=1)
        trainer.close()
        waiting = waits(explorer.wait_new_model_state_dict)
        loop.run_once()
        assert waiting.result(LONG) == Version(2, 1)


@pytest.mark.parametrize("outcome", ["quarantined", "skipped"])
def test_a_last_save_that_never_becomes_a_version_ends_the_wait(
    job: SmallJob, trainer: TrainerSynchronizer, explorer: Any, waits: Any, outcome: Any
) -> None:
    with job.daemon():
        identity = job.save(2)
        trainer.close()
        waiting = waits(explorer.wait_new_model_state_dict)
        saves = SaveOutcomes(steps={2: SaveOutcome(identity=identity, outcome=outcome)})
        job.put_record(job.layout.saves, saves)
        assert waiting.result(LONG) == HELD


@pytest.mark.parametrize("loses", [lambda job: job.layout.saves.unlink(), lambda job: job.point(9)])
def test_a_step_whose_outcome_or_folder_is_lost_is_not_waited_for(
    job: SmallJob, trainer: TrainerSynchronizer, explorer: Any, loses: Any
) -> None:
    publish(job, 1)
    with job.daemon():
        loses(job)
        job.hosts.settle()
        trainer.close()
        assert explorer.wait_new_model_state_dict(HELD, timeout=LONG) == HELD


def test_a_last_save_that_is_not_published_in_time_is_an_error(
    job: SmallJob, trainer: TrainerSynchronizer, explorer: Any
) -> None:
    publish(job, 1)
    with job.daemon():
        job.save(2)
        trainer.close()
        with too_late("see `syncd status "):
            explorer.wait_new_model_state_dict(HELD, timeout=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("daemon", ["was never there", "was killed"])
def test_a_wait_for_the_last_save_ends_a_lease_time_after_no_daemon_lives(
    job: SmallJob, trainer: TrainerSynchronizer, daemon: str, caplog: pytest.LogCaptureFixture
) -> None:
    publish(job, 1)
    job.save(2)
    if daemon == "was killed":
        job.layout.daemon_lock.touch()
    trainer.close()
    for explorer in explorer_of(job, clock=fast):
        begun = fast()
        assert explorer.wait_new_model_state_dict(HELD, timeout=LEASE_TIME * LONG) == HELD
        assert fast() - begun >= LEASE_TIME
    assert f"step 2 is saved but not published, and no daemon has worked in {job.root}" in (
        caplog.text
    )


# -- before the trainer --------------------------------------------------------------------------


def test_who_holds_a_version_of_a_trainer_that_never_registers_goes_on_at_once(
    job: SmallJob, explorer: Any
) -> None:
    publish(job, 1)
    with job.daemon():
        job.save(2)
        assert explorer.wait_new_model_state_dict(HELD, timeout=LONG) == HELD


@each_wait
@pytest.mark.parametrize("comes", ["a trainer", "a version"])
def test_who_holds_nothing_waits_for_a_trainer_or_a_version_and_says_so_once(
    job: SmallJob, explorer: Any, aside: Any, wait: str, comes: str,
    caplog: pytest.LogCaptureFixture, stack: ExitStack,
) -> None:  # fmt: skip
    told = f"explorer waits for a trainer, or a first version: no trainer works in {job.root}"
    waiting = aside(WAITS[wait], explorer, None, timeout=LONG)
    wait_until(lambda: told in caplog.text, "it says what it waits for")
    if comes == "a trainer":
        trainer = stack.enter_context(TrainerSynchronizer(job.root))
        wait_until(trainer.modules, "it has registered, and is loading")
        assert not waiting.done()
        trainer.set_trainer_status(RunningStatus.RUNNING)
        wait_until(trainer.explorer_requires_sync, "it asks that one")
    assert not waiting.done()
    publish(job, 1)
    assert waiting.result(LONG) == HELD
    assert caplog.text.count(told) == 1


@each_wait
def test_who_holds_nothing_waits_on_after_a_trainer_that_has_nothing_yet(
    job: SmallJob, trainer: TrainerSynchronizer, explorer: Any, aside: Any, wait: str
) -> None:
    waiting = aside(WAITS[wait], explorer, None, timeout=LONG)
    for requests in (1, 2):
        wait_until(lambda: report(job).requests == requests, "it asks")  # noqa: B023
        trainer.notify_no_new_model_state_dict()
    wait_until(trainer.explorer_requires_sync, "it asks again")
    assert not waiting.done()
    publish(job, 1)
    assert waiting.result(LONG) == HELD


def test_who_holds_nothing_is_told_at_the_deadline_that_no_trainer_came(
    job: SmallJob, explorer: Any
) -> None:
    for call in (explorer.wait_new_model_state_dict, explorer.wait_for_trainer):
        with too_late(r"no trainer has registered .*, and no version"):
            call(None, timeout=0.1)
    publish(job, 1)
    explorer.wait_for_trainer(None, timeout=LONG)
    explorer.wait_for_trainer(HELD, timeout=LONG)


def test_who_has_seen_a_trainer_go_without_a_version_goes_on_and_says_so_once(
    trainer: TrainerSynchronizer, explorer: Any, aside: Any, caplog: pytest.LogCaptureFixture
) -> None:
    waiting = aside(explorer.wait_new_model_state_dict, None, timeout=LONG)
    wait_until(trainer.explorer_requires_sync, "it asks")
    trainer.close()
    assert waiting.result(LONG) is None
    assert explorer.wait_new_model_state_dict(None, timeout=LONG) is None
    assert caplog.text.count("no version was published: explorer continues without a version") == 1


@pytest.mark.parametrize("engine", [FakeEngine, Taker])
@pytest.mark.parametrize("method", SyncMethod)
def test_a_step_on_nothing_waits_for_the_trainer(
    job: SmallJob, aside: Any, stack: ExitStack, method: SyncMethod, engine: type[FakeEngine]
) -> None:
    settings = SyncSettings(method=method, style=SyncStyle.TRAINER_DRIVEN)
    with ExplorerHook(
        job.root, "explorer", engine(), settings=settings, poll=0.02, storage=job.explorers
    ) as hook:
        job.hosts.let_time_pass()
        waiting = aside(hook.after_step, 1)
        with pytest.raises(TimeoutError):
            waiting.result(0.2)
        trainer = stack.enter_context(TrainerSynchronizer(job.root))
        trainer.set_trainer_status(RunningStatus.RUNNING)
        if method is SyncMethod.NCCL and engine is Taker:
            assert waiting.result(LONG) is None  # the trainer says when
            return
        wait_until(trainer.explorer_requires_sync, "it asks")
        publish(job, 1)
        assert waiting.result(LONG) == HELD
