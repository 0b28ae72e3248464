from collections.abc import Callable
from typing import TypeVar

from hypothesis import given, settings
from hypothesis import strategies as st

from syncd.checkpoint.save import Shards, Unfinished
from syncd.daemon.config import DaemonConfig
from syncd.daemon.decide import (
    AnswerRequest,
    CloseLeaseFolder,
    Decision,
    DropLease,
    Forget,
    Merge,
    PruneStep,
    Republish,
    RetireVersion,
    Skip,
    decide,
)
from syncd.daemon.observation import LeaseSeen, Observation, Pointer, PointerState, StepSeen
from syncd.protocol.names import CHECKPOINT_POINTER, STATE_POINTER
from syncd.protocol.records import Pause, Receipt, RollbackRequest, SaveOutcome

STEPS = st.integers(0, 6)
SEQUENCES = st.integers(1, 8)
IDENTITIES = st.sampled_from(["a", "b", "c"])
POINTERS = st.one_of(
    STEPS.map(lambda step: Pointer(PointerState.STEP, step)),
    st.sampled_from([state for state in PointerState if state is not PointerState.STEP]).map(
        Pointer
    ),
)
RECEIPTS = st.sampled_from([(), (Receipt(save_id="a", step=1, rank=0, world_size=1, files=()),)])
SAVES = st.builds(Unfinished, STEPS, st.just("not whole")) | st.builds(
    Shards, STEPS, IDENTITIES, receipts=RECEIPTS
)
STEPS_SEEN = st.builds(
    StepSeen,
    step=STEPS,
    outcome=st.builds(SaveOutcome, identity=IDENTITIES),
    found=st.none() | IDENTITIES,
    has_receipts=st.booleans(),
    full=st.booleans(),
    retired=st.booleans(),
    saving=st.booleans(),
    resumable=st.booleans(),
    critic=st.booleans(),
    pinned=st.booleans(),
    unread=st.booleans(),
)
CONFIGS = st.builds(
    DaemonConfig,
    pointer=st.sampled_from([STATE_POINTER, CHECKPOINT_POINTER]),
    keep=st.integers(1, 4),
    prune_steps=st.booleans(),
    prune_foreign=st.booleans(),
    dead_reader_grace=st.sampled_from([0.0, 300.0]),
)
REQUESTS = st.builds(
    RollbackRequest,
    id=st.sampled_from(["r", "s"]),
    sequence=SEQUENCES,
    by=st.just("me"),
    time=st.just(0.0),
)


@st.composite
def observations(draw: st.DrawFn) -> Observation:
    folders = draw(st.sets(SEQUENCES))
    leases = st.builds(
        LeaseSeen,
        st.sampled_from(sorted(folders)) if folders else st.nothing(),
        st.just("explorer.session"),
        st.none() | st.floats(0, 1000),
    )
    return Observation(
        pointer=draw(POINTERS),
        checkpoint=draw(POINTERS),
        save=draw(st.none() | SAVES),
        save_still_for=draw(st.floats(0, 5)),
        outcome=draw(st.sampled_from(["", "quarantined"])),
        published_save=draw(st.none() | IDENTITIES),
        latest=draw(st.integers(0, 8)),
        versions=tuple(draw(st.sets(SEQUENCES))),
        lease_folders=tuple(folders),
        leases=tuple(draw(st.lists(leases, max_size=3))) if folders else (),
        steps=tuple(draw(st.lists(STEPS_SEEN, max_size=4, unique_by=lambda seen: seen.step))),
        unrecorded=tuple(draw(st.lists(SAVES, max_size=2))),
        announced_step=draw(st.none() | STEPS),
        pause=draw(st.none() | st.just(Pause(id="p", by="me", time=0.0))),
        rollbacks=tuple(draw(st.lists(REQUESTS, max_size=2))),
        served_request=draw(st.sampled_from([None, "r", "q"])),
    )


def any_look(test: Callable[[Observation, DaemonConfig], None]) -> Callable[[], None]:
    return settings(max_examples=40)(given(observations(), CONFIGS)(test))


A = TypeVar("A")


def of(decision: Decision, kind: type[A]) -> list[A]:
    return [action for action in decision.actions if isinstance(action, kind)]


@any_look
def test_latest_and_leased_and_the_newest_versions_are_never_retired(
    seen: Observation, config: DaemonConfig
) -> None:
    leased = {lease.sequence for lease in seen.leases}
    decision = decide(seen, config)
    for action in of(decision, RetireVersion) + of(decision, CloseLeaseFolder):
        assert action.sequence < seen.latest
        assert action.sequence not in leased
    newest = sorted(v for v in seen.versions if v <= seen.latest)[-config.keep :]
    retired = {action.sequence for action in of(decision, RetireVersion)}
    assert not retired & set(newest) & set(seen.lease_folders)


@any_look
def test_a_step_that_anyone_may_need_is_never_pruned(
    seen: Observation, config: DaemonConfig
) -> None:
    for action in of(decide(seen, config), PruneStep):
        step = action.seen
        assert config.prune_steps
        # It could not be resumed from.
        assert not step.full
        assert not step.saving
        assert not step.pinned
        assert step.retired or not (step.resumable or step.critic)
        if step.retired:
            assert seen.checkpoint.step is not None
            assert seen.checkpoint.step > step.step
        # It is neither named, nor announced, nor changed, nor in quarantine.
        assert seen.pointer.step is not None
        assert step.step not in {seen.pointer.step, seen.checkpoint.step}
        assert step.step < (
            seen.pointer.step if seen.announced_step is None else seen.announced_step
        )
        assert step.found == step.outcome.identity
        assert step.outcome.outcome in {"published", "skipped"}
        # Foreign ones only if it was asked for.
        assert step.has_receipts or config.pointer == STATE_POINTER or config.prune_foreign
        assert action.why


@any_look
def test_only_a_whole_new_save_that_the_pointer_names_is_published_and_first(
    seen: Observation, config: DaemonConfig
) -> None:
    decision = decide(seen, config)
    published = of(decision, Merge)
    assert len(published) <= 1
    for action in published:
        assert decision.actions[0] is action
        assert action.save is seen.save
        assert seen.pointer.step is not None
        assert action.save.identity not in {None, seen.published_save}
        assert seen.outcome != "quarantined"
        assert action.save.receipts or seen.save_still_for >= config.tick


@any_look
def test_in_a_pause_nothing_is_published_or_deleted(
    seen: Observation, config: DaemonConfig
) -> None:
    if seen.pause is not None:
        allowed = (Republish, AnswerRequest, Skip, Forget)
        assert all(isinstance(action, allowed) for action in decide(seen, config).actions)


@any_look
def test_while_a_request_is_open_nothing_is_published_and_what_it_names_stays(
    seen: Observation, config: DaemonConfig
) -> None:
    decision = decide(seen, config)
    republished = of(decision, Republish)
    assert len(republished) + len(of(decision, AnswerRequest)) == bool(seen.rollbacks)
    if seen.rollbacks:
        assert not of(decision, Merge)
        leasable = set(seen.lease_folders)
        retired = {action.sequence for action in of(decision, RetireVersion)}
        assert not retired & {request.sequence for request in seen.rollbacks} & leasable
    for action in republished:
        assert action.request.id != seen.served_request
        assert action.request.sequence < seen.latest
        assert action.request.sequence in seen.versions


@any_look
def test_whoever_waits_is_told_for_what(seen: Observation, config: DaemonConfig) -> None:
    decision = decide(seen, config)
    settled = (
        seen.pointer.step is not None
        and seen.save is not None
        and seen.save.identity is not None
        and (seen.save.identity == seen.published_save or seen.outcome == "quarantined")
    )
    if seen.rollbacks:
        assert isinstance(decision.actions[0], Republish | AnswerRequest)
        assert decision.waiting_for == ""
    elif seen.pause:
        assert "paused by me" in decision.waiting_for
    else:
        assert bool(decision.waiting_for) == (not of(decision, Merge) and not settled)


@any_look
def test_only_the_dead_lose_their_leases_and_only_after_the_grace(
    seen: Observation, config: DaemonConfig
) -> None:
    dropped = {(a.sequence, a.marker) for a in of(decide(seen, config), DropLease)}
    dead = (
        {
            (lease.sequence, lease.marker)
            for lease in seen.leases
            if lease.dead_for is not None and lease.dead_for >= config.dead_reader_grace
        }
        if seen.pause is None
        else set()
    )
    assert dropped == dead


@any_look
def test_only_whole_saves_are_put_on_record_as_skipped(
    seen: Observation, config: DaemonConfig
) -> None:
    skipped = {(action.step, action.identity) for action in of(decide(seen, config), Skip)}
    assert skipped == {(s.step, s.identity) for s in seen.unrecorded if s.identity is not None}
