"""The daemons of the model (tip.py): make deltas, name the tip, fold, roll back, prune."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from .tip_state import BAD, WRONG, Daemon, Delta, Latest, Make, Rules, State, Version

Step: TypeAlias = tuple[str, State]
Steps: TypeAlias = Iterator[Step]


@dataclass(frozen=True)
class Daemons:
    """The bounds and the rules, and what a daemon does next."""

    faults: tuple[str, ...] = ()
    """Which one may happen, once: the beginnings of its names in `_faults`."""
    readers: str = ""
    """One letter a reader: c has a copy of version 1, n none, and p reads without a stage."""
    times: int = 1
    """How many faults may happen."""
    saves: int = 3
    rooms: int = 2
    lag: int = 2
    """How many changes of records, or of folders, an old cache may miss."""
    again: bool = True
    """Whether a run may save one step twice."""
    nan: bool = False
    """Whether one save may have NaN."""
    rollback: bool = False
    eager: bool = False
    """The trainer saves deltas whenever it may, and its run does not end with the last save."""
    rules: Rules = field(default_factory=Rules)

    def daemon(self, state: State, number: int, me: Daemon) -> Steps:
        disk = state.disk
        if me.place == "away":
            if disk.room < self.rooms:
                disk = disk._replace(room=disk.room + 1)
                yield "take over", state.by(number, Daemon("read", disk.room), disk)
            return
        if me.dirty and (me.place != "naming" or self.rules.syncs_first):
            state = state._replace(disk=disk.sync(me.dirty))
            me = me._replace(dirty="")
        if me.place == "read":
            yield self._read(state, number, me)
        elif me.place == "making":
            yield self._delta(state, number, me)
        elif me.place == "naming":
            yield self._name(state, number, me)
        else:
            if state.asked:
                yield from self._roll_back(state, number, me)
            if not (state.asked and self.rules.rollback_first):
                yield from self._decide(state, number, me)
                yield from self._make(state, number, me)
            yield from self._prune(state, number, me)

    def _read(self, state: State, number: int, me: Daemon) -> Step:
        """Take over: adopt the version above LATEST."""
        if self.rules.take_over_syncs:
            state = state._replace(disk=state.disk.sync("state", "published", "deltas"))
        disk = state.disk  # it asks the server
        latest, top = disk.latest, disk.published[-1]
        numbers = [top.sequence, latest.sequence, latest.number]
        floor = max(numbers + [delta.number for delta in disk.deltas])
        if not self.reached(state, latest, latest.tip):
            latest = latest._replace(number=0, tip=0)
        ready = me.ready(latest, floor)
        if top.sequence > latest.sequence:
            ready = ready._replace(place="naming", then=_follow(latest, top))
        return f"read LATEST: {_text(latest)}", state.by(number, ready, disk)

    def _same(self, state: State, one: int, other: int) -> bool:
        by_step = not self.rules.by_save_id and state.saves[one].step == state.saves[other].step
        return one == other or by_step

    def reached(self, state: State, latest: Latest, save: int) -> bool:
        """Whether deltas above LATEST lead from its save to this one."""
        while save and not self._same(state, save, latest.save):
            delta = state.delta_of(save)
            if delta is None or delta.number <= latest.sequence:
                return False
            save = state.saves[save].base
        return save > 0

    def _work(
        self, state: State, latest: Latest, save: int
    ) -> tuple[Literal["delta", "merge", "none", "reached"], int]:
        """What to do first, in the chain back from a save."""
        rules, found = self.rules, state.saves[save]
        if self.reached(state, latest, save):
            return "reached", save
        if not state.written(save) or found.base != found.base_1:
            return "none", save
        if found.base and not (latest.instead_of and rules.none_after_rollback):
            does, what = self._work(state, latest, found.base)
            if does == "reached":
                return "delta", save
            if does != "none":
                allowed = rules.walks_back and (does == "delta" or rules.merges_passed_root)
                return (does, what) if allowed else ("none", save)
        mergeable = found.full and not found.nan and save != state.disk.refused
        return ("merge" if mergeable else "none"), save

    def _decide(self, state: State, number: int, me: Daemon) -> Steps:
        """What becomes of the pointer's save."""
        latest, rules, seen = me.latest, self.rules, state.to("the daemon")
        save = seen.pointed()
        if save in (0, latest.save, latest.tip, latest.instead_of, state.disk.refused):
            return
        found = state.saves[save]
        does, what = self._work(seen, latest, save)
        if does == "none":  # before it says so, it asks the server
            does, what = self._work(state, latest, save)
        parts = state.disk.folders[state.saves[what].step]
        delta, next_number = seen.delta_of(save), me.floor + 1
        begun = me._replace(make=Make(what))  # which ends a fold
        if not rules.number_last:
            begun = me._replace(make=Make(what, next_number), floor=next_number)
        merge = state.by(number, begun if me.make.base or not me.make.save else me)
        if does == "delta" and me.floor < 4 * self.saves:
            making = me._replace(place="making", work=Version(next_number, what), parts=parts)
            yield f"take the files of {what}", state.by(number, making)
        elif does == "merge":
            yield f"merge {what}", merge
        elif (
            does == "reached"
            and delta
            and delta.number > latest.number
            and not (found.nan and rules.nan_never_tip)
        ):
            tip = latest._replace(number=delta.number, tip=save)
            yield f"{save} is a delta", state.by(number, me._replace(place="naming", then=tip))
        elif does == "none":
            if latest.instead_of and rules.merges_after_rollback and self.available(state, save):
                yield f"merge the deltas to {save}", merge
            elif rules.stops and not latest.no_deltas:
                no_deltas = me._replace(place="naming", then=latest._replace(no_deltas=True))
                yield f"{save} cannot be a delta", state.by(number, no_deltas)

    def _delta(self, state: State, number: int, me: Daemon) -> Step:
        (sequence, save, _), disk, parts = me.work, state.disk, me.parts
        if parts != (save, save) and self.rules.index_digests:
            return "the save has changed", state.by(number, me.ready(me.latest, me.floor))
        delta = Delta(sequence, save, parts[0] if parts[0] == parts[1] else BAD)
        disk = disk._replace(
            deltas=(*disk.deltas, delta),
            unsynced=(*disk.unsynced, ("deltas", delta)),
        )
        after = me.ready(me.latest, sequence, "deltas")
        return f"rename to deltas/d{sequence}: {save}", state.by(number, after, disk)

    def _commit(self, state: State, number: int, me: Daemon, version: Version) -> Step:
        disk = state.disk
        if state.version(version.sequence):
            return f"v{version.sequence} is another daemon's", state.by(number, Daemon())
        disk = disk._replace(
            published=tuple(sorted((*disk.published, version))),
            unsynced=(*disk.unsynced, ("published", version)),
        )
        then = _follow(me.latest, version)
        if version.instead_of and not self.rules.rollback_ends_tip:
            then = then._replace(number=me.latest.number, tip=me.latest.tip)
        after = me.ready(me.latest, max(me.floor, version.sequence), "published")
        after = after._replace(place="naming", then=then)
        back = " back" * (version.instead_of > 0)
        text = f"rename{back} to published/v{version.sequence}: {version.save}"
        return text, state.by(number, after, disk)

    def _name(self, state: State, number: int, me: Daemon) -> Step:
        disk, latest = state.disk, me.then
        unsynced = (*disk.unsynced, ("state", disk.latest))
        named = disk._replace(latest=latest, unsynced=unsynced)
        after = state.by(number, me.ready(latest, me.floor, "state"), named)
        if latest.instead_of and latest.sequence > disk.latest.sequence:
            replaced = disk.latest.tip or disk.latest.save
            after = after._replace(asked=False, replaced=replaced)
        return f"LATEST: {_text(latest)}", after

    def _make(self, state: State, number: int, me: Daemon) -> Steps:
        """Begin a fold, or publish what a child has made."""
        latest, make, rules = me.latest, me.make, self.rules
        free = me._replace(make=Make())
        if not make.save:
            if latest.tip and rules.folds:
                fold = me._replace(make=Make(latest.tip, latest.number, latest.sequence))
                yield f"begin a fold of {latest.tip}", state.by(number, fold)
        elif make.base:
            yield self._end_fold(state, number, free, make)
        elif make.is_done:
            yield self._end_merge(state, number, free, make)
        elif self.available(state, make.save) if latest.instead_of else state.written(make.save):
            done = me._replace(make=make._replace(is_done=True))
            yield f"{make.save} is merged", state.by(number, done)
        else:
            yield f"files of {make.save} are missing", state.by(number, free)

    def _end_merge(self, state: State, number: int, me: Daemon, make: Make) -> Step:
        rules, save, seen = self.rules, make.save, state.to("the daemon")
        if state.saves[save].unfit:
            disk = state.disk._replace(refused=save if rules.quarantines else 0)
            return f"the merge of {save} has failed", state.by(number, me, disk)
        pointed = rules.merges_if_needed and seen.pointed()
        if pointed and self._work(seen, me.latest, pointed)[0] in ("delta", "reached"):
            return f"drop the merge of {save}", state.by(number, me)
        return self._commit(state, number, me, Version(make.sequence or me.floor + 1, save))

    def _end_fold(self, state: State, number: int, me: Daemon, make: Make) -> Step:
        rules, latest, found, made = self.rules, me.latest, state.saves[make.save], 0
        there, source = state.version(make.sequence), state.version(make.base)
        if rules.fold_reads_full and found.full and state.written(make.save):
            made = BAD if found.unfit else make.save
        elif source:
            made = self.made(state, source.save, make.save)
        if there:
            naming = me._replace(place="naming", then=_follow(latest, there))
            return f"v{make.sequence} is there already", state.by(number, naming)
        if not made:
            return f"the deltas to {make.save} are gone", state.by(number, me)
        if made == BAD and rules.digests:
            no_deltas = latest._replace(no_deltas=rules.stops)
            text = f"a delta to {make.save} is damaged"
            return text, state.by(number, me._replace(place="naming", then=no_deltas))
        return self._commit(state, number, me, Version(make.sequence, made))

    def _roll_back(self, state: State, number: int, me: Daemon) -> Steps:
        latest, rules, refusal = me.latest, self.rules, True
        for version in state.disk.published:
            newest = latest.tip if rules.rollback_to_latest else 0
            if version.sequence < latest.sequence + (newest > 0):
                refusal = False
                instead_of = latest.tip * rules.rollback_of_tip or latest.save
                back = Version(me.floor + 1, version.save, instead_of)
                ends = me._replace(make=Make()) if rules.rollback_ends_make else me
                yield self._commit(state, number, ends, back)
        if refusal:
            yield "refuse a rollback", state.by(number, me)._replace(asked=False)

    def _prune(self, state: State, number: int, me: Daemon) -> Steps:
        rules, latest, seen = self.rules, me.latest, state.to("the daemon")
        found = self._chain_to(seen)
        chain = found or [0]
        is_known = found is not None or not rules.unknown_keeps_all
        synced = state.disk.sync("published", "deltas")
        leased = {lease for reader in state.readers for lease in reader.leases}
        for version in state.disk.published:
            is_root = rules.keeps_root and (version.save == chain[-1] or not is_known)
            is_kept = is_root or state.asked or version.sequence in leased
            if version.sequence < latest.sequence and not is_kept:
                gone = state.by(number, me, synced.without(version))
                yield f"retire v{version.sequence}", gone
        for delta in state.disk.deltas:
            above = delta.number > latest.sequence
            leads = self.reached(state, latest, delta.save) and rules.keeps_deltas_above
            on_chain = rules.keeps_deltas_of_chain and (delta.save in chain or not is_known)
            if not (above and leads) and not on_chain:
                yield f"delete d{delta.number}", state.by(number, me, synced.without(delta))
        for step in range(1, seen.disk.pointer):
            save = state.disk.folders[step][0]
            writes = save == state.trainer.last and not state.trainer.announced
            if not state.written(save) or not seen.written(save) or writes:
                continue
            on_chain = save in chain[:-1] and rules.keeps_chain
            is_made = save == me.make.save and rules.keeps_made
            if is_known and not on_chain and not is_made:
                gone = state.by(number, me, synced.write(step, (0, 0)))
                yield f"prune step {step}", gone

    def _chain_to(self, state: State) -> list[int] | None:
        """The saves in the chain back from the pointer's; the last one is published, or 0."""
        published = {version.save for version in state.disk.published}
        save, chain = state.pointed(), list[int]()
        while save not in published:
            has_delta = state.delta_of(save) is not None
            if not has_delta and not state.written(save):
                return None
            if not has_delta or self.rules.keeps_until_full:
                chain.append(save)
            save = state.saves[save].base
            if not save:
                break
        return [*chain, save]

    # -- deltas ------------------------------------------------------------------------------------

    def made(self, state: State, base: int, save: int) -> int:
        """The bytes that deltas make of a base; 0 if they do not lead to the save."""
        path = list[Delta]()
        while not self._same(state, save, base):
            delta = state.delta_of(save)
            if delta is None:
                return 0
            path.append(delta)
            save = state.saves[save].base
        for delta in reversed(path):
            found = state.saves[delta.save]
            if base != found.base or found.against not in (0, base):
                return WRONG
            if delta.files != delta.save:
                return BAD
            base = delta.save
        return base

    def available(self, state: State, save: int) -> bool:
        """Whether a save can be made from what is on disk."""
        if any(version.save == save for version in state.disk.published):
            return True
        found, delta = state.saves[save], state.delta_of(save)
        written = state.written(save) and found.base == found.base_1
        if written and found.full and not found.nan and not found.unfit:
            return True
        there = written or (delta is not None and delta.files == save)
        return there and found.base > 0 and self.available(state, found.base)


def _text(latest: Latest) -> str:
    tip = f", tip {latest.number} = {latest.tip}" if latest.tip else ""
    return f"v{latest.sequence} = {latest.save}{tip}{', no deltas' * latest.no_deltas}"


def _follow(latest: Latest, version: Version) -> Latest:
    """LATEST with a new version: the tip stays if it is above; only a rollback takes no deltas."""
    sequence, save, instead_of = version
    if latest.number > sequence and not instead_of:
        return Latest(sequence, save, latest.number, latest.tip)
    return Latest(sequence, save, no_deltas=instead_of > 0, instead_of=instead_of)
