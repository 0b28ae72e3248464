"""The weight group with real processes: whoever dies or stops, and whenever, the others go on."""

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from syncd.coordination import ExplorerSynchronizer, TrainerSynchronizer
from syncd.coordination.broadcast.addresses import address_towards, listen, own_address
from syncd.protocol.errors import BroadcastError
from syncd.protocol.layout import JobLayout
from syncd.protocol.policy import RunningStatus, SyncSettings
from syncd.protocol.reports import Rendezvous
from tests.multiprocess.peers import Answer, Peer
from tests.multiprocess.processes import (
    DEADLINE,
    LEASE_TIME,
    explorer_report,
    wait_until,
)
from tests.multiprocess.weight_members import Actor
from tests.weight_groups import rendezvous

#: Seconds of a transfer that comes to nothing.
SHORT = 2.0


Start = Callable[[], Peer]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts members, which end with the test."""
    with ExitStack() as stack:

        def peer() -> Peer:
            made = Peer(Actor)
            stack.callback(made.end)
            return made

        yield peer


def form(*processes: Peer, generation: int = 1) -> None:
    """Let them form a group: the first is the trainer."""
    names = [f"e{number}" for number in range(1, len(processes))]
    join(rendezvous(processes[0]("listen"), *names, generation=generation), *processes)


def join(met: Rendezvous, *processes: Peer) -> None:
    for rank, one in enumerate(processes):
        one.tell("join", met, rank)
    for one in processes:
        one.answer()


def transfer(value: int, *processes: Peer) -> None:
    """A transfer that succeeds: all have all of it."""
    for one in processes:
        one("begin", DEADLINE)
    for one in processes:
        one.tell("send", value, 2)
    for one in processes:
        assert one.hear().value == [value, value + 1]


def bucket(value: int, *processes: Peer) -> None:
    """A broadcast that succeeds, in a transfer that is begun by it."""
    for one in processes:
        one("begin", DEADLINE)
    for one in processes:
        one.tell("bucket", value)
    assert {one.hear().value for one in processes} == {value}


def gave_up(answer: Answer) -> bool:
    """Whether it came to nothing, and not long after the deadline."""
    assert answer.error is not None or answer.value in {None, False}, answer
    assert answer.seconds < SHORT + DEADLINE / 2
    return True


def strike(victim: Peer, signal: str) -> None:
    if signal == "kill":
        victim.kill()
        victim.wait_until_killed()
    else:
        victim.pause()
        victim.wait_until_stopped()


STRUCK = [(who, signal) for who in ("trainer", "explorer") for signal in ("kill", "stop")]


each_stroke = pytest.mark.parametrize(("who", "signal"), STRUCK)


@each_stroke
@pytest.mark.parametrize("stage", ["while it forms", "between buckets", "before it votes"])
def test_whoever_dies_or_stops_the_others_give_up_at_the_deadline_and_go_on_without(
    start: Start, who: str, signal: str, stage: str
) -> None:
    everybody = trainer, first, _ = start(), start(), start()
    victim = trainer if who == "trainer" else first
    others = [one for one in everybody if one is not victim]
    if stage == "while it forms":
        met = rendezvous(trainer("listen"), "e1", "e2")
        ranks = {one: rank for rank, one in enumerate(everybody)}
        victim.tell("join", met, ranks[victim], SHORT)
        strike(victim, signal)
        for one in others:
            one.tell("join", met, ranks[one], SHORT)
    else:
        form(*everybody)
        transfer(1, *everybody)
        bucket(11, *everybody)
        strike(victim, signal)
        for one in others:
            one("begin", SHORT)
        for one in others:
            one.tell("send", 12, 1) if stage == "between buckets" else one.tell("agree")
    assert all(gave_up(one.hear()) for one in others)
    if who == "explorer":
        form(*others, generation=2)
        transfer(21, *others)
    if signal == "kill":
        return
    # It goes on in the middle of what the others have left, and does them no harm.
    victim.resume()
    if stage != "while it forms" or victim.hear().error is None:
        # Where it is alone with what the others have left behind, there are no transfers.
        victim("begin", SHORT)
        victim.tell("agree") if stage == "before it votes" else victim.tell("send", 66, 1)
        assert gave_up(victim.hear())
    if who == "explorer":
        transfer(31, *others)
    form(*everybody, generation=3)
    transfer(41, *everybody)
    assert not any(one("left_behind") for one in everybody)


@each_stroke
def test_where_it_is_not_known_who_has_heard_the_verdict_the_trainer_says_that_it_failed(
    start: Start, who: str, signal: str
) -> None:
    everybody = trainer, first, _ = start(), start(), start()
    form(*everybody)
    victim = trainer if who == "trainer" else first
    bucket(11, *everybody)
    for one in everybody:
        one("begin", SHORT)
    victim.tell("agree")
    time.sleep(SHORT / 4)  # it votes, as far as can be told from without
    strike(victim, signal)
    others = [one for one in everybody if one is not victim]
    for one in others:
        one.tell("agree")
    answers = {one: one.hear() for one in others}
    if who == "explorer":
        assert gave_up(answers[trainer])  # the files bring it to whom it has not reached
    else:
        assert all(gave_up(answer) for answer in answers.values())
    if signal == "stop":
        victim.resume()
        answer = victim.hear()
        if who == "trainer":
            assert gave_up(answer)
        form(*everybody, generation=2)
        transfer(21, *everybody)


def test_a_group_serves_many_transfers_a_refusal_ends_none_and_nothing_is_left(
    start: Start, tmp_path: Path
) -> None:
    everybody = trainer, first, second = start(), start(), start()
    trainer("have_a_default_group", tmp_path / "default")
    form(*everybody)
    for value in range(0, 50, 10):
        transfer(value, *everybody)
    for one in everybody:
        one.tell("send", 1, 1, one is not second)
    assert [one.hear().value for one in everybody] == [None, None, None]
    transfer(5, *everybody)
    for one in (second, first, trainer):
        one("close")
        one("close")
    for one in everybody:
        one.tell("bucket", 1)
        assert "was closed" in one.refusal()
        assert not one("left_behind")


def test_a_program_that_ends_in_the_middle_of_a_transfer_ends_well(start: Start) -> None:
    for _ in range(2):  # it is a race
        trainer, explorer = start(), start()
        form(trainer, explorer)
        strike(explorer, "stop")
        trainer("begin", SHORT / 4)
        trainer.tell("send", 1, 2)
        assert gave_up(trainer.hear())
        trainer.hang_up()  # not by std::terminate


def test_a_port_that_is_taken_is_said_and_the_own_one_is_free_after_a_failure(
    start: Start,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BroadcastError, match=rf"another program uses port {port} of"):
            listen("127.0.0.1", port)
    with pytest.raises(BroadcastError, match="cannot listen on"):
        listen("192.0.2.1" if own_address() != "192.0.2.1" else "198.51.100.1", 0)
    trainer, explorer, late = start(), start(), start()
    port = trainer("listen")
    join(rendezvous(port, "e1"), trainer, explorer)
    strike(explorer, "stop")
    trainer("begin", SHORT)
    trainer.tell("send", 1, 2)
    assert gave_up(trainer.hear())
    assert trainer("listen", port) == port
    join(rendezvous(port, "e2", generation=2), trainer, late)
    transfer(1, trainer, late)


def test_who_comes_to_another_jobs_store_harms_nobody_and_is_told(start: Start) -> None:
    one_job, other_job = (start(), start()), (start(), start())
    form(*one_job)
    port = other_job[0]("listen")
    join(rendezvous(port, "e1", name="other"), *other_job)
    stranger = start()
    stranger.tell("join", rendezvous(port, "e1", "e2", name="lost"), 2, SHORT)
    transfer(1, *one_job)
    transfer(2, *other_job)
    assert gave_up(stranger.hear())
    transfer(3, *other_job)
    stranger.tell("join", rendezvous(port, "e1"), 2, SHORT)
    assert "there is no rank 2 in a weight group of 2" in stranger.refusal()


# -- through the Synchronizer ----------------------------------------------------------------------


def met_at(job: Path) -> dict[str, object]:
    found = json.loads(JobLayout(job).rendezvous.read_bytes())
    assert isinstance(found, dict)
    return found


def meet(step: int, *processes: Peer) -> list[tuple[int, str, int]]:
    for one in processes:
        one.tell("meet", step)
    return [one.answer() for one in processes]


def test_a_generation_lives_until_its_members_change_or_one_has_failed(
    start: Start, job: Path
) -> None:
    trainer, one, other = start(), start(), start()
    trainer("register", "trainer", job, "trainer")
    one("register", "explorer", job, "one")
    assert [rank for _, _, rank in meet(1, trainer, one)] == [0, 1]
    transfer(1, trainer, one)
    for process in (trainer, one):
        process("succeeded", 1)
    told = explorer_report(job, "one")
    assert (told.step, told.received, told.group) == (1, "run-1-1", met_at(job)["group_name"])
    assert meet(2, trainer, one)[0][1] == told.group  # the same again
    transfer(2, trainer, one)
    for process in (trainer, one):
        process("succeeded", 2)
    other("register", "explorer", job, "other")
    found = meet(3, trainer, one, other)
    assert {name for _, name, _ in found} == {met_at(job)["group_name"]} != {told.group}
    assert [rank for _, _, rank in found] == [0, 1, 2]
    assert met_at(job)["generation"] == 2
    transfer(3, trainer, one, other)
    # One of them was in trouble, and the trainer has not noticed.
    one("succeeded", 3)
    other("call", "group_failed")
    assert meet(4, trainer, one, other)[0][1] != found[0][1]
    transfer(4, trainer, one, other)
    other.kill()
    other.wait_until_killed()
    trainer("call", "group_failed")
    one("call", "group_failed")
    wait_until(
        lambda: trainer("call", "takers")._asdict() == {"working": 1, "by_broadcast": 1},
        "it is dead",
        10 * LEASE_TIME + DEADLINE,
    )
    assert [rank for _, _, rank in meet(5, trainer, one)] == [0, 1]
    transfer(5, trainer, one)
    assert met_at(job)["generation"] == 4


def test_the_workers_of_an_explorer_are_contiguous_and_one_without_takes_no_part(
    start: Start, job: Path
) -> None:
    trainer, plain, two, worker = start(), start(), start(), start()
    trainer("register", "trainer", job, "trainer")
    plain("register", "explorer", job, "z")
    two("register", "explorer", job, "a", 2)
    by_files = ExplorerSynchronizer(job, "by-files", workers=0)
    with by_files:
        by_files.set_explorer_status(RunningStatus.RUNNING)
        assert trainer("call", "takers")._asdict() == {"working": 3, "by_broadcast": 2}
        trainer.tell("meet", 1)
        plain.tell("meet")
        found, rank = two("where")
        assert [(one.name, one.rank_offset, one.workers) for one in found.members] == [
            ("a", 1, 2),
            ("z", 3, 1),
        ]
        assert (rank, found.world_size) == (1, 4)
        two.tell("join", found, rank)
        worker.tell("join", found, rank + 1)
        assert [one.answer() for one in (trainer, plain, two, worker)][1][2] == 3
        transfer(1, trainer, plain, two, worker)


def test_two_jobs_on_one_host_do_not_meet(start: Start, tmp_path: Path) -> None:
    pairs = []
    for number in range(2):
        job = tmp_path / f"job-{number}"
        job.mkdir()
        trainer, explorer = start(), start()
        trainer("register", "trainer", job, "trainer")
        explorer("register", "explorer", job, "e")
        pairs.append((trainer, explorer))
    for pair in pairs:
        meet(1, *pair)
    for value in range(3):
        for number, pair in enumerate(pairs):
            transfer(100 * number + value, *pair)


def test_setup_forms_the_group_where_it_is_told_and_teardown_ends_it_explorers_first(
    start: Start, job: Path
) -> None:
    trainer, explorer = start(), start()
    trainer("register", "trainer", job, "trainer", broadcast_timeout=DEADLINE)
    explorer("register", "explorer", job, "e")
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    trainer("call", "setup_weight_sync_group", "127.0.0.1", port)
    for one in (trainer, explorer):
        one.tell("call", "coordinate_weight_sync_setup", DEADLINE)
    for one in (trainer, explorer):
        one.answer()
    assert met_at(job)["port"] == port
    assert explorer_report(job, "e").group == met_at(job)["group_name"]
    assert meet(1, trainer, explorer)[0][1] == met_at(job)["group_name"]
    transfer(1, trainer, explorer)
    explorer("succeeded", 1)
    trainer.tell("call", "coordinate_weight_sync_teardown")
    assert not trainer.has_answered(within=0.5)  # it waits for the explorer
    explorer("call", "coordinate_weight_sync_teardown")
    trainer.answer()
    assert explorer_report(job, "e").group is None
    assert not any(one("left_behind") for one in (trainer, explorer))
    with listen("127.0.0.1", port):
        pass


def test_a_step_that_goes_by_the_files_ends_the_wait_for_a_transfer_at_once_and_once(
    job: Path,
) -> None:
    settings = SyncSettings(method="nccl")  # type: ignore[arg-type] # as from a file
    with TrainerSynchronizer(job, settings=settings) as trainer:
        trainer.set_trainer_status(RunningStatus.RUNNING)
        trainer.goes_by_files(6)  # nobody is there to hear it
        with ExplorerSynchronizer(job, "e", settings=settings) as explorer:
            explorer.set_explorer_status(RunningStatus.RUNNING)
            assert explorer.ready_to_nccl_sync(timeout=0.1) is None  # it was for those before
            trainer.goes_by_files(7)
            begun = time.monotonic()
            assert explorer.ready_to_nccl_sync(timeout=10 * DEADLINE) is None
            assert time.monotonic() - begun < DEADLINE
            begun = time.monotonic()
            assert explorer.ready_to_nccl_sync(timeout=0.3) is None
            assert time.monotonic() - begun >= 0.3
            with pytest.raises(BroadcastError, match="no transfer was agreed"):
                explorer.rendezvous()


@pytest.mark.parametrize("name", ["no..host", "x" * 64])
def test_an_address_that_is_none_is_an_error_of_the_broadcast(name: str) -> None:
    with pytest.raises(BroadcastError, match="cannot listen on"):
        listen(name, 0)


def test_this_host_has_an_address(job: Path) -> None:
    assert address_towards("127.0.0.1", 1) == "127.0.0.1"
    with listen(own_address(), 0) as listening:
        assert listening.getsockname()[0] == own_address()
    assert job.exists()
