"""Which sync goes how, and what an explorer that has weights by a broadcast makes of versions."""

import shutil
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from explorer_hooks.broadcast import WeightReceiver, greet
from explorer_hooks.engines.fake import FakeEngine
from explorer_hooks.hook import ExplorerHook
from explorer_hooks.reader import LeasedVersion
from syncd.checkpoint.tensor_rules import Casting
from syncd.coordination import ExplorerSynchronizer, TrainerSynchronizer
from syncd.coordination.broadcast.group import WeightGroup
from syncd.coordination.broadcast.weight_meta import Header
from syncd.coordination.member import Doubles
from syncd.protocol.errors import BroadcastError
from syncd.protocol.policy import RunningStatus, SyncSettings, Version, may_produce
from syncd.protocol.records import SaveId
from syncd.protocol.reports import Rendezvous
from tests.engines.waiting import wait_for
from tests.explorers import LONG, leased, publish, pulls, report
from tests.jobs import SmallJob
from tests.refusals import engine_broken, too_late
from tests.weight_groups import transfer
from trainer_hooks import TrainerHook
from trainer_hooks.explorers import Explorers
from trainer_hooks.fast_path import Cadence, TrainerBroadcasts, WeightSender

# -- the trainer's -----------------------------------------------------------------------------


def test_of_so_many_syncs_one_is_saved_and_the_first_one() -> None:
    cadence = Cadence(checkpoint_every=3)
    saved = []
    for step in range(1, 9):
        if cadence.is_save_due:
            saved.append(step)
            cadence.saved(step)
        else:
            cadence.passed(step)
            cadence.passed(step)  # looked at again while the trainer waits for data
    assert saved == [1, 4, 7]


def test_broadcasts_that_fail_are_tried_less_and_less_often() -> None:
    cadence = Cadence(checkpoint_every=1)
    pauses = []
    for _ in range(7):
        cadence.failed()
        pause = 0
        while not cadence.may_try():
            pause += 1
        pauses.append(pause)
    assert pauses == [0, 1, 3, 7, 15, 15, 15]
    cadence.succeeded()
    cadence.failed()
    assert cadence.may_try()


def test_whatever_a_sending_ends_with_ends_no_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def send(*_: object) -> None:
        raise RuntimeError("nobody foresaw it")

    monkeypatch.setattr(WeightSender, "send", send)
    settings = SyncSettings(method="nccl")  # type: ignore[arg-type] # a name will do
    path = TrainerBroadcasts(nn.Linear(2, 2), settings, Explorers())
    assert not path.send(3)
    assert (path.failures, path.broadcasts) == (1, 0)
    assert (
        "step 3 was not broadcast, so explorers load it from the files: nobody foresaw it"
        in caplog.text
    )


def sending(path: TrainerBroadcasts) -> Callable[[WeightGroup], bool]:
    def send(group: WeightGroup) -> bool:
        path._group = group
        return path.send(1)

    return send


@pytest.mark.parametrize(("said", "checked"), [(None, True), (True, True), (False, False)])
def test_a_broadcast_is_cut_and_digested_as_the_settings_say(
    said: bool | None, checked: bool
) -> None:
    """Where they say nothing, what comes from a CPU is digested."""
    settings = SyncSettings(method="nccl", broadcast_bucket=128, broadcast_digests=said)  # type: ignore[arg-type] # a name will do
    path = TrainerBroadcasts(nn.Linear(2, 2), settings, Explorers())

    def receive(group: WeightGroup) -> Header:
        with greet(group, None) as arriving:
            pass
        for _ in arriving.tensors():
            pass
        arriving.end()
        return arriving.header

    sent, header = (rank.result() for rank in transfer(sending(path), receive))
    assert sent
    assert (header.bucket_bytes, header.has_digests) == (128, checked)


def test_a_broadcast_is_cast_and_looked_at_as_it_is_sent(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 2)
    nn.init.constant_(model.bias, 1e6)
    path = TrainerBroadcasts(model, SyncSettings(method="nccl"), Explorers(), Casting("fp16"))  # type: ignore[arg-type] # a name will do

    sent, received = transfer(
        sending(path), lambda group: dict(WeightReceiver(group).receive(lambda _: None))
    )
    assert sent.result()
    for name, value in model.state_dict().items():
        assert torch.equal(received.result()[name], value.half())
    assert "step 1 was broadcast with NaN or Inf in 1 tensor (bias)" in caplog.text


class Held:
    """A tokenizer that is written when it is let go: until then the writer is busy.

    The constructor of a hook writes it at once.
    """

    def __init__(self) -> None:
        self.free = threading.Event()
        self.free.set()

    def save_pretrained(self, save_directory: str) -> None:
        del save_directory
        assert self.free.wait(LONG)


def test_what_could_not_be_broadcast_is_saved_though_the_writer_is_busy(job: SmallJob) -> None:
    settings = SyncSettings(method="nccl", broadcast_timeout=0.1)  # type: ignore[arg-type] # a name will do
    root, held = job.root, Held()
    with ExplorerSynchronizer(root, "busy") as explorer:
        explorer.set_explorer_status(RunningStatus.RUNNING)  # and never waits for a broadcast
        with TrainerHook(root, nn.Linear(2, 2), tokenizer=held, settings=settings) as hook:
            held.free.clear()
            hook.after_step(1)
            metrics = hook.after_step(2)  # while that of step 1 is written
            held.free.set()
    assert (metrics["sync/broadcast_failures"], metrics["sync/skipped"]) == (2, 0)
    assert job.state_pointer.read_text().strip() == "2"


# -- the explorer's ----------------------------------------------------------------------------


class Taker(FakeEngine):
    """Takes broadcasts."""

    workers = 1

    def receive(self, rendezvous: Rendezvous, rank_offset: int, deadline: float) -> None:
        raise NotImplementedError  # a test takes for it

    def leave(self) -> None:
        """It is in no group."""


class Steady(Taker):
    """Is never restarted."""

    def still_serves(self, version: LeasedVersion) -> bool:
        del version
        return True


@pytest.fixture
def trainer(job: SmallJob) -> Iterator[TrainerSynchronizer]:
    """That of the saves of :class:`Job`."""
    root, doubles = job.root, Doubles(poll=0.02)
    with TrainerSynchronizer(root, run_id="run", doubles=doubles) as made:
        made.set_trainer_status(RunningStatus.RUNNING)
        yield made


@pytest.fixture
def engine() -> Taker:
    return Steady()


@pytest.fixture
def empty(job: SmallJob, engine: Taker) -> Iterator[ExplorerHook]:
    settings = SyncSettings(method="nccl", max_staleness=0)  # type: ignore[arg-type] # a name will do
    with ExplorerHook(job.root, "explorer", engine, settings=settings, poll=0.02) as made:
        yield made


@pytest.fixture
def hook(job: SmallJob, empty: ExplorerHook) -> ExplorerHook:
    """With version 1."""
    publish(job, 1)
    empty.pull(0)
    return empty


def receives(hook: ExplorerHook, step: int, counter: int, run: str = "run") -> None:
    hook._pipeline.receive(SaveId(run, step, counter), lambda: None)


def publish_save(job: SmallJob, step: int, counter: int) -> None:
    job.save(step, counter=counter)
    job.run()


def has_nothing_newer(hook: ExplorerHook) -> bool:
    return hook.pull(0) is None


def test_a_version_of_weights_that_were_broadcast_is_held_and_not_loaded(
    job: SmallJob, engine: Taker, empty: ExplorerHook, trainer: TrainerSynchronizer
) -> None:
    del trainer
    hook = empty
    publish(job, 1)
    assert report(job).workers == 0  # nothing that it could go back to
    pulls(hook, 1, 1)
    assert report(job).workers == 1
    receives(hook, step=7, counter=4)
    assert hook.version == Version(1, 7)
    assert hook.wait_until_served(0, newer_than=Version(1, 1)) == Version(1, 7)
    for step, counter in ((6, 3), (7, 4)):  # one that comes late, and its own
        publish_save(job, step, counter)
        assert hook.may_produce()  # it has those weights, or newer ones
        assert has_nothing_newer(hook)
    said = report(job)
    assert (said.sequence, said.step, said.received) == (3, 7, "run-7-4")
    assert (engine.asked("load"), leased(job)) == ([1], [3])
    publish_save(job, 8, 5)
    assert not hook.may_produce()
    pulls(hook, 4, 8)
    assert (engine.asked("load"), report(job).received) == ([1, 4], None)


def test_versions_of_an_earlier_trainer_are_not_newer_than_a_broadcast(
    job: SmallJob, engine: Taker, hook: ExplorerHook, trainer: TrainerSynchronizer
) -> None:
    receives(hook, step=2, counter=1)
    publish_save(job, 9, 0)  # of this run, at a counter below
    assert has_nothing_newer(hook)
    receives(hook, step=3, counter=0, run="another")
    publish_save(job, 4, 8)
    pulls(hook, 3, 4)  # "another" does not work any more
    receives(hook, step=12, counter=20)
    trainer.set_trainer_status(RunningStatus.STOPPED)
    publish_save(job, 11, 2)
    assert has_nothing_newer(hook)
    assert engine.asked("load") == [1, 3]


def test_weights_of_a_broadcast_stay_when_their_job_is_made_again(
    job: SmallJob, engine: Taker, hook: ExplorerHook, trainer: TrainerSynchronizer
) -> None:
    receives(hook, step=7, counter=4)
    shutil.rmtree(job.root)
    again = SmallJob(job.root)
    assert not hook.may_produce()
    trainer.add_module()
    wait_for(lambda: hook.synchronizer.current_run() == "run")
    again.save(7, counter=4)
    with again.daemon() as loop:
        loop.run_once()
    assert has_nothing_newer(hook)
    assert hook.may_produce()
    said = report(job)
    assert (said.of_another_job, said.step, said.received) == (False, 7, "run-7-4")
    assert (engine.asked("load"), leased(again)) == ([1], [1])


def test_a_step_that_is_to_be_evaluated_is_loaded_also_after_a_later_broadcast(
    job: SmallJob, engine: Taker, hook: ExplorerHook, trainer: TrainerSynchronizer
) -> None:
    receives(hook, step=9, counter=8)
    publish_save(job, 5, 3)
    assert has_nothing_newer(hook)  # it has later weights of the run
    trainer.set_trainer_status(RunningStatus.STOPPED)
    assert hook.pull_step(5, 0) == Version(2, 5)
    assert (engine.asked("load"), report(job).received) == ([1, 2], None)


def test_a_version_that_was_rolled_back_to_is_loaded_also_after_a_broadcast(
    job: SmallJob, engine: Taker, hook: ExplorerHook, trainer: TrainerSynchronizer
) -> None:
    del trainer
    receives(hook, step=3, counter=2)
    publish(job, 2)
    job.ask_rollback(1)
    job.run()
    pulls(hook, 3, 1)
    assert engine.asked("load") == [1, 3]


def test_a_sync_waits_for_a_job_that_is_away_as_without_broadcasts(
    job: SmallJob, engine: Taker
) -> None:
    settings = SyncSettings(method="nccl", sync_timeout=0.1)  # type: ignore[arg-type] # a name will do
    away = job.layout.format.with_name("away")
    with ExplorerHook(job.root, "explorer", engine, settings=settings, poll=0.02) as hook:
        job.layout.format.rename(away)
        with too_late("is its storage mounted"):
            hook.after_step(1)
        away.rename(job.layout.format)


def test_a_step_that_does_not_wait_gives_an_engine_what_it_has_lost(job: SmallJob) -> None:
    settings = SyncSettings(method="nccl", style="trainer_driven")  # type: ignore[arg-type] # names will do
    engine = Taker()
    publish(job, 1)
    with ExplorerHook(job.root, "explorer", engine, settings=settings, poll=0.02) as hook:
        hook.pull(0)
        engine.restart()
        assert hook.after_step(1) == Version(1, 1)
        assert (engine.asked("load"), hook.fault) == ([1, 1], None)


def test_a_broadcast_that_comes_to_nothing_changes_nothing(
    engine: Taker, hook: ExplorerHook
) -> None:

    def fail() -> None:
        raise BroadcastError("the trainer is gone")

    with pytest.raises(BroadcastError):
        hook._pipeline.receive(SaveId("run", 2, 1), fail)
    assert (hook.version, hook.fault, engine.is_paused) == (Version(1, 1), None, False)


def test_an_engine_that_cannot_be_paused_for_a_broadcast_has_only_missed_it(
    engine: Taker, hook: ExplorerHook
) -> None:
    engine.fail("pause", RuntimeError("it is in the middle of something"))
    with pytest.raises(BroadcastError, match="in the middle of something"):
        receives(hook, step=2, counter=1)
    assert (hook.version, hook.fault, engine.is_paused) == (Version(1, 1), None, False)
    receives(hook, step=3, counter=2)
    assert hook.version == Version(1, 3)


def test_an_engine_that_a_broadcast_broke_is_given_the_newest_version(
    job: SmallJob, engine: Taker, hook: ExplorerHook
) -> None:
    receives(hook, step=2, counter=1)

    def tear() -> None:
        raise RuntimeError("in the middle of it")

    with engine_broken("in the middle of it"):
        hook._pipeline.receive(SaveId("run", 3, 2), tear)
    assert (report(job).workers, hook.may_produce()) == (0, False)
    assert has_nothing_newer(hook)  # and so it goes back to what it holds
    assert (hook.version, hook.fault) == (Version(1, 1), None)
    assert (engine.asked("load"), report(job).workers) == ([1, 1], 1)


def test_what_comes_by_the_files_counts_once_it_is_published(
    job: SmallJob, hook: ExplorerHook, trainer: TrainerSynchronizer
) -> None:
    """Its save may fail: whoever waits for data must not wait for who may not produce."""
    trainer.goes_by_files(2)
    assert hook.may_produce()
    publish(job, 2)
    assert not hook.may_produce()


def test_who_missed_a_broadcast_lags_by_it() -> None:
    settings = SyncSettings(max_staleness=2)
    assert may_produce(settings, Version(3, 10), Version(3, 12))
    assert not may_produce(settings, Version(3, 10), Version(3, 13))
    assert may_produce(settings, Version(3, 13), Version(3, 12))
