"""The daemons of the model (tip.py): prepare tips, name them, make versions, roll back, prune."""

from dataclasses import dataclass
from typing import Literal

from .tip_kept import Kept, Step, Steps
from .tip_state import BAD, Daemon, Delta, Latest, Make, Prepare, State, Version


@dataclass(frozen=True)
class Daemons(Kept):
    """What a daemon does next."""

    def daemon(self, state: State, number: int, me: Daemon) -> Steps:
        disk = state.disk
        if me.place == "away":
            if disk.room < self.rooms:
                disk = disk._replace(room=disk.room + 1)
                yield "take over", state.by(number, Daemon("read", disk.room), disk)
                if state.olds:
                    old = Daemon("read", disk.room, old=True)
                    yield "0.3 takes over", state.by(number, old, disk)._replace(olds=0)
            return
        if me.dirty and (me.place != "naming" or self.rules.syncs_first):
            state = state._replace(disk=disk.sync(me.dirty))
            me = me._replace(dirty="")
        if me.place == "read":
            yield self._read(state, number, me)
        elif me.place == "naming":
            yield self._name(state, number, me)
        elif me.place in ("set aside", "looked"):
            yield self.prune(state, number, me)
        else:
            if state.asked:
                yield from self._roll_back(state, number, me)
            if not (state.asked and self.rules.rollback_first):
                yield from self._decide(state, number, me)
                yield from self._prepare(state, number, me)
                yield from self._make(state, number, me)
            yield from self._prune(state, number, me)

    def _read(self, state: State, number: int, me: Daemon) -> Step:
        """Take over: adopt the version above LATEST; keep the tip if it leads."""
        if self.rules.take_over_syncs:
            state = state._replace(disk=state.disk.sync("state", "published", "deltas"))
        if self.rules.puts_back:
            state = self.put_back(state)
        disk = state.disk  # it asks the server
        latest, top = disk.latest, disk.published[-1]
        numbers = [top.sequence, latest.sequence, latest.number]
        numbers += [delta.number for delta in disk.deltas]
        if me.old:  # which knows no `tip`, only `ahead`
            latest = (latest.without_tip() if latest.root else latest)._replace(rollback=0)
        root = self.lead(state, latest, latest.tip, latest.number + 1, old=me.old)
        if root is None:
            latest = latest.without_tip()
        elif latest.tip:
            latest = latest._replace(root=root or 0)
        ready = me._replace(floor=max(numbers)).ready(latest)
        if top.sequence > latest.sequence:
            ready = ready._replace(place="naming", then=self._follow(latest, top))
        elif latest != disk.latest and not me.old:
            ready = ready._replace(place="naming", then=latest)
        return f"read LATEST: {_text(latest)}", state.by(number, ready, disk)

    def _work(
        self, state: State, me: Daemon, save: int
    ) -> tuple[Literal["delta", "merge", "none", "reached"], int]:
        """What to do first, in the chain back from a save."""
        rules, found, latest = self.rules, state.saves[save], me.latest
        if self.lead(state, latest, save, old=me.old) is not None:
            return "reached", save
        is_replaced = save == latest.instead_of and rules.replaced_is_no_root
        if not state.written(save) or found.base != found.base_1 or is_replaced:
            return "none", save
        if found.base:
            does, what = self._work(state, me, found.base)
            if does == "reached":
                on_version = not self.lead(state, latest, found.base, old=me.old)
                if not (latest.instead_of and on_version):  # a rollback has no deltas
                    return "delta", save
            elif does != "none":
                allowed = rules.walks_back and (does == "delta" or rules.merges_passed_root)
                return (does, what) if allowed else ("none", save)
        return ("merge" if self._is_mergeable(state, save) else "none"), save

    def _is_mergeable(self, state: State, save: int) -> bool:
        found = state.saves[save]
        return found.full and not found.nan and save != state.disk.refused

    def _decide(self, state: State, number: int, me: Daemon) -> Steps:
        """What becomes of the pointer's save."""
        latest, rules, seen = me.latest, self.rules, state.to("the daemon")
        save, newest = seen.pointed(), latest.newest()
        if save in (0, newest[1], latest.instead_of, state.disk.refused):
            return
        does, what = self._work(seen, me, save)
        if does == "none":  # before it says so, it asks the server
            does, what = self._work(state, me, save)
        if does == "reached":
            folder = seen.folder_of(save)
            if folder and folder.number > newest[0]:
                if not (state.saves[save].nan and rules.nan_never_tip):
                    then = self._with_tip(state, me, folder.number, save)
                    naming = me._replace(place="naming", then=then)
                    yield f"d{folder.number} = {save} is there", state.by(number, naming)
                return
            if not self._is_mergeable(state, save):
                return
            does, what = "merge", save  # the trainer has gone back
        if does == "none":
            if rules.stops and not latest.no_deltas:
                no_deltas = me._replace(place="naming", then=latest._replace(no_deltas=True))
                yield f"{save} cannot be a delta", state.by(number, no_deltas)
            return
        is_merged = not me.make.base and not me.make.of_tip and me.make.save > 0
        is_busy = is_merged and me.make.save == what
        parts = state.disk.folders[state.saves[what].step]
        whole = does == "merge"
        if (
            not is_busy
            and not me.prepare.save
            and not (whole and (me.old or True not in self.tips))
        ):
            child = Prepare(what, me.floor + 1, parts, whole)
            yield (
                f"prepare {'whole ' * whole}{child.number} = {what}",
                state.by(number, me._replace(prepare=child, floor=child.number)),
            )
        if (
            not (is_busy or is_merged or me.prepare.save == what)
            and whole
            and (me.old or False in self.tips)
        ):
            child_number = me.floor + 1 if rules.number_first and not me.old else 0
            merging = me._replace(make=Make(what, child_number), floor=max(me.floor, child_number))
            yield f"merge {child_number} = {what}", state.by(number, merging)

    def _with_tip(self, state: State, me: Daemon, number: int, save: int) -> Latest:
        latest = me.latest
        root = self.lead(state, latest, save, old=me.old) or 0
        no_deltas = latest.no_deltas and root == latest.root
        return latest._replace(number=number, tip=save, root=root, no_deltas=no_deltas)

    def _prepare(self, state: State, number: int, me: Daemon) -> Steps:
        """Let what a child has prepared become the tip."""
        (save, its_number, parts, whole), rules, latest = me.prepare, self.rules, me.latest
        if not save:
            return
        me, found, newest = me._replace(prepare=Prepare()), state.saves[save], latest.newest()
        is_changed = parts != (save, save) and rules.index_digests
        is_served = state.to("the daemon").pointed() == newest[1] and rules.prepares_if_needed
        leads = whole or self.lead(state, latest, found.base, old=me.old) is not None
        is_wrong = save == state.disk.refused or not leads
        if found.unfit and whole:
            disk = state.disk._replace(refused=save)
            yield f"{save} cannot be prepared", state.by(number, me, disk)
        if (
            is_changed
            or is_served
            or (is_wrong and rules.checks_again)
            or (its_number <= newest[0] and rules.number_again)
        ):
            floor = me.floor - (me.floor == its_number)  # nobody has seen this number
            yield f"drop what is prepared of {save}", state.by(number, me._replace(floor=floor))
            return
        folder = Delta(its_number, save, parts[0] if parts[0] == parts[1] else BAD, whole)
        disk = state.disk._replace(
            deltas=tuple(sorted((*state.disk.deltas, folder))),
            unsynced=(*state.disk.unsynced, ("deltas", folder)),
        )
        state = state._replace(disk=disk)
        me = me.ready(latest, "deltas")
        if not (found.nan and rules.nan_never_tip):
            then = self._with_tip(state, me, its_number, save)
            me = me._replace(place="naming", then=then)
        yield f"rename to deltas/d{its_number}: {save}", state.by(number, me)

    def _commit(self, state: State, number: int, me: Daemon, version: Version) -> Step:
        disk = state.disk
        if state.version(version.sequence):
            return f"v{version.sequence} is another daemon's", state.by(number, Daemon())
        then = self._follow(me.latest, version)
        disk = disk._replace(
            published=tuple(sorted((*disk.published, version))),
            unsynced=(*disk.unsynced, ("published", version)),
        )
        after = me._replace(floor=max(me.floor, version.sequence)).ready(me.latest, "published")
        after = after._replace(place="naming", then=then)
        back = " back" * (version.instead_of > 0)
        text = f"rename{back} to published/v{version.sequence}: {version.save}"
        return text, state.by(number, after, disk)

    def _follow(self, latest: Latest, version: Version) -> Latest:
        """LATEST with a new version: the tip stays if it is above; a rollback takes no deltas."""
        (sequence, save, instead_of), rules = version, self.rules
        if instead_of and rules.rollback_ends_tip:
            return Latest(sequence, save, 0, 0, 0, True, instead_of, sequence)
        rollback = latest.rollback if rules.keeps_rollback else 0
        rollback = sequence if instead_of else rollback
        if latest.number <= sequence or not rules.keeps_tip:
            return Latest(sequence, save, rollback=rollback)
        root = latest.root if latest.root > sequence else 0
        return Latest(sequence, save, latest.number, latest.tip, root, rollback=rollback)

    def _name(self, state: State, number: int, me: Daemon) -> Step:
        disk, latest = state.disk, me.then
        unsynced = (*disk.unsynced, ("state", disk.latest))
        named = disk._replace(latest=latest, unsynced=unsynced)
        after = state.by(number, me.ready(latest, "state"), named)
        if latest.instead_of and latest.sequence > disk.latest.sequence:
            replaced = disk.latest.tip or disk.latest.save
            after = after._replace(asked=False, replaced=replaced, rolled=latest.sequence)
        return f"LATEST: {_text(latest)}", after

    def _make(self, state: State, number: int, me: Daemon) -> Steps:
        """Begin to make a version of the tip, or publish what a child has made."""
        make = me.make
        free = me._replace(make=Make())
        if not make.save:
            yield from self._begin(state, number, me)
        elif make.of_tip:
            yield self._end_tip(state, number, free, make)
        elif make.base:
            yield self._end_fold(state, number, free, make)
        elif make.is_done:
            yield self._end_merge(state, number, free, make)
        elif state.written(make.save):
            done = me._replace(make=make._replace(is_done=True))
            yield f"{make.save} is merged", state.by(number, done)
        else:
            yield f"files of {make.save} are missing", state.by(number, free)

    def _begin(self, state: State, number: int, me: Daemon) -> Steps:
        latest, rules = me.latest, self.rules
        if not latest.tip or not rules.folds:
            return
        if not latest.root:
            fold = me._replace(make=Make(latest.tip, latest.number, latest.sequence))
            yield f"begin a fold of {latest.tip}", state.by(number, fold)
            return
        root = next((d for d in state.disk.deltas if d.number == latest.root), None)
        follow = [r.wants(latest) == latest.newest() for r in state.readers]
        serve = [r.sequence == latest.number for r in state.readers]
        if root is None or (root.save == state.disk.refused and rules.drops_refused):
            then = latest.without_tip()._replace(no_deltas=rules.stops)
            dropping = me._replace(place="naming", then=then)
            yield f"d{latest.root} cannot be made", state.by(number, dropping)
        elif (there := state.version(root.number)) and rules.adopts:
            naming = me._replace(place="naming", then=self._follow(latest, there))
            yield f"v{root.number} is there", state.by(number, naming)
        elif not all(follow) or all(serve) or rules.waits_no_longer:
            make = Make(root.save, root.number, of_tip=True)
            yield f"begin to make v{root.number}", state.by(number, me._replace(make=make))

    def _end_tip(self, state: State, number: int, me: Daemon, make: Make) -> Step:
        rules, save = self.rules, make.save
        root = next((d for d in state.disk.deltas if d.number == make.sequence), None)
        if root is None:
            return f"the files of d{make.sequence} are gone", state.by(number, me)
        is_damaged = root.files == BAD and rules.digests
        if is_damaged and state.written(save) and rules.merges_damaged:
            merge = me._replace(make=Make(save, make.sequence))
            return f"d{root.number} is damaged: merge {save}", state.by(number, merge)
        if (state.saves[save].unfit and rules.digests) or is_damaged:
            disk = state.disk._replace(refused=save if rules.quarantines else 0)
            return f"v{root.number} cannot be made", state.by(number, me, disk)
        if me.latest.sequence >= root.number and rules.above_latest:
            return f"v{root.number} is too late", state.by(number, me)
        return self._commit(state, number, me, Version(root.number, root.files))

    def _end_merge(self, state: State, number: int, me: Daemon, make: Make) -> Step:
        rules, save, seen, latest = self.rules, make.save, state.to("the daemon"), me.latest
        if state.saves[save].unfit:
            disk = state.disk._replace(refused=save if rules.quarantines else 0)
            return f"the merge of {save} has failed", state.by(number, me, disk)
        pointed = rules.merges_if_needed and seen.pointed()
        is_back = pointed == latest.newest()[1] and not self._is_root(latest, make)
        if pointed and pointed != save and not is_back and not self._is_root(latest, make):
            is_back = self._work(seen, me, pointed)[0] in ("delta", "reached")
        version = Version(make.sequence or me.floor + 1, save)
        is_late = version.sequence <= latest.sequence and rules.above_latest
        if is_back or is_late:
            return f"drop the merge of {save}", state.by(number, me)
        return self._commit(state, number, me, version)

    def _is_root(self, latest: Latest, make: Make) -> bool:
        return make.sequence == latest.root > 0 and self.rules.merges_root

    def _end_fold(self, state: State, number: int, me: Daemon, make: Make) -> Step:
        rules, latest, found, made = self.rules, me.latest, state.saves[make.save], 0
        there, source = state.version(make.sequence), state.version(make.base)
        if rules.fold_reads_full and found.full and state.written(make.save):
            made = BAD if found.unfit else make.save
        elif source:
            made = self.made(state, source.save, make.save)
        if make.sequence <= latest.sequence and rules.above_latest:
            return f"v{make.sequence} is too late", state.by(number, me)
        if there:
            naming = me._replace(place="naming", then=self._follow(latest, there))
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
                yield self._commit(state, number, me, back)
        if refusal:
            yield "refuse a rollback", state.by(number, me)._replace(asked=False)

    def _prune(self, state: State, number: int, me: Daemon) -> Steps:
        rules, latest, seen = self.rules, me.latest, state.to("the daemon")
        found = self.chain_to(seen)
        chain = found or [0]
        is_known = found is not None or not rules.unknown_keeps_all
        synced = state.disk.sync("published", "deltas")
        leased = {lease for reader in state.readers for lease in reader.leases}
        leased.update({state.pin.number} if state.pin.at == "leases" else ())
        for version in state.disk.published:
            is_root = rules.keeps_root and (version.save == chain[-1] or not is_known)
            is_kept = is_root or state.asked or version.sequence in leased
            if version.sequence < latest.sequence and not is_kept:
                gone = state.by(number, me, synced.without(version))
                yield f"retire v{version.sequence}", gone
        needed = self._needed(state, me, chain)
        for delta in state.disk.deltas:
            above = delta.number > max(latest.newest()[0], latest.sequence) and rules.keeps_highest
            unseen = not is_known and rules.keeps_deltas_of_chain
            if (delta not in needed and not above and not unseen) or (me.old and delta.whole):
                yield f"delete d{delta.number}", state.by(number, me, synced.without(delta))
        for step in range(1, seen.disk.pointer):
            save = state.disk.folders[step][0]
            writes = save == state.trainer.last and not state.trainer.announced
            if not state.written(save) or not seen.written(save) or writes:
                continue
            on_chain = save in chain[:-1] and rules.keeps_chain
            is_made = save == me.make.save and not me.make.of_tip and rules.keeps_made
            if is_known and not on_chain and not is_made:
                yield self.set_aside(state.by(number, me, synced), number, step)

    def _needed(
        self, state: State, me: Daemon, chain: list[int], *, fetched: bool = True
    ) -> set[Delta]:
        """What is in deltas/ on the way to the tip or the pointer's save, made, or fetched."""
        rules, latest, make = self.rules, me.latest, me.make
        needed = set[Delta]()
        if rules.keeps_way:
            needed.update(self.path(state, latest.tip, latest.sequence, latest.number + 1))
        if rules.keeps_deltas_of_chain:
            needed.update(d for d in state.disk.deltas if d.save in chain)
        if rules.keeps_made:
            needed.update(d for d in state.disk.deltas if make.of_tip and d.number == make.sequence)
        if rules.keeps_fetched and fetched:
            for reader in state.readers:
                needed.update(self.path(state, reader.goal[1]))
        return needed


def _text(latest: Latest) -> str:
    root = f" on {latest.root}" * (latest.root > 0)
    tip = f", tip {latest.number} = {latest.tip}{root}" if latest.tip else ""
    return f"v{latest.sequence} = {latest.save}{tip}{', no deltas' * latest.no_deltas}"
