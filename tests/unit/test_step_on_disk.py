"""Asking for a step by its number: it is on disk, is becoming whole, or is not there at all."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from explorer_hooks import bench
from explorer_hooks.engines.fake import FakeEngine
from explorer_hooks.hook import ExplorerHook
from syncd.coordination import TrainerSynchronizer
from syncd.coordination.member import Doubles
from syncd.daemon.config import DaemonConfig
from syncd.protocol.errors import SaveNotReadyError
from syncd.protocol.names import FULL
from syncd.protocol.policy import RunningStatus, Version
from tests.explorers import LONG, publish
from tests.jobs import SmallJob
from tests.multiprocess.processes import wait_until
from tests.refusals import invalid

pytestmark = pytest.mark.lagging

ASKS: dict[str, Callable[[ExplorerHook, int], object]] = {
    "pull_step": lambda hook, step: hook.pull_step(step),
    "bench.step": bench.step,
    "set_model_state_dict_with_step_num": lambda hook, step: (
        hook.synchronizer.set_model_state_dict_with_step_num(step)
    ),
}


@pytest.fixture
def hook(job: SmallJob) -> Iterator[ExplorerHook]:
    with ExplorerHook(job.root, "explorer", FakeEngine(), poll=0.02, storage=job.explorers) as made:
        yield made


@pytest.mark.parametrize("ask", ASKS)
def test_a_step_that_is_not_on_disk_is_an_error_at_once_and_nothing_is_pointed_to_it(
    job: SmallJob, hook: ExplorerHook, ask: str
) -> None:
    with pytest.raises(SaveNotReadyError, match=r"step 99 is not on disk; .* has no steps"):
        ASKS[ask](hook, 99)
    assert not job.state_pointer.exists()
    for step in (4, 0):
        job.save(step, point=False)
        (job.step(step) / FULL).touch()  # else they are pruned
    publish(job, 8)
    with pytest.raises(
        SaveNotReadyError, match=r"99 is not on disk; the steps on disk are 0, 4, 8$"
    ):
        ASKS[ask](hook, 99)
    assert job.pointed == "8\n"


def test_a_trainer_that_asks_for_a_step_that_is_not_on_disk_announces_nothing(
    job: SmallJob,
) -> None:
    with TrainerSynchronizer(job.root, doubles=Doubles(storage=job.explorers)) as trainer:
        trainer.set_trainer_status(RunningStatus.RUNNING)
        with pytest.raises(SaveNotReadyError, match="step 99 is not on disk"):
            trainer.set_model_state_dict_with_step_num(99)
        assert trainer._me.record.step is None


@pytest.mark.parametrize("ask", ["pull_step", "set_model_state_dict_with_step_num"])
def test_the_pointer_from_which_a_trainer_resumes_is_never_changed(
    job: SmallJob, hook: ExplorerHook, ask: str
) -> None:
    for step in (4, 8):
        job.save(step, point=False)
        (job.step(step) / FULL).touch()  # else they are pruned
    resumed_from = job.layout.checkpoint_pointer
    job.put(resumed_from, b"8\n")
    with job.daemon(DaemonConfig(pointer=resumed_from.name)) as loop:
        loop.run_once()
        with invalid(rf"the step that {resumed_from} names"):
            ASKS[ask](hook, 4)
        assert ASKS[ask](hook, 8) is not None
    assert resumed_from.read_text() == "8\n"
    assert not job.state_pointer.exists()


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_step_that_has_just_come_is_found_though_its_client_remembers_that_it_was_not_there(
    job: SmallJob, hook: ExplorerHook, is_whole: bool
) -> None:
    with pytest.raises(SaveNotReadyError):
        hook.pull_step(4)
    job.hosts.let_time_pass()
    if is_whole:
        job.save(4, point=False)
    else:
        job.actor(4).mkdir(parents=True)
    with ThreadPoolExecutor(1) as aside, job.daemon() as loop:
        pulling = aside.submit(hook.pull_step, 4, LONG)
        wait_until(job.state_pointer.exists, "it is pointed to")
        loop.run_once()
        if not is_whole:
            assert not pulling.done()
            loop.publish(4)
        assert pulling.result(LONG) == Version(1, 4)
