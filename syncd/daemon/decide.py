"""The decision: pure functions from an Observation to the actions of a round."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from syncd.checkpoint.save import Delta, SavedWeights, Shards, Unfinished, WholeSave
from syncd.daemon.chains import DeltaSeen
from syncd.daemon.config import DaemonConfig
from syncd.daemon.observation import Observation, StepSeen
from syncd.protocol.names import STATE_POINTER, printable
from syncd.protocol.records import SaveId, Tip
from syncd.protocol.requests import RollbackRequest

#: Seconds to wait for a step's remote path, which trainers write right after they make the folder.
_PATH_TIME: Final = 60.0
#: The most seconds that a client's cache may hide files in the chain back.
_HIDDEN: Final = 120.0
#: Fold after this many deltas, because a reader keeps a file of each open,
_MANY_DELTAS: Final = 32
#: or after this many seconds without a save, which is longer than between most runs' saves,
_QUIET: Final = 600.0
#: or after this many ticks if the daemon ends when it is idle.
_IDLE_TICKS: Final = 20


@dataclass(frozen=True)
class Merge:
    """Merge this save beside the loop, or go on, and make it LATEST."""

    save: WholeSave


@dataclass(frozen=True)
class Prepare:
    """Prepare this save beside the loop, or go on, and let LATEST name it as its tip."""

    save: WholeSave


@dataclass(frozen=True)
class MakeDeltas:
    """Make deltas of these saves, the oldest first, and let LATEST name the last one as its tip.

    The last one is the pointer's. If it has a delta, ``sequence`` is the number of its delta.
    ``root`` is the number of the whole save that they rest on, if any (see :class:`Tip`).
    """

    saves: tuple[SavedWeights, ...]
    sequence: int = 0
    root: int | None = None


@dataclass(frozen=True)
class StopDeltas:
    """Take no more deltas until the next full version, because a save's cannot be taken."""

    save: WholeSave


@dataclass(frozen=True)
class Fold:
    """Make a full version of ``tip``, of ``size`` bytes, or publish it.

    It is made of LATEST's and the deltas of ``chain``, or of the whole save there.
    """

    chain: Sequence[DeltaSeen]
    size: int
    tip: Tip


@dataclass(frozen=True)
class GiveUp:
    """Quarantine a step whose save did not become complete in time."""

    save: Unfinished


@dataclass(frozen=True)
class Republish:
    """Publish an old version again, and answer the request."""

    request: RollbackRequest


@dataclass(frozen=True)
class AnswerRequest:
    """Answer a rollback request; ``made`` is the new version's sequence, None for a refusal."""

    request: RollbackRequest
    made: int | None = None
    why: str = ""


@dataclass(frozen=True)
class Skip:
    """Record that a save will not be published, because the pointer names a newer step."""

    step: int
    identity: str


@dataclass(frozen=True)
class Forget:
    """Remove the recorded outcome of a step that has no folder."""

    step: int


@dataclass(frozen=True)
class DropLease:
    """Remove the lease of a dead explorer."""

    sequence: int
    marker: str
    why: str


@dataclass(frozen=True)
class RetireVersion:
    """Delete a version, unless there is a lease on it."""

    sequence: int
    why: str


@dataclass(frozen=True)
class CloseLeaseFolder:
    """Remove the lease folder of a deleted version."""

    sequence: int


@dataclass(frozen=True)
class PruneDelta:
    """Delete a delta."""

    sequence: int
    why: str


@dataclass(frozen=True)
class PruneStep:
    """Delete a step folder if its content has not changed since the scan."""

    seen: StepSeen
    why: str


@dataclass(frozen=True)
class Learn:
    """Find out if a save holds only a model, so that its step folder may be pruned."""

    step: int


#: The actions that delete data of the job.
Pruning = DropLease | RetireVersion | PruneDelta | PruneStep
#: The actions that make new versions or deltas.
New = Merge | Prepare | MakeDeltas | StopDeltas | Fold | Republish
Action = New | GiveUp | AnswerRequest | Skip | Forget | CloseLeaseFolder | Learn | Pruning


@dataclass(frozen=True)
class Decision:
    """The actions of a round in order, and the reason if the daemon waits.

    ``pending`` is True if the daemon must not end as idle.
    """

    actions: tuple[Action, ...]
    waiting_for: str = ""
    pending: bool = False


def decide(seen: Observation, config: DaemonConfig) -> Decision:
    """The actions for an observation, in this order: new versions, records, deletions."""
    new: tuple[New | GiveUp | AnswerRequest, ...]
    if seen.rollbacks:
        # Until a request is answered nothing else is published, so that a successor can tell from
        # LATEST alone whether the request was carried out.
        new, waiting_for = (_rollback(seen.rollbacks[0], seen),), ""
    elif seen.pause is not None:
        new = (Merge(seen.making),) if seen.making else ()  # what has begun is finished
        waiting_for = f"paused by {printable(seen.pause.by)}, until 'syncd resume'"
    else:
        new, waiting_for = _publish(seen, config)
        if seen.making is not None and not _is_served(seen) and not _makes_deltas(new):
            given_up = (action for action in new if isinstance(action, GiveUp))
            prepares = (action for action in new if isinstance(action, Prepare))
            new = (Merge(seen.making), *given_up, *prepares)
        if seen.preparing is not None and not _is_served(seen):  # what has begun is finished
            # Its end would end an older merge, which must not begin again then.
            ended = (seen.preparing, seen.making)
            others = (
                it
                for it in new
                if not (isinstance(it, Prepare) or (isinstance(it, Merge) and it.save in ended))
            )
            new = (Prepare(seen.preparing), *others)
        if seen.making is None and all(isinstance(it, MakeDeltas | Prepare) for it in new):
            new = (*new, *_fold(seen, config))  # saves may come each round
    records: tuple[Action, ...] = (
        *(
            Skip(save.step, save.identity)
            for save in seen.unrecorded
            if save.identity and save not in (*seen.chain.saves, seen.making, seen.preparing)
        ),
        *(Forget(step) for step in seen.vanished),
    )
    if seen.pause is not None:
        return Decision((*new, *records), waiting_for, pending=True)
    save = seen.save
    by_waiting = save is not None and save.known_as is not None and bool(waiting_for)
    prunings: tuple[Action, ...] = (
        *_leases(seen, config),
        *_versions(seen, config),
        *_deltas(seen, config),
        *_steps(seen, config),
    )
    pending = bool(new) or by_waiting or (seen.tip is not None and seen.may_fold)
    return Decision((*new, *records, *prunings), waiting_for, pending=pending)


def _rollback(request: RollbackRequest, seen: Observation) -> Republish | AnswerRequest:
    if request.id == seen.served_request:
        return AnswerRequest(request, made=seen.latest)
    name = f"v{request.sequence}"
    if request.sequence == seen.latest and not (seen.tip or seen.making or seen.preparing):
        return AnswerRequest(request, why=f"{name} is already LATEST")
    leasable = set(seen.versions) & set(seen.lease_folders)
    if request.sequence > seen.latest or request.sequence not in leasable:
        why = f"{name} is not there: it was pruned, or never published"
        return AnswerRequest(request, why=why)
    return Republish(request)


def _publish(seen: Observation, config: DaemonConfig) -> tuple[tuple[New | GiveUp, ...], str]:
    if seen.pointer.step is None:
        return (), f"{config.pointer} {seen.no_step}"
    save = seen.save
    if save is None:
        return (), f"step {seen.pointer.step} has not been examined yet"
    if save.known_as is not None and (seen.outcome == "quarantined" or _is_served(seen)):
        return (), ""
    if isinstance(save, Unfinished):
        patience = config.tick if save.is_certain else _PATH_TIME
        overdue = save.known_as is not None and seen.save_still_for >= patience
        return ((GiveUp(save),), "") if overdue else ((), save.reason)
    if not save.receipts and seen.save_still_for < config.tick:
        why = (
            f"step {save.step} has no receipts, so the daemon waits until the step's files "
            f"have not changed for {config.tick:g} s"
        )
        return (), why
    return _delta(save, seen) if isinstance(save, Delta) else _whole(save, seen), ""


def _is_served(seen: Observation) -> bool:
    """True if explorers can have the pointer's save already."""
    served = seen.tip.save_id if seen.tip else seen.published_save
    return seen.save is not None and seen.save.known_as == served is not None


def _makes_deltas(new: Iterable[Action]) -> bool:
    return any(isinstance(action, MakeDeltas) for action in new)


def _whole(save: WholeSave, seen: Observation) -> tuple[New, ...]:
    """Serve a save before its version, or merge it."""
    deltas = seen.deltas_to.get(save.identity)
    if isinstance(save, Shards) and deltas and deltas[-1].sequence > _named(seen):
        return (MakeDeltas((save,), deltas[-1].sequence, deltas[-1].sequence),)
    may = seen.takes_tips and seen.latest and isinstance(save, Shards) and save.receipts
    names = {save.identity, save.identity.partition("-")[0]}
    is_merged = bool(names & {seen.untaken, seen.making and seen.making.identity})
    return (Merge(save),) if is_merged or not may else (Prepare(save),)


def _named(seen: Observation) -> int:
    return seen.tip.sequence if seen.tip else seen.latest


def _root(save: SavedWeights, seen: Observation) -> int | None:
    """The number of the whole save that a delta rests on, if any."""
    chain = seen.deltas_to.get(save.identity)
    if chain is None and save.base != seen.save_id:
        chain = seen.deltas_to.get(save.base or "")
    return chain[0].sequence if chain and chain[0].is_whole else None


def _delta(save: Delta, seen: Observation) -> tuple[New, ...]:
    deltas, chain, named = seen.deltas_to.get(save.identity), seen.chain, _named(seen)
    sequence = deltas[-1].sequence if deltas else 0
    joins = chain.joins and save.identity != seen.save_id  # else the trainer has gone back to it
    if sequence > named or (deltas is None and joins and not seen.no_deltas):
        saves = chain.saves[:1] if sequence else chain.saves[::-1]
        return (MakeDeltas(saves, sequence, _root(saves[0], seen)),)
    if sequence != named and any(one.full for one in seen.steps if one.step == save.step):
        return (Merge(save),)  # by the weights to resume from: the trainer has gone back
    if deltas is None and chain.full is not None:
        return _whole(chain.full, seen)
    settled = (seen.no_deltas or not seen.latest) and seen.outcome == "skipped"
    return () if settled or deltas is not None else (StopDeltas(save),)


def _fold(seen: Observation, config: DaemonConfig) -> tuple[Fold, ...]:
    """Fold by need: for explorers of whole versions, to spare deltas, or if no save comes."""
    tip = seen.tip
    if tip is None or not seen.may_fold:
        return ()
    chain, size = seen.deltas_to.get(tip.save_id, ()), seen.full_bytes or 0
    quiet = _IDLE_TICKS * config.tick if config.exit_when_idle else _QUIET
    needed = [seen.must_fold, seen.save_still_for >= quiet]
    if chain and (root := chain[0]).is_whole:  # first, and the deltas on it later
        saved = SaveId.parse(root.target)
        step = saved.step if saved else tip.step
        tip = Tip(sequence=root.sequence, step=step, save_id=root.target, root=root.sequence)
        chain, size = (root,), root.bytes
    else:
        many = sum(delta.bytes for delta in chain) > size / 4
        needed += [len(chain) >= _MANY_DELTAS, many]
    return (Fold(chain, size, tip),) if chain and any(needed) else ()


def _leases(seen: Observation, config: DaemonConfig) -> Iterable[DropLease]:
    for lease in seen.leases:
        if lease.dead_for is not None and lease.dead_for >= config.dead_reader_grace:
            why = f"its explorer has been dead for {lease.dead_for:.0f} s"
            yield DropLease(lease.sequence, lease.marker, why)


def _versions(
    seen: Observation, config: DaemonConfig
) -> Iterable[RetireVersion | CloseLeaseFolder]:
    """Versions below LATEST that are neither among the newest nor leased.

    Nothing above LATEST is touched, because after a take-over a lease folder there may belong to
    the other daemon's next version.
    """
    keep = newest((v for v in seen.versions if v <= seen.latest), config.keep)
    leased = {lease.sequence for lease in seen.leases}  # also pins, which are in the same folders
    leased.update(request.sequence for request in seen.rollbacks)
    leasable = set(seen.lease_folders)
    for sequence in sorted(v for v in seen.versions if v < seen.latest):
        if sequence not in leasable:
            yield RetireVersion(sequence, "an earlier daemon began to prune it")
        elif sequence not in keep and sequence not in leased:
            yield RetireVersion(sequence, f"not among the newest {config.keep}, and not leased")
    for sequence in sorted(leasable.difference(seen.versions)):
        if sequence < seen.latest and sequence not in leased:
            yield CloseLeaseFolder(sequence)


def _deltas(seen: Observation, config: DaemonConfig) -> Iterable[PruneDelta]:
    """Deltas to delete. A chain of deltas larger than half a version helps no explorer.

    Every chain ends with the newest delta, so all deltas older than a pruned one are pruned too.
    A whole save goes once it is a version, or a newer one is named.
    """
    together, count, at_most = 0, 0, (seen.full_bytes or math.inf) / 2
    saves = (seen.tip and seen.tip.save_id, seen.save and seen.save.known_as)
    chains = [seen.deltas_to.get(save or "", ()) for save in saves]
    needed = {delta.sequence for chain in chains for delta in chain}.union(seen.in_use)
    root = max(seen.latest, (seen.tip and seen.tip.root) or 0)
    # Else others may lead from one that only cannot be read now.
    is_known = all(delta.target or delta.sequence <= seen.latest for delta in seen.deltas)
    for delta in sorted(seen.deltas, key=lambda delta: -delta.sequence):
        if delta.is_whole:
            if is_known and delta.sequence <= root and delta.sequence not in needed:
                yield PruneDelta(delta.sequence, "there is a version of this save, or a newer save")
            continue
        if delta.sequence > seen.latest:
            leads = delta.base is None or delta in seen.deltas_to.get(delta.target, ())
            if is_known and not leads:
                yield PruneDelta(delta.sequence, "it does not lead from LATEST's version")
            continue
        together, count = together + delta.bytes, count + 1
        if config.deltas == "off":
            yield PruneDelta(delta.sequence, "deltas are off")
        elif count > config.keep_deltas:
            yield PruneDelta(delta.sequence, f"not among the newest {config.keep_deltas}")
        elif together > at_most:
            why = "this and all newer ones together exceed half the bytes of a version"
            yield PruneDelta(delta.sequence, why)


def newest(sequences: Iterable[int], count: int) -> frozenset[int]:
    """The newest ``count`` versions, which stay even if nobody leases them."""
    return frozenset(sorted(sequences)[-count:])


def _steps(seen: Observation, config: DaemonConfig) -> Iterable[PruneStep | Learn]:
    if not config.prune_steps:
        return
    for step in seen.steps:
        why = _why_prunable(step, seen, config)
        if why:
            yield PruneStep(step, why)
        elif step.unread and _why_prunable(replace(step, resumable=False), seen, config):
            yield Learn(step.step)


def _why_prunable(step: StepSeen, seen: Observation, config: DaemonConfig) -> str:
    """The reason why a step folder may be pruned; empty in any doubt."""
    if seen.pointer.step is None:
        return ""
    announced = seen.pointer.step if seen.announced_step is None else seen.announced_step
    on_chain, ended = {save.step for save in seen.chain.saves}, step.outcome.outcome
    on_chain.update({seen.making.step} if seen.making else ())
    # Also those that have deltas already, because a rollback ends these.
    on_chain.update(saved.step for one in seen.deltas_to if (saved := SaveId.parse(one)))
    doubts = (
        ended not in {"published", "skipped"},
        step.found != step.outcome.identity,
        step.step in {seen.pointer.step, seen.checkpoint.step, *seen.benched, *on_chain},
        # The save may be a base that an old cache still hides, but not for ever.
        step.has_receipts and not seen.chain.is_seen and seen.save_still_for < _HIDDEN,
        step.step >= announced,
        step.saving or step.full or step.pinned,
        not step.has_receipts and config.pointer != STATE_POINTER and not config.prune_foreign,
        # It may be the newest complete save.
        ended == "skipped" and not isinstance(seen.save, WholeSave),
    )
    if any(doubts):
        return ""
    why = ended if ended == "published" else f"overtaken by step {seen.pointer.step}"
    if step.retired:
        # The pointer must name a newer full checkpoint, from which the trainer can resume.
        newer = seen.checkpoint.step is not None and seen.checkpoint.step > step.step
        return f"{why}, and retired by its trainer" if newer else ""
    return "" if step.resumable or step.critic else f"{why}, and not a full checkpoint"
