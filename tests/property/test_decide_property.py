from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from hypothesis import given, settings
from hypothesis import strategies as st

from syncd.checkpoint.save import Shards, Unfinished
from syncd.daemon.chains import DeltaSeen, deltas_to_each
from syncd.daemon.config import DaemonConfig
from syncd.daemon.decide import (
    AnswerRequest,
    CloseLeaseFolder,
    Decision,
    DropLease,
    Fold,
    Forget,
    Merge,
    Prepare,
    PruneDelta,
    PruneStep,
    Republish,
    RetireVersion,
    Skip,
    decide,
)
from syncd.daemon.observation import LeaseSeen, Observation, Pointer, PointerState, StepSeen
from syncd.protocol.names import CHECKPOINT_POINTER, STATE_POINTER
from syncd.protocol.records import Receipt, SaveOutcome, Tip
from syncd.protocol.requests import Pause, RollbackRequest

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


@st.composite
def with_tips(draw: st.DrawFn) -> Observation:
    """A job with deltas and whole saves above LATEST, of which the tip may rest on one."""
    seen = draw(observations())
    deltas = tuple(
        DeltaSeen(number, 1, None if is_whole else base, target, is_whole)
        for number, base, target, is_whole in draw(
            st.lists(st.tuples(SEQUENCES, IDENTITIES, IDENTITIES, st.booleans()), max_size=5,
                     unique_by=lambda one: one[0])
        )
    )  # fmt: skip
    chains = deltas_to_each(seen.latest, seen.published_save, deltas)
    tip, is_named = None, draw(st.booleans())
    if chains and is_named:
        chain = chains[draw(st.sampled_from(sorted(chains)))]
        root = chain[0].sequence if chain[0].is_whole else None
        tip = Tip(sequence=chain[-1].sequence, step=1, save_id=chain[-1].target, root=root)
    return replace(
        seen, deltas=deltas, deltas_to=chains, tip=tip, save_id=seen.published_save,
        takes_tips=draw(st.booleans()), may_fold=True, must_fold=draw(st.booleans()),
        in_use=draw(st.sets(SEQUENCES, max_size=1)), full_bytes=10,
    )  # fmt: skip


@settings(max_examples=100)
@given(with_tips(), CONFIGS)
def test_no_whole_save_is_pruned_that_anyone_needs_and_a_root_is_made_before_its_deltas(
    seen: Observation, config: DaemonConfig
) -> None:
    decision = decide(seen, config)
    pruned = {action.sequence for action in of(decision, PruneDelta)}
    saves = {seen.tip and seen.tip.save_id, seen.save and seen.save.known_as}
    needed = {one.sequence for save in saves for one in seen.deltas_to.get(save or "", ())}
    wholes = {one.sequence for one in seen.deltas if one.is_whole}
    assert not pruned & wholes & needed.union(seen.in_use)
    for fold in of(decision, Fold):
        chain = seen.deltas_to[seen.tip.save_id if seen.tip else ""]
        made = chain[:1] if chain[0].is_whole else chain
        assert (tuple(fold.chain), fold.tip.sequence) == (made, made[-1].sequence)
    for action in of(decision, Prepare):
        assert seen.takes_tips
        assert seen.latest
        assert action.save.receipts
        assert not of(decision, Merge)


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
