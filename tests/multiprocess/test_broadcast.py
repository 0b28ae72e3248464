"""Weights by broadcast, through the real hooks and a real daemon: whoever fails, and whenever."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from syncd.protocol.layout import JobLayout
from syncd.protocol.reports import Offer, TrainerReport
from tests.jobs import read
from tests.multiprocess.broadcasting import Cast, TrainerRanks, cast, ready
from tests.multiprocess.peers import Peer
from tests.multiprocess.processes import (
    Daemon,
    explorer_report,
    newest,
    wait_for_step,
    wait_until,
)

#: Seconds: a participant that is stopped or gone is given up after so long. A broadcast that
#: succeeds takes a fraction of a second; where one is late all the same, the files carry its step.
SHORT = {"broadcast_timeout": 6.0}


@pytest.fixture
def stage(tmp_path: Path, job: Path) -> Iterator[Cast]:
    """Participants of a job that is served."""
    with cast(tmp_path, job) as made, Daemon(job):
        yield made


def members(job: Path) -> set[str]:
    """Who the last offer was made to."""
    return {member.name for member in read(Offer, JobLayout(job).offer).members}


def reaches(truth: dict[str, Any], step: int, *explorers: Peer) -> None:
    """See that explorers come to serve a step, bit by bit."""
    for one in explorers:
        served = one("wait_for", step)
        assert (served["digest"], served["step"]) == (truth["digest"], step), served


def broadcasts_again(trainer: TrainerRanks, step: int, *explorers: Peer) -> int:
    """Train until a step was broadcast; each reaches the explorers, however it goes."""
    begun = None
    for each in range(step, step + 40):
        truth = trainer.step(each)
        reaches(truth, each, *explorers)
        if begun is not None and truth["sync/broadcasts"] > begun:
            return each + 1
        begun = truth["sync/broadcasts"]
    raise AssertionError("nothing was broadcast in 40 steps")


def takes_fourth(trainer: TrainerRanks, explorer: Peer, after: int) -> Any:
    """Step 4 goes to an explorer at the end of its own step."""
    served = explorer("after_step", after)
    truth = trainer[0].answer()
    assert (served["step"], served["digest"]) == (4, truth["digest"])
    assert truth["sync/broadcasts"] == 1
    return served


def test_all_explorers_have_the_trainers_bits_after_each_sync(job: Path, stage: Cast) -> None:
    """One explorer, two, three; the last with two workers; of whom none loads what it has."""
    trainer = stage.trainer(2, checkpoint_every=4)
    first = stage.explorer("first")
    reaches(trainer.step(1), 1, first)  # by the files: it had nothing to begin with
    explorers = [first]
    for step in range(2, 12):
        if step in {5, 8}:  # from the newest version there is, and with the others from then on
            explorers.append(stage.explorer(f"from-{step}", workers={5: 1, 8: 2}[step]))
        ready(job, "first", *(f"from-{one}" for one in (5, 8) if one <= step))
        truth = trainer.step(step)
        reaches(truth, step, *explorers)
        assert (truth["sync/broadcasts"], truth["sync/broadcast_failures"]) == (step - 1, 0)
    assert stage.worker("served")["digest"] == truth["digest"]
    assert wait_for_step(job, 9).sequence == 3  # of steps 1, 5 and 9
    adopted = wait_until(
        # It serves a step before its report says so.
        lambda: (
            one if ((one := explorer_report(job, "first")).sequence, one.step) == (3, 11) else None
        ),
        "it is adopted",
    )
    assert (adopted.received is not None, adopted.workers) == (True, 1)
    trainer.all("close")
    assert wait_for_step(job, 11).sequence == 4  # what was broadcast last is on disk
    wait_until(lambda: explorer_report(job, "first").sequence == 4, "it is adopted")
    assert [one("served")["loads"] for one in explorers] == [1, 1, 1]
    late = stage.explorer("late")
    reaches(truth, 11, late)
    for one in (late, *explorers, *trainer):
        one.leave()


def test_an_explorer_that_dies_costs_the_others_one_broadcast(job: Path, stage: Cast) -> None:
    """Before the handshake, in it, between two buckets, and when all have the last byte."""
    trainer = stage.trainer(2, **SHORT)
    stays = stage.explorer("stays", **SHORT)
    step = 1
    for when in ("before", "joined", "bucket", "agree"):
        dies = stage.explorer(when, **SHORT)
        step = _until_both_are_ready(job, trainer, step, stays, dies, "stays", when)
        if when == "before":
            dies.kill()
        else:
            dies("at", when, signal.SIGKILL, after={"bucket": 3, "agree": 2}.get(when, 0))
        truth = trainer.step(step)
        dies.wait_until_killed()
        reaches(truth, step, stays)
        step = broadcasts_again(trainer, step + 1, stays)


def _until_both_are_ready(
    job: Path, trainer: TrainerRanks, step: int, one: Peer, other: Peer, *names: str
) -> int:
    if step > 1:  # else there is nothing yet that it could begin with
        ready(job, *names)
    reaches(trainer.step(step), step, one, other)
    ready(job, *names)
    return step + 1


def test_a_trainer_that_dies_leaves_explorers_to_the_next_one(job: Path, stage: Cast) -> None:
    """While it offers, before it says where to meet, between two buckets, before the last word."""
    explorers = [stage.explorer(name, **SHORT) for name in ("one", "other")]
    step = 1
    for when, after in (("offered", 0), ("decided", 0), ("bucket", 3), ("agree", 2)):
        trainer = stage.trainer()  # which is there until it dies, however late others are
        truth = trainer.step(step)  # by the files, as the first one of each
        reaches(truth, step, *explorers)
        ready(job, "one", "other")
        trainer[0]("at", when, signal.SIGKILL, after=after)
        trainer[0].tell("step", step + 1)
        trainer[0].wait_until_killed()
        for one in explorers:
            assert one("served")["digest"] == truth["digest"]
        step += 2
    trainer = stage.trainer(**SHORT)
    reaches(trainer.step(step), step, *explorers)
    broadcasts_again(trainer, step + 1, *explorers)


@pytest.mark.parametrize("who", ["explorer", "trainer"])
def test_who_is_stopped_past_the_deadline_does_not_spoil_what_comes(
    job: Path, stage: Cast, who: str
) -> None:
    trainer = stage.trainer(**SHORT)
    explorers = [stage.explorer(name, **SHORT) for name in ("one", "other")]
    step = _until_both_are_ready(job, trainer, 1, *explorers, "one", "other")
    stopped = explorers[1] if who == "explorer" else trainer[0]
    stopped("at", "bucket", signal.SIGSTOP, after=3)
    trainer[0].tell("step", step)
    stopped.wait_until_stopped()
    if who == "explorer":
        truth = trainer[0].answer()
        reaches(truth, step, explorers[0])
        step = broadcasts_again(trainer, step + 1, explorers[0])
        stopped.resume()
        while "other" not in members(job):  # until the trainer sees that it lives
            truth = trainer.step(step)
            reaches(truth, step, explorers[0])
            step += 1
        reaches(truth, step - 1, stopped)
    else:
        ready(job, "one", "other")  # they have given up
        stopped.resume()
        truth = trainer[0].answer()
        reaches(truth, step, *explorers)
        step += 1
    broadcasts_again(trainer, step, *explorers)


def test_what_does_not_fit_is_refused_before_a_byte_moves(job: Path, stage: Cast) -> None:
    """The explorer keeps its weights, and holds nobody up from then on."""
    trainer = stage.trainer()
    stays = stage.explorer("stays")
    truth = trainer.step(1)
    reaches(truth, 1, stays)
    trainer[0].leave()
    other = stage.trainer(width=40)
    ready(job, "stays")
    assert other.step(2)["sync/broadcast_failures"] == 1
    wait_until(lambda: explorer_report(job, "stays").refused, "the version is refused")
    wait_until(lambda: not explorer_report(job, "stays").workers, "it takes no part any more")
    for step in (3, 4):
        assert other.step(step)["sync/broadcast_failures"] == 1
    assert stays("served")["digest"] == truth["digest"]
    fits = stage.explorer("fits", width=40)
    reaches(other.step(5), 5, fits)
    ready(job, "fits")
    broadcasts_again(other, 6, fits)


def test_a_gathering_that_fails_on_one_rank_ends_the_training(tmp_path: Path, job: Path) -> None:
    """The other is in that collective still: it would take the next one of the training for it."""
    with cast(tmp_path, job) as stage:
        first, other = stage.senders()
        for rank in (first, other):
            rank.tell("send_without_memory")
        assert "out of step" in first.refusal()
        assert not other.has_answered(within=0)
        first.kill()
        assert "out of step" in other.refusal()


def test_explorers_that_call_after_their_steps_are_waited_for(stage: Cast) -> None:
    """Style fixed: neither side goes on without the other; a trainer that stops ends the wait."""
    trainer = stage.trainer(sync_interval=2)
    explorer = stage.explorer("explorer", follows=False, max_staleness=0)
    trainer.step(1)
    explorer.tell("after_step", 1)
    truth = trainer.step(2)
    assert explorer.answer()["digest"] == truth["digest"]
    trainer.step(3)
    trainer[0].tell("step", 4)
    assert not trainer[0].has_answered(within=1.0)
    assert takes_fourth(trainer, explorer, 2)["may_produce"]
    explorer.tell("after_step", 3)
    trainer[0]("close")
    assert explorer.answer()["step"] == 4
    trainer[0].leave()
    explorer.leave()


def test_explorers_that_ask_get_a_broadcast_and_none_twice(job: Path, stage: Cast) -> None:
    driven = {"style": "explorer_driven"}
    explorer = stage.explorer("explorer", **driven)
    trainer = stage.trainer(**driven)
    wait_until(lambda: explorer_report(job, "explorer").requests, "it asks")
    reaches(trainer.step(1), 1, explorer)
    ready(job, "explorer")
    truth = trainer.step(2)
    reaches(truth, 2, explorer)
    assert truth["sync/broadcasts"] == 1
    wait_until(lambda: explorer_report(job, "explorer").received, "it says so")
    ready(job, "explorer")
    for _ in range(3):  # it has these weights, and goes on asking
        asked = explorer_report(job, "explorer").requests
        assert trainer[0]("wait_for_data")["sync/broadcasts"] == 1
        wait_until(lambda: explorer_report(job, "explorer").requests > asked, "it asks")  # noqa: B023 # at once
    reaches(trainer.step(3), 3, explorer)


def test_a_step_that_is_saved_is_broadcast_to_who_asks_and_not_saved_again(
    job: Path, stage: Cast
) -> None:
    driven = {"style": "explorer_driven"}
    trainer = stage.trainer(checkpoint_every=1, **driven)
    explorer = stage.explorer("explorer", **driven)
    wait_until(lambda: explorer_report(job, "explorer").requests, "it asks")
    reaches(trainer.step(1), 1, explorer)
    trainer[0]("over")
    ready(job, "explorer")
    told = trainer[0]("wait_for_data")
    assert told["sync/broadcasts"] == 1
    assert "time/sync_weight" not in told


def test_a_trainer_decides_when_explorers_wait_for_it(job: Path, stage: Cast) -> None:
    driven = {"style": "trainer_driven"}
    explorer = stage.explorer("explorer", follows=False, **driven)
    trainer = stage.trainer(sync_interval=2, **driven)
    assert explorer("after_step", 1)["step"] is None  # the trainer does not wait
    trainer.step(2)
    wait_for_step(job, 2)
    assert explorer("after_step", 2)["step"] == 2  # as there is something to take
    trainer.step(3)
    trainer[0].tell("step", 4)
    wait_until(lambda: trainer_status(job) == "require_sync", "the trainer waits")
    takes_fourth(trainer, explorer, 3)
    assert explorer("after_step", 4)["step"] == 4


def test_who_comes_after_a_broadcast_and_may_not_produce_gets_weights_by_the_files(
    job: Path, stage: Cast
) -> None:
    """Or it would wait for the next sync, and the trainer for its data."""
    fresh = {"max_staleness": 0, "sync_interval": 2}
    early = stage.explorer("early", **fresh)
    trainer = stage.trainer(2, **fresh)
    reaches(trainer.step(2), 2, early)
    ready(job, "early")
    truth = trainer.step(4)
    assert truth["sync/broadcasts"] == 1
    assert not saves_while_it_waits(trainer), "all have it, or load it"
    reaches(truth, 4, early)
    late = stage.explorer("late", **fresh)
    reaches_by_files(job, trainer, truth, 4, late)
    assert early("served")["loads"] == 1, "it had these weights"
    trainer.all("over")
    assert not saves_while_it_waits(trainer), "once is enough"
    ready(job, "early", "late")
    truth = trainer.step(6)
    assert truth["sync/broadcasts"] == 2
    reaches(truth, 6, early, late)
    truth = trainer.step(7)  # which is not due, and of step 6 nobody has the weights to save
    reaches_by_files(job, trainer, truth, 7, stage.explorer("later", **fresh), early, late)


def saves_while_it_waits(trainer: TrainerRanks) -> bool:
    """Wait for data, and see that all ranks do the same."""
    (saves,) = {"time/sync_weight" in told for told in trainer.all("wait_for_data")}
    return saves


def reaches_by_files(
    job: Path, trainer: TrainerRanks, truth: dict[str, Any], step: int, *explorers: Peer
) -> None:
    """See that a trainer that waits for data saves a step for who has missed a broadcast."""
    wait_until(lambda: saves_while_it_waits(trainer), "it is seen")
    wait_for_step(job, step)
    reaches(truth, step, *explorers)
    for one in explorers:  # its report says so a moment after
        wait_until(lambda one=one: one("served")["may_produce"], "it may produce")  # type: ignore[misc] # bound in this round


def trainer_status(job: Path) -> str:
    return read(TrainerReport, JobLayout(job).trainer_report).status


def test_without_explorers_steps_are_saved_now_and_then(job: Path, stage: Cast) -> None:
    trainer = stage.trainer(checkpoint_every=3)
    for step in range(1, 5):
        assert trainer.step(step)["sync/broadcasts"] == 0
        trainer[0]("over")
        wait_for_step(job, 4 if step == 4 else 1)
    assert wait_for_step(job, 4).sequence == 2
    late = stage.explorer("late")
    reaches({"digest": late("wait_for", 4)["digest"]}, 4, late)
    ready(job, "late")
    reaches(trainer.step(5), 5, late)
    assert newest(job).step == 4
