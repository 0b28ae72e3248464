import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from syncd.daemon.config import DaemonConfig
from syncd.daemon.decide import decide
from syncd.daemon.observation import Known, Observation, PointerState
from syncd.daemon.scan import Scanner
from syncd.protocol.errors import JobUnavailableError
from syncd.protocol.names import CHECKPOINT_POINTER, STATE_POINTER, PointerName
from syncd.protocol.records import SaveOutcome, encode
from syncd.protocol.reports import TrainerReport
from syncd.storage.job import Job
from syncd.storage.judge import Judge
from tests.jobs import LEASE_TIME, SmallJob
from tests.lagging import Hosts
from tests.storages import Clock, RuledStorage

pytestmark = pytest.mark.lagging

NOTHING = Known(0, None, {})
Scan = Callable[..., Observation]


CONFIG = DaemonConfig()


class Settled(Scanner):
    """Looks when nothing that its client had fetched before is believed any more."""

    hosts: Hosts

    def scan(self, known: Known = NOTHING, config: DaemonConfig = CONFIG) -> Observation:
        self.hosts.settle()
        return super().scan(known, config)

    def waits_for(self, known: Known = NOTHING) -> str:
        return decide(self.scan(known), CONFIG).waiting_for


@pytest.fixture
def scanner(job: SmallJob, storage: RuledStorage, clock: Clock) -> Settled:
    judge = Judge(storage, LEASE_TIME, clock=clock)
    made = Settled(Job(storage, job.layout), CONFIG.pointer, judge, clock=clock)
    made.hosts = job.hosts
    return made


def published(step: int, identity: str) -> Known:
    return Known(1, identity, {step: SaveOutcome(identity=identity, outcome="published")})


@pytest.fixture
def known(job: SmallJob) -> Known:
    """Of a job whose save of step 4 was published."""
    return published(4, job.save(4))


@pytest.mark.parametrize(
    ("content", "state"),
    [(None, PointerState.MISSING), (b"", PointerState.EMPTY), (b" \n", PointerState.EMPTY),
     (b"\x00\x00", PointerState.TORN), (b"1e3", PointerState.TORN), (b"-1", PointerState.NEGATIVE),
     (b"9" * 5000, PointerState.UNREADABLE)],
)  # fmt: skip
def test_a_pointer_that_names_no_step_says_why(
    job: SmallJob, scanner: Settled, content: bytes | None, state: PointerState
) -> None:
    job.save(4, point=False)
    if content is not None:
        job.state_pointer.write_bytes(content)
    seen = scanner.scan()
    assert seen.pointer.state is state
    assert seen.pointer.step is None
    assert seen.save is None


def test_a_pointer_that_is_a_folder_or_a_link_names_no_step_and_says_the_reason(
    job: SmallJob, scanner: Settled
) -> None:
    job.state_pointer.mkdir()
    seen = scanner.scan()
    assert seen.pointer.state is PointerState.UNREADABLE
    assert decide(seen, CONFIG).waiting_for == f"{STATE_POINTER} cannot be read: not a regular file"
    job.state_pointer.rmdir()
    job.state_pointer.symlink_to("elsewhere")
    assert scanner.scan().pointer.state is PointerState.UNREADABLE


@pytest.mark.parametrize("content", [b"", b"7", b"-1", b"x", None])
@pytest.mark.parametrize("pointer", [STATE_POINTER, CHECKPOINT_POINTER])
def test_a_job_with_the_other_pointer_alone_says_how_to_serve_it(
    job: SmallJob, storage: RuledStorage, pointer: PointerName, content: bytes | None
) -> None:
    [other] = {STATE_POINTER, CHECKPOINT_POINTER} - {pointer}
    if content is not None:
        (job.root / other).write_bytes(content)
    config = DaemonConfig(pointer=pointer)
    scanner = Scanner(Job(storage, job.layout), pointer, Judge(storage, LEASE_TIME))
    job.hosts.settle()
    hint = f", but {other} is there: give --pointer {other}"
    waiting_for = decide(scanner.scan(NOTHING, config), config).waiting_for
    assert waiting_for == f"{pointer} is not there" + (hint if content is not None else "")
    job.point(4, pointer)
    job.hosts.settle()
    assert hint not in decide(scanner.scan(NOTHING, config), config).waiting_for


@pytest.mark.parametrize("mark", [STATE_POINTER, CHECKPOINT_POINTER, ".syncd"])
def test_a_folder_above_a_job_names_the_job_and_looks_for_it_only_once(
    job: SmallJob, storage: RuledStorage, scanner: Settled, mark: str
) -> None:
    root = job.root
    (root / "logs").mkdir()
    (root / "qwen" / mark).mkdir(parents=True)
    hint = f"{root}/qwen looks like a job: give its path, or --root {root}"
    missing = f"{STATE_POINTER} is not there"
    assert scanner.waits_for() == f"{missing}, but {hint}"
    storage.calls.clear()
    assert scanner.waits_for() == f"{missing}, but {hint}"
    assert not any(str(root / "qwen") in str(given) for _, given in storage.calls)
    assert scanner.waits_for(Known(1, "run-4-0", {})) == missing


def test_a_new_job_without_a_job_below_waits_for_its_pointer(
    job: SmallJob, scanner: Settled
) -> None:
    (job.root / "logs").mkdir()
    (job.root / "notes.txt").touch()
    job.save(4, point=False)
    assert scanner.waits_for() == f"{STATE_POINTER} is not there"


def test_a_pointer_to_a_step_that_is_not_there_is_not_yet(job: SmallJob, scanner: Settled) -> None:
    job.point(4)
    seen = scanner.scan()
    assert seen.pointer.step == 4
    assert seen.save is not None
    assert "is not there, or empty" in seen.save.reason


def test_the_pointer_names_the_save_and_not_the_newest_folder(
    job: SmallJob, scanner: Settled
) -> None:
    for step in (9, 4):
        job.save(step)
    job.point(7, CHECKPOINT_POINTER)
    seen = scanner.scan()
    assert seen.save is not None
    assert (seen.save.step, seen.checkpoint.step) == (4, 7)


def test_a_save_lies_still_from_when_it_was_first_seen(
    job: SmallJob, scanner: Settled, clock: Clock
) -> None:
    job.save(4, receipts=False)
    assert scanner.scan().save_still_for == 0
    clock.advance(3)
    assert scanner.scan().save_still_for == 3
    job.save(4, receipts=False)
    assert scanner.scan().save_still_for == 0


def test_a_settled_save_is_not_looked_at_again(
    job: SmallJob, scanner: Settled, storage: RuledStorage, known: Known
) -> None:
    for _ in range(2):  # what is seen once only may be what was there before
        scanner.scan(known)
    storage.calls.clear()
    for _ in range(3):
        assert scanner.scan(known).save is not None
    assert storage.count("open_read", job.step(4)) == 0
    assert storage.count("names", job.step(4)) == 0


def test_a_quarantined_save_is_settled_until_the_pointer_moves(
    job: SmallJob, scanner: Settled, storage: RuledStorage
) -> None:
    known = Known(0, None, {4: SaveOutcome(identity=job.save(4), outcome="quarantined")})
    for _ in range(2):
        assert scanner.scan(known).outcome == "quarantined"
    storage.calls.clear()
    assert scanner.scan(known).outcome == "quarantined"
    assert storage.count("open_read", job.actor(4)) == 0
    job.save(4, counter=1)
    assert scanner.scan(known).outcome != "quarantined"


def test_a_pointer_that_is_written_again_makes_a_settled_save_due(
    job: SmallJob, scanner: Settled, known: Known
) -> None:
    scanner.scan(known)
    again = job.save(4, counter=1)
    seen = scanner.scan(known)
    assert seen.save is not None
    assert seen.save.identity == again


def test_step_folders_are_looked_at_in_slices_of_64_newest_first(
    job: SmallJob, scanner: Settled
) -> None:
    outcomes = {
        step: SaveOutcome(identity=job.save(step), outcome="published") for step in range(100)
    }
    known = Known(1, "run-99-0", outcomes)
    first = scanner.scan(known)
    assert [seen.step for seen in first.steps] == list(range(99, 35, -1))
    assert scanner.has_more
    assert [seen.step for seen in scanner.scan(known).steps] == list(range(35, -1, -1))
    assert not scanner.has_more
    assert scanner.scan(known).steps == ()


def test_all_step_folders_are_due_again_after_a_minute_a_move_or_a_wish(
    job: SmallJob, scanner: Settled, clock: Clock, known: Known
) -> None:
    assert len(scanner.scan(known).steps) == 1
    assert scanner.scan(known).steps == ()
    clock.advance(60)
    assert len(scanner.scan(known).steps) == 1
    scanner.look_again()
    assert len(scanner.scan(known).steps) == 1
    job.point(5)
    assert len(scanner.scan(known).steps) == 1


def test_whole_saves_below_the_pointer_that_nobody_recorded_are_found(
    job: SmallJob, scanner: Settled
) -> None:
    for step in (1, 2, 3, 4, 6, 5):
        job.save(step)
    (job.step(1) / ".saving").touch()
    (job.step(2) / ".full_checkpoint").touch()
    (job.actor(3) / ".receipts" / "rank_0.json").unlink()
    assert [save.step for save in scanner.scan().unrecorded] == [4]


def test_a_foreign_step_that_is_written_again_is_skipped_once_the_pointer_has_moved_past_it_twice(
    job: SmallJob, scanner: Settled
) -> None:
    outcome = SaveOutcome(identity="the save that was published", outcome="published")
    known = Known(1, None, {2: outcome})
    for step in (2, 3, 4, 5):
        job.save(step, receipts=False, point=False)
    told = []
    for pointer in (5, 2, 3, 4):  # the trainer has resumed: it may be writing what it passes
        job.point(pointer)
        told.append([save.step for save in scanner.scan(known).unrecorded])
        if pointer == 3:
            job.save(2, 7.0, receipts=False, point=False)
    job.point(5)
    told.append([save.step for save in scanner.scan(known).unrecorded])
    assert [2 in steps for steps in told] == [False, False, False, False, True]


@pytest.mark.parametrize("between", [None, b"", b"x"])
def test_a_pointer_that_is_seen_while_it_is_written_hides_nothing_that_it_passes(
    job: SmallJob, scanner: Settled, between: bytes | None
) -> None:
    for step in (1, 2, 3):
        job.save(step, receipts=False)
    job.point(2)
    assert scanner.scan().unrecorded == ()  # a trainer that resumes may be writing there
    if between is not None:
        job.state_pointer.write_bytes(between)
        assert scanner.scan().unrecorded == ()
    job.point(3)
    assert {save.step for save in scanner.scan().unrecorded} == {1, 2}


def test_a_step_that_was_deleted_by_hand_has_vanished(job: SmallJob, scanner: Settled) -> None:
    assert scanner.scan(published(3, job.save(4))).vanished == (3,)


def test_what_else_a_step_holds_is_seen(job: SmallJob, scanner: Settled) -> None:
    identity = job.save(4)
    known = published(4, identity)
    [plain] = scanner.scan(known).steps
    assert (plain.found, plain.has_receipts) == (identity, True)
    assert not any((plain.full, plain.retired, plain.saving, plain.resumable, plain.critic))
    critic = job.step(4) / "critic"
    critic.mkdir()
    scanner.look_again()
    [empty] = scanner.scan(known).steps
    assert not empty.critic  # all that a full save leaves which had no room
    (critic / "model_world_size_1_rank_0.pt").touch()
    (job.actor(4) / "optim_world_size_1_rank_0.pt").touch()
    scanner.look_again()
    [step] = scanner.scan(known).steps
    assert (step.critic, step.resumable, step.found) == (True, True, None)  # it needs no look
    (job.step(4) / ".retired").touch()
    scanner.look_again()
    [step] = scanner.scan(known).steps
    assert (step.critic, step.resumable, step.retired) == (True, True, True)
    assert step.found == identity


def test_leases_are_seen_with_how_long_their_sessions_have_been_dead(
    job: SmallJob, scanner: Settled, clock: Clock
) -> None:
    job.lease_folder(2).mkdir()
    for session in ("live", "dead"):
        job.session(session).touch()
        job.lease(2, session)
    (job.lease_folder(2) / "note from an admin").touch()
    scanner.scan()
    job.session("dead").unlink()
    scanner.scan()
    clock.advance(7)
    found = {lease.marker: lease.dead_for for lease in scanner.scan().leases}
    assert found == {"explorer.live": None, "explorer.dead": 7.0, "note from an admin": None}


def test_a_session_that_comes_back_begins_its_grace_anew(
    job: SmallJob, scanner: Settled, clock: Clock
) -> None:
    job.lease_folder(2).mkdir()
    job.lease(2, "session")
    scanner.scan()
    clock.advance(100)
    job.session("session").touch()
    assert [lease.dead_for for lease in scanner.scan().leases] == [None]
    job.session("session").unlink()
    assert [lease.dead_for for lease in scanner.scan().leases] == [0.0]


@pytest.mark.parametrize(("content", "announced"), [(None, None), (b"{", 0), (b"", 0)])
def test_a_trainer_report_that_cannot_be_read_keeps_every_step(
    job: SmallJob, scanner: Settled, content: bytes | None, announced: int | None, known: Known
) -> None:
    if content is not None:
        job.layout.trainer_report.write_bytes(content)
    assert scanner.scan(known).announced_step == announced


def test_the_step_that_the_trainer_announced_is_seen(
    job: SmallJob, scanner: Settled, known: Known
) -> None:
    report = TrainerReport(run_id="r", world_size=1, status="running", step=2, time=0.0)
    job.layout.trainer_report.write_bytes(encode(report))
    assert scanner.scan(known).announced_step == 2


@pytest.mark.parametrize("gone", ["root", "state", "format"])
def test_a_job_that_went_away_pauses_and_concludes_nothing(
    job: SmallJob, scanner: Settled, gone: str, tmp_path: Path, known: Known
) -> None:
    scanner.scan(known)
    os.rename(getattr(job.layout, gone), tmp_path / "away")
    with pytest.raises(JobUnavailableError, match="is its storage mounted"):
        scanner.scan(known)


def test_a_step_that_storage_does_not_answer_about_is_not_missing(
    scanner: Settled, storage: RuledStorage, known: Known
) -> None:
    storage.refuse("names", errno.EIO, where="global_step_4")
    seen = scanner.scan(known)
    assert (seen.steps, seen.vanished) == ((), ())


def test_other_names_in_the_job_are_let_be(job: SmallJob, scanner: Settled) -> None:
    job.save(4)
    for name in ("logs", "global_step_03", "global_step_x", "data.tmp"):
        (job.root / name).mkdir()
    (job.layout.published / "v1").mkdir()
    (job.layout.published / "notes").mkdir()
    seen = scanner.scan()
    assert (seen.versions, seen.vanished, seen.unrecorded) == ((), (), ())


def test_a_scanner_needs_no_more_calls_for_an_old_job_than_for_a_new_one(
    job: SmallJob, scanner: Settled, storage: RuledStorage
) -> None:
    outcomes = {
        step: SaveOutcome(identity=job.save(step), outcome="published") for step in range(80)
    }
    known = Known(1, "run-79-0", outcomes)
    while scanner.scan(known) and scanner.has_more:
        pass
    storage.calls.clear()
    scanner.scan(known)
    assert len(storage.calls) < 14


@pytest.mark.local_only("it is about the order of some hundred folders, which nobody changes")
def test_every_step_folder_gets_its_turn_however_often_the_pointer_moves(
    job: SmallJob, scanner: Settled, storage: RuledStorage, clock: Clock
) -> None:
    count = 300
    for step in range(1, count + 1):
        job.step(step).mkdir()
    for tick in range(count // 16):
        job.state_pointer.write_text(str(count + 1 + tick))
        scanner.scan()
        clock.advance(1.0)
    looked_into = {given[0] for method, given in storage.calls if method == "names"}
    assert {job.actor(step) for step in range(1, count + 1)} <= looked_into
