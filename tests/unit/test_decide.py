from dataclasses import replace
from typing import Any

import pytest

from syncd.checkpoint.save import Shards, Unfinished
from syncd.daemon.chains import DeltaSeen
from syncd.daemon.config import DaemonConfig
from syncd.daemon.decide import (
    AnswerRequest,
    CloseLeaseFolder,
    DropLease,
    Forget,
    Merge,
    PruneDelta,
    PruneStep,
    Republish,
    RetireVersion,
    Skip,
    decide,
)
from syncd.daemon.observation import LeaseSeen, Observation, Pointer, PointerState, StepSeen
from syncd.protocol.names import CHECKPOINT_POINTER
from syncd.protocol.records import Receipt, SaveOutcome
from syncd.protocol.requests import Pause, RollbackRequest

CONFIG = DaemonConfig()
VOUCHED = (Receipt(save_id="run-9-0", step=9, rank=0, world_size=1, files=()),)
SAVE = Shards(9, "run-9-0", weights=("w",), receipts=VOUCHED)
FOREIGN = Shards(9, "foreign-1", weights=("w",))
AT_9 = Pointer(PointerState.STEP, 9)
PUBLISHED, SKIPPED, QUARANTINED = (
    SaveOutcome(identity="run-5-0", outcome=outcome)
    for outcome in ("published", "skipped", "quarantined")
)
PLAIN = StepSeen(
    step=5,
    outcome=PUBLISHED,
    found="run-5-0",
    has_receipts=True,
    full=False,
    retired=False,
    saving=False,
    resumable=False,
    critic=False,
)


def job(**seen: Any) -> Observation:
    """A job whose newest save, step 9, is published as version 3."""
    versions = seen.get("versions", (2, 3))
    usual = {
        "pointer": AT_9,
        "save": SAVE,
        "published_save": "run-9-0",
        "latest": 3,
        "versions": versions,
        "lease_folders": versions,
    }
    return Observation(**{**usual, **seen})


def actions(seen: Observation, config: DaemonConfig = CONFIG) -> list[object]:
    return list(decide(seen, config).actions)


def retired(seen: Observation) -> list[int]:
    return [action.sequence for action in actions(seen) if isinstance(action, RetireVersion)]


def pruned(step: StepSeen, config: DaemonConfig = CONFIG, **seen: Any) -> bool:
    return any(isinstance(a, PruneStep) for a in actions(job(steps=(step,), **seen), config))


def test_a_settled_job_needs_nothing() -> None:
    assert decide(job(), CONFIG).actions == ()
    assert decide(job(), CONFIG).waiting_for == ""


def test_a_new_save_is_published() -> None:
    assert actions(job(published_save="run-8-0")) == [Merge(SAVE)]


def test_the_same_step_saved_again_is_published_again() -> None:
    again = replace(SAVE, identity="run-9-1")
    assert actions(job(save=again)) == [Merge(again)]


def test_a_lower_step_of_a_resumed_trainer_is_published() -> None:
    lower = replace(SAVE, step=2, identity="later-2-0")
    assert actions(job(pointer=Pointer(PointerState.STEP, 2), save=lower)) == [Merge(lower)]


def test_a_quarantined_save_is_not_tried_again() -> None:
    assert actions(job(published_save=None, outcome="quarantined")) == []


def test_a_foreign_save_must_lie_still_for_a_tick() -> None:
    moving = job(save=FOREIGN, save_still_for=CONFIG.tick / 2)
    assert actions(moving) == []
    assert "have not changed for 1 s" in decide(moving, CONFIG).waiting_for
    assert actions(job(save=FOREIGN, save_still_for=CONFIG.tick)) == [Merge(FOREIGN)]


@pytest.mark.parametrize("state", [state for state in PointerState if state.value[0] == "i"])
def test_a_pointer_that_names_nothing_says_so_and_stops_all_pruning_of_steps(
    state: PointerState,
) -> None:
    decision = decide(job(pointer=Pointer(state), save=None, steps=(PLAIN,)), CONFIG)
    assert decision.actions == ()
    assert decision.waiting_for == f"latest_state_dict_iteration.txt {state.value}"


def test_a_save_that_is_not_whole_says_what_is_missing() -> None:
    decision = decide(job(save=Unfinished(9, "no shard of rank 1")), CONFIG)
    assert decision.waiting_for == "no shard of rank 1"
    assert decide(job(save=None), CONFIG).waiting_for == "step 9 has not been examined yet"


def test_versions_outside_the_retention_rules_are_retired_oldest_first() -> None:
    assert retired(job(latest=5, versions=(5, 1, 4, 2))) == [1, 2]


def test_a_leased_version_stays_and_counts_for_nothing_else() -> None:
    seen = job(
        latest=5,
        versions=(1, 2, 4, 5),
        leases=(LeaseSeen(1, "a.s", None), LeaseSeen(1, "b.s", 2.0)),
    )
    assert retired(seen) == [2]


def test_a_version_above_latest_is_someone_elses_business() -> None:
    assert actions(job(versions=(2, 3, 4, 5), lease_folders=(2, 3, 4, 5, 6))) == []


def test_before_the_first_latest_nothing_is_retired() -> None:
    seen = job(latest=0, published_save=None, save=None, pointer=Pointer(PointerState.MISSING))
    assert actions(seen) == []


def test_a_version_whose_leasing_was_ended_by_a_daemon_that_died_goes() -> None:
    [action] = actions(job(lease_folders=(3,)))
    assert action == RetireVersion(2, "an earlier daemon began to prune it")


def test_the_lease_folder_of_a_version_that_is_gone_is_closed_when_it_is_empty() -> None:
    assert actions(job(lease_folders=(1, 2, 3))) == [CloseLeaseFolder(1)]
    assert actions(job(lease_folders=(1, 2, 3), leases=(LeaseSeen(1, "a.s", None),))) == []


@pytest.mark.parametrize(
    ("unread", "gone"), [((), [8, 6]), ((DeltaSeen(4, 0),), [8, 6]), ((DeltaSeen(7, 0),), [])]
)
def test_while_a_record_above_latest_cannot_be_read_no_delta_leads_nowhere(
    unread: tuple[DeltaSeen, ...], gone: list[int]
) -> None:
    root = DeltaSeen(6, 9, target="run-6-0", is_whole=True)
    last = DeltaSeen(8, 9, base="run-7-0", target="run-8-0")
    seen = job(latest=6, deltas=(root, *unread, last))
    assert [one.sequence for one in actions(seen) if isinstance(one, PruneDelta)] == gone


@pytest.mark.parametrize(
    ("sizes", "full_bytes", "keep_deltas", "gone"),
    [
        ({1: 10, 2: 10, 3: 10}, 100, 16, []),
        ({1: 10, 2: 10, 3: 10}, 100, 2, [1]),
        ({1: 10, 2: 20, 3: 30}, 100, 16, [1]),  # half of it, and no byte more
        ({1: 10, 2: 21, 3: 30}, 100, 16, [2, 1]),
        ({1: 10, 2: 60, 3: 30}, 100, 16, [2, 1]),  # behind a gap no chain leads on
        ({1: 10, 3: 51}, 100, 16, [3, 1]),
        ({1: 10, 2: 10, 3: 10}, None, 16, []),
        ({1: 10, 3: 10, 4: 99, 9: 1}, 100, 1, [1]),  # nothing above LATEST is touched or counted
        ({3: 0}, 0, 16, []),
    ],
)
def test_deltas_beyond_half_a_version_or_the_number_to_keep_go_newest_first(
    sizes: dict[int, int], full_bytes: int | None, keep_deltas: int, gone: list[int]
) -> None:
    found = tuple(DeltaSeen(sequence, size) for sequence, size in sizes.items())
    config = DaemonConfig(keep_deltas=keep_deltas)
    decided = actions(job(deltas=found, full_bytes=full_bytes), config)
    assert [action.sequence for action in decided if isinstance(action, PruneDelta)] == gone


def test_a_dead_lease_is_dropped_after_the_grace() -> None:
    seen = job(leases=(LeaseSeen(2, "a.s", 299.0), LeaseSeen(2, "b.s", 300.0)))
    assert actions(seen) == [DropLease(2, "b.s", "its explorer has been dead for 300 s")]


def test_a_published_or_skipped_step_goes() -> None:
    assert pruned(PLAIN)
    assert pruned(replace(PLAIN, outcome=SKIPPED))
    assert not pruned(PLAIN, DaemonConfig(prune_steps=False))


@pytest.mark.parametrize(
    "doubt",
    [{"full": True}, {"saving": True}, {"critic": True}, {"resumable": True},
     {"outcome": QUARANTINED}, {"found": None}, {"found": "run-5-1"}, {"step": 9}, {"step": 10},
     {"retired": True, "full": True}, {"pinned": True}],
    ids=lambda doubt: ", ".join(f"{key}={value}" for key, value in doubt.items()),
)  # fmt: skip
def test_every_doubt_keeps_a_step(doubt: dict[str, Any]) -> None:
    assert not pruned(replace(PLAIN, **doubt))


def test_a_step_that_can_be_resumed_from_is_kept_by_its_pointer() -> None:
    assert not pruned(PLAIN, checkpoint=Pointer(PointerState.STEP, 5))


@pytest.mark.parametrize(
    ("announced", "goes"), [(None, True), (9, True), (6, True), (5, False), (2, False)]
)
def test_only_what_lies_below_the_running_trainers_step_goes(
    announced: int | None, goes: bool
) -> None:
    assert pruned(PLAIN, announced_step=announced) is goes


@pytest.mark.parametrize(("checkpoint", "goes"), [(None, False), (3, False), (5, False), (8, True)])
def test_a_retired_step_goes_once_a_newer_one_is_pointed_to(
    checkpoint: int | None, goes: bool
) -> None:
    retired = replace(PLAIN, retired=True, resumable=True, critic=True)
    state = PointerState.MISSING if checkpoint is None else PointerState.STEP
    assert pruned(retired, checkpoint=Pointer(state, checkpoint)) is goes


def test_foreign_saves_of_plain_verl_go_only_when_that_was_asked_for() -> None:
    foreign = replace(PLAIN, has_receipts=False)
    assert pruned(foreign)
    assert not pruned(foreign, DaemonConfig(pointer=CHECKPOINT_POINTER))
    assert pruned(foreign, DaemonConfig(pointer=CHECKPOINT_POINTER, prune_foreign=True))


ASKED = RollbackRequest(id="a", sequence=2, by="me", time=0.0)
PAUSE = Pause(id="p", by="me", time=0.0)


def test_a_request_comes_before_a_new_save_which_is_published_after_the_answer() -> None:
    seen = job(published_save="run-8-0", rollbacks=(ASKED, replace_id(ASKED, "b")))
    assert actions(seen) == [Republish(ASKED)]
    done = job(published_save="run-8-0", rollbacks=(ASKED,), served_request="a")
    assert actions(done) == [AnswerRequest(ASKED, made=3)]


def replace_id(request: RollbackRequest, name: str) -> RollbackRequest:
    return request.model_copy(update={"id": name})


@pytest.mark.parametrize("sequence", [1, 3, 4])
def test_only_a_version_below_latest_that_can_be_leased_is_served_again(sequence: int) -> None:
    asked = ASKED.model_copy(update={"sequence": sequence})
    [action] = actions(job(rollbacks=(asked,), versions=(1, 2, 3, 4), lease_folders=(2, 3)))[:1]
    assert isinstance(action, AnswerRequest)
    assert action.made is None
    assert action.why


def test_a_version_that_is_asked_for_is_not_retired() -> None:
    assert retired(job(latest=5, versions=(1, 2, 4, 5), rollbacks=(ASKED,))) == [1]


def test_in_a_pause_records_are_kept_and_requests_carried_out_and_nothing_else_is_done() -> None:
    seen = job(
        published_save=None,
        versions=(1, 2, 3),
        leases=(LeaseSeen(2, "a.s", 1000.0),),
        steps=(PLAIN,),
        unrecorded=(replace(SAVE, step=7),),
        vanished=(4,),
        pause=PAUSE,
    )
    assert [type(action) for action in actions(seen)] == [Skip, Forget]
    assert decide(seen, CONFIG).waiting_for == "paused by me, until 'syncd resume'"
    assert actions(replace(seen, rollbacks=(ASKED,)))[0] == Republish(ASKED)


def test_new_weights_come_before_every_deletion() -> None:
    seen = job(
        published_save=None,
        versions=(1, 2, 3),
        steps=(PLAIN,),
        unrecorded=(replace(SAVE, step=7), Unfinished(8, "not whole")),
        vanished=(4,),
    )
    kinds = [type(action) for action in actions(seen)]
    assert kinds == [Merge, Skip, Forget, RetireVersion, PruneStep]
