"""The chain back from the pointer's save, and the deltas above LATEST, whatever lies there."""

from hypothesis import given, settings
from hypothesis import strategies as st

from syncd.checkpoint.save import Delta, Save, Shards, Unfinished
from syncd.daemon.chains import DeltaSeen, chain_to, deltas_to_each
from syncd.daemon.config import DaemonConfig
from syncd.daemon.decide import (
    Fold,
    MakeDeltas,
    Merge,
    PruneDelta,
    PruneStep,
    StopDeltas,
    decide,
)
from syncd.daemon.observation import Observation, Pointer, PointerState, StepSeen
from syncd.protocol.records import Receipt, SaveOutcome, Tip

STEPS = 7
NAMES = st.integers(1, STEPS).map(lambda step: f"run-{step}-{step}")
FOREIGN = st.just("other-3-3")


def receipt(step: int, save_id: str, base: str | None) -> Receipt:
    return Receipt(save_id=save_id, step=step, rank=0, world_size=1, files=(), base=base)


@st.composite
def folders(draw: st.DrawFn) -> dict[int, Save]:
    """Step folders: saves with and without a base, of two runs, also with loops of bases."""
    found: dict[int, Save] = {}
    for step in range(1, STEPS + 1):
        kind = draw(st.sampled_from(["deltas", "deltas", "full", "missing"]))
        if kind == "missing":
            found[step] = Unfinished(step, "nothing is there")
            continue
        save_id = draw(st.sampled_from([f"run-{step}-{step}", f"other-{step}-{step}"]))
        base = draw(NAMES | FOREIGN | (st.none() if kind == "full" else st.nothing()))
        base = draw(st.just(f"{save_id.partition('-')[0]}-{step - 1}-{step - 1}") | st.just(base))
        make = Delta if kind == "deltas" else Shards
        found[step] = make(step, save_id, receipts=(receipt(step, save_id, base),))
    return found


DELTAS = st.lists(
    st.builds(
        DeltaSeen,
        sequence=st.integers(1, 12),
        bytes=st.integers(0, 100),
        base=st.none() | NAMES | FOREIGN,
        target=NAMES | FOREIGN,
    ),
    max_size=8,
    unique_by=lambda delta: delta.sequence,
)


@settings(max_examples=300)
@given(DELTAS, st.integers(0, 6), st.none() | NAMES)
def test_the_deltas_above_latest_lead_from_its_save_without_loops(
    deltas: list[DeltaSeen], latest: int, save_id: str | None
) -> None:
    for target, chain in deltas_to_each(latest, save_id, deltas).items():
        assert chain[0].sequence > latest
        assert chain[-1].target == target != save_id
        assert chain[0].base == save_id
        assert [one.target for one in chain[:-1]] == [one.base for one in chain[1:]]
        assert [one.sequence for one in chain] == sorted(one.sequence for one in chain)


@settings(max_examples=300)
@given(folders(), st.sets(NAMES), st.sets(NAMES), st.integers(1, STEPS))
def test_the_way_back_ends_at_a_known_save_or_says_what_to_merge(
    found: dict[int, Save], known: set[str], refused: set[str], pointed: int
) -> None:
    save = found[pointed]
    if isinstance(save, Unfinished):
        return
    chain = chain_to(save, known, refused, lambda step: found.get(step, Unfinished(step, "")))
    assert chain.saves[0] == save
    for later, earlier in zip(chain.saves, chain.saves[1:], strict=False):
        assert later.base == earlier.identity
    last = chain.saves[-1]
    assert chain.joins == (last.identity in known or last.base in known)
    if chain.full is not None:
        assert not isinstance(chain.full, Delta)
        assert chain.full.identity not in refused
    elif not chain.joins:
        assert all(isinstance(one, Delta) or one.identity in refused for one in chain.saves)


@st.composite
def observed(draw: st.DrawFn) -> Observation:
    found = draw(folders())
    pointed = draw(st.integers(1, STEPS))
    save = found[pointed]
    latest, save_id = draw(st.integers(1, 6)), draw(NAMES)
    deltas = draw(DELTAS)
    deltas_to = deltas_to_each(latest, save_id, deltas)
    chain = chain_to(
        save, {*deltas_to, save_id}, (), lambda step: found.get(step, Unfinished(step, ""))
    )
    to = draw(st.sampled_from([None, *deltas_to]))
    tip = Tip(sequence=deltas_to[to][-1].sequence, step=1, save_id=to) if to else None
    steps = tuple(
        StepSeen(
            step, SaveOutcome(identity=one.identity, outcome="published"), one.identity,
            has_receipts=True, full=False, retired=False, saving=False, resumable=False,
            critic=False,
        )
        for step, one in found.items() if one.identity is not None
    )  # fmt: skip
    return Observation(
        pointer=Pointer(PointerState.STEP, pointed),
        save=save,
        published_save=save_id,
        latest=latest,
        full_bytes=draw(st.integers(1, 1000)),
        versions=(latest,),
        lease_folders=(latest,),
        deltas=tuple(deltas),
        steps=steps,
        announced_step=99,
        chain=chain,
        deltas_to=deltas_to,
        tip=tip,
        no_deltas=draw(st.booleans()),
        must_fold=draw(st.booleans()),
        may_fold=draw(st.booleans()),
        save_still_for=draw(st.sampled_from([0.0, 1000.0])),
    )


@settings(max_examples=500)
@given(observed())
def test_decisions_about_deltas(seen: Observation) -> None:
    for action in decide(seen, DaemonConfig()).actions:
        match action:
            case MakeDeltas((save,), sequence) if sequence:
                assert save == seen.save
                assert sequence > (seen.tip.sequence if seen.tip else seen.latest)
            case MakeDeltas(saves):
                assert not seen.no_deltas
                assert saves[-1] == seen.save
                bases = [saves[0].base, *(one.identity for one in saves[:-1])]
                assert [one.base for one in saves] == bases
            case Merge(save):
                assert not isinstance(save, Delta)
                assert save in seen.chain.saves
            case StopDeltas(save):
                assert save == seen.save
                assert all(isinstance(one, Delta) for one in seen.chain.saves)
            case Fold(chain):
                assert seen.may_fold
                assert seen.tip is not None
                assert chain[-1].target == seen.tip.save_id
                assert chain[0].base == seen.published_save
            case PruneStep(step):
                assert seen.chain.is_seen or seen.save_still_for
                assert step.step not in {one.step for one in seen.chain.saves}
                assert not any(step.outcome.identity == target for target in seen.deltas_to)
            case PruneDelta(sequence):
                leading = [chain[-1].sequence for chain in seen.deltas_to.values()]
                assert sequence <= seen.latest or sequence not in leading
