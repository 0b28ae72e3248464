"""The tip: each save is served at once, and versions are made of it beside the loop, as a model.

A trainer of two ranks, two daemons that may stop for ever between any two steps, and readers. A
daemon has two children: one prepares tips (a delta, or a whole save), one makes versions. Each step
is one operation on storage: a rename is visible at once, and the daemon syncs the folder as a part
of its next step, so that a power loss can undo a rename in between. One fault may happen at any
moment. An old cache is a fault, too: one client goes on seeing the records or the folders of that
moment, until it asks the server.

The bytes of a save are its number: a delta of save 3, whose base is 2, turns 2 into 3. The fence is
given here (fence.py): a rename out of a room whose successor has taken over fails. So are leases
(lease.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from .tip_daemon import Daemons
from .tip_kept import Steps
from .tip_state import (
    BAD,
    WRONG,
    Daemon,
    Disk,
    Latest,
    Make,
    Prepare,
    Reader,
    Save,
    State,
    Trainer,
    Version,
)

_READERS = {
    "c": Reader(stage=True, sequence=1, serves=1),
    "n": Reader(stage=True),
    "o": Reader(stage=True, sequence=1, serves=1, old=True),
    "p": Reader(stage=False, sequence=1, serves=1, leases=(1, 0)),
}


@dataclass(frozen=True)
class Tip(Daemons):
    """The model: `start`, `successors`, `violation` and `served` are for the search."""

    def start(self) -> State:
        """Save 1 is published and served."""
        first = Latest(1, 1)
        folders = ((0, 0), (1, 1), *((0, 0),) * (self.saves - 1))
        return State(
            (Save(0, 0, full=True), Save(1, 1, full=True)),
            Disk(first, 1, folders, (Version(1, 1),)),
            Trainer(),
            (Daemon("ready", 1, first, 1), Daemon()),
            tuple(_READERS[letter] for letter in self.readers),
            faults=self.times if self.faults else 0,
            rollbacks=int(self.rollback),
            agains=int(self.again),
            nans=int(self.nan),
            olds=int(self.old),
            named=(0, 1),
        )

    def successors(self, state: State) -> Iterator[tuple[str, State, bool]]:
        """Every step, and whether somebody takes it of his own accord."""
        for text, after in self._willing(state):
            yield text, self._canonical(state, after), True
        for text, after in self._unwilling(state):
            yield text, self._canonical(state, after), False

    def _canonical(self, state: State, after: State) -> State:
        """Let a cache expire, and forget what nobody will see."""
        disk, daemons = after.disk, after.daemons
        if self.rules.fence:  # the renames of a superseded daemon fail
            daemons = tuple(d if d.room == disk.room else Daemon() for d in daemons)
        if disk.unsynced and (not after.faults or "power loss" not in self.faults):
            disk = disk._replace(unsynced=())
            daemons = tuple(d._replace(dirty="") for d in daemons)
        daemons = tuple(sorted(daemons, reverse=True))
        if after.stale:
            client, records, old, changes = after.stale
            changes += state.disk.seen(not records, old) != disk.seen(not records, old)
            stale = (client, records, old, changes) if changes <= self.lag else None
            after = after._replace(stale=stale)
        named = _named(after) if after.olds >= self.old else ()
        return after._replace(disk=disk, daemons=daemons, named=named)

    def _willing(self, state: State) -> Steps:
        yield from self._trainer(state)
        for number, daemon in enumerate(state.daemons):
            for text, after in self.daemon(state, number, daemon):
                yield f"daemon {number}: {text}", after
        for number, reader in enumerate(state.readers):
            for text, now in self._reader(state, f"reader {number}", reader):
                yield f"reader {number}: {text}", _with_reader(state, number, now)
        yield from self.people(state)
        yield from self.bench(state)
        if state.stale:
            yield f"{state.stale[0]} asks the server", state._replace(stale=None)

    def _unwilling(self, state: State) -> Steps:
        trainer = state.trainer
        if state.rollbacks:
            yield "people ask for a rollback", state._replace(rollbacks=0, asked=True)
        if trainer.stage == "dead" and len(state.saves) <= self.saves:
            run = Trainer(trainer.run + 1, 1, last=0, copy=0, announced=False)
            yield f"run {run.run} resumes from step 1", state._replace(trainer=run)
            for step in range(1, state.disk.pointer + 1):
                save = state.disk.folders[step][0]
                if state.written(save) and state.saves[save].full:
                    yield (
                        f"run {run.run} resumes from step {step}, and points to it",
                        state._replace(
                            trainer=run._replace(step=step),
                            disk=state.disk._replace(pointer=step),
                            replaced=state.replaced * (save != state.replaced),
                        ),
                    )
        if state.faults:
            for text, after in self._faults(state._replace(faults=state.faults - 1)):
                if text.startswith(self.faults):
                    yield f"FAULT {text}", after

    # -- the trainer -------------------------------------------------------------------------------

    def _trainer(self, state: State) -> Steps:
        trainer, disk = state.trainer, state.disk
        save, step = trainer.last, trainer.step
        if trainer.stage == "idle" and len(state.saves) <= self.saves:
            yield from self._plan(state)
        elif trainer.stage == "planned":
            disk = disk.write(step, (save, disk.folders[step][1]))
            trainer = trainer._replace(stage="rank 0 wrote")
            yield f"rank 0 writes {save}", state._replace(disk=disk, trainer=trainer)
        elif trainer.stage == "rank 0 wrote":
            disk = disk.write(step, (save, save))
            trainer = trainer._replace(stage="all wrote")
            yield f"rank 1 writes {save}", state._replace(disk=disk, trainer=trainer)
        elif trainer.stage == "all wrote":
            trainer = trainer._replace(stage="idle", announced=True)
            disk = disk._replace(pointer=step)
            yield f"announce {save}", state._replace(disk=disk, trainer=trainer)

    def _plan(self, state: State) -> Steps:
        trainer, rules, new = state.trainer, self.rules, len(state.saves)
        steps = [trainer.step + 1] + [trainer.step] * (state.agains and trainer.last > 0)
        for step, nan, kind in product(steps, range(state.nans + 1), self.kinds):
            base, full = self._base(state, step) * (kind != "w"), kind != "d"
            is_last = new == self.saves and rules.close_is_full and not self.eager
            if kind == "d" and (is_last or not base):
                continue
            base_1 = base if rules.base_in_message else trainer.copy
            has_copy = trainer.copy == base_1 or not rules.whole_without_copy
            against = trainer.copy if base_1 and has_copy else 0
            save = Save(trainer.run, step, full, base, base_1, against, bool(nan))
            yield (
                f"plan {new}: step {step}{', full' * full}{f', a delta on {base}' * (base > 0)}",
                state._replace(
                    saves=(*state.saves, save),
                    trainer=Trainer(trainer.run, step, new, new, False, "planned"),
                    agains=state.agains - (step == trainer.step),
                    nans=state.nans - nan,
                ),
            )

    def _base(self, state: State, step: int) -> int:
        """The base of the next save; 0 if there is to be no delta."""
        trainer, rules, base = state.trainer, self.rules, state.saves[state.trainer.last]
        allowed = (
            trainer.announced or not rules.last_is_announced,
            any(d.place != "away" for d in state.daemons),
            not state.to("the trainer").disk.latest.no_deltas or not rules.not_stopped,
            step > base.step or not rules.above_base,
            not base.nan or base.base or not rules.finite_root,
        )
        return trainer.last if all(allowed) else 0

    # -- readers -----------------------------------------------------------------------------------

    def _reader(self, state: State, name: str, me: Reader) -> Iterator[tuple[str, Reader]]:
        rules, seen = self.rules, state.to(name)
        latest = seen.disk.latest
        sequence, save = me.goal
        if me.restarts:
            if latest.rollback > me.sequence and rules.drops_rolled_back:
                yield "drop its copy", me._replace(restarts=False, serves=0)
            elif not me.damaged or not rules.digests:
                yield f"serve {me.sequence} again", me._replace(restarts=False)
        if not sequence:
            goal = me.wants(latest)
            newer = goal[0] > me.sequence if rules.never_back else goal[0] != me.sequence
            version = state.version(latest.sequence)
            if newer and (me.stage or version):
                leases = (me.leases[0], version.sequence if version else 0)
                yield f"want {goal[0]}", me._replace(goal=goal, leases=leases)
            return
        back = me._replace(goal=(0, 0), leases=(me.leases[0], 0), restarts=False)
        if rules.gives_up:
            yield "give up", back._replace(restarts=me.restarts)
        version = state.version(me.leases[1])
        if version and rules.falls_back and version.sequence > me.sequence:
            held = 0 if me.stage else version.sequence
            whole = me._replace(sequence=version.sequence, serves=version.save, damaged=False)
            yield (
                f"serve v{version.sequence}",
                whole._replace(goal=(0, 0), leases=(held, 0), restarts=False),
            )
        if not me.stage or (latest.rollback > sequence and rules.looks_again):
            return
        ways = [("the tip", 0 if me.old else self.fetched(state, save))]
        if version and rules.falls_back:
            ways.append((f"v{version.sequence}", self.made(state, version.save, save)))
        if me.serves:
            made = self.made(state, me.serves, save)
            ways.append(("its copy", BAD if me.damaged and made and save != me.serves else made))
        for source, made in ways:
            if made and (made != BAD or not rules.digests):
                damaged = me.damaged and source == "its copy"
                now = back._replace(sequence=sequence, serves=made, damaged=damaged)
                yield f"serve {sequence} from {source}", now

    # -- faults ------------------------------------------------------------------------------------

    def _faults(self, state: State) -> Steps:
        trainer, disk = state.trainer, state.disk
        if trainer.stage != "dead":
            yield "kill trainer", state._replace(trainer=trainer._replace(stage="dead"))
        if trainer.stage in ("planned", "rank 0 wrote"):
            gone = disk.write(trainer.step, (0, 0))
            yield "rank fails", state._replace(disk=gone, trainer=trainer._replace(stage="idle"))
        if trainer.stage == "planned":
            last = state.saves[-1]
            saves = (*state.saves[:-1], last._replace(unfit=last.full))
            yield f"no merge of {trainer.last} succeeds", state._replace(saves=saves)
            older = trainer._replace(copy=trainer.last - 1)
            yield "copy of rank 1 is not kept", state._replace(trainer=older)
        yield from self._daemon_faults(state)
        for number, reader in enumerate(state.readers):
            after = _with_reader(state, number, reader._replace(damaged=True))
            yield f"damage to the copy of reader {number}", after
            if reader.stage and reader.serves:
                after = _with_reader(state, number, reader._replace(restarts=True))
                yield f"the engine of reader {number} restarts", after
        for delta in disk.deltas:
            deltas = (*disk.without(delta).deltas, delta._replace(files=BAD))
            after = state._replace(disk=disk._replace(deltas=tuple(sorted(deltas))))
            yield f"damage to d{delta.number}", after
        clients = ["the trainer", "the daemon", *(f"reader {n}" for n in range(len(state.readers)))]
        for client, records in product(clients, (True, False)):
            old = (client, records, Disk(Latest(), 0, (), ()).seen(records, disk), 0)
            text = f"stale {'records' if records else 'folders'} for {client}"
            yield text, state._replace(stale=old)
        for undone in product((False, True), repeat=len(disk.unsynced)):
            if disk.room < self.rooms:
                yield from self._power_loss(state, undone)

    def _daemon_faults(self, state: State) -> Steps:
        disk = state.disk
        for number, daemon in enumerate(state.daemons):
            if daemon.room == disk.room < self.rooms:
                yield f"kill daemon {number}", state.by(number, Daemon())
            if daemon.place == "naming":
                back = daemon.ready(daemon.latest, daemon.dirty)
                yield f"EIO for daemon {number}", state.by(number, back)
            if daemon.make.save:
                after = state.by(number, daemon._replace(make=Make()))
                yield f"kill the making child of daemon {number}", after
            if daemon.prepare.save:
                after = state.by(number, daemon._replace(prepare=Prepare()))
                yield f"kill the preparing child of daemon {number}", after
            if daemon.place == "ready":
                needed = self._needed(state, daemon._replace(make=Make()), [], fetched=False)
                for delta in set(disk.deltas) - needed:
                    if daemon.latest.newest()[0] >= delta.number:
                        me = daemon._replace(make=Make(), prepare=Prepare())
                        after = state.by(number, me, disk.sync("deltas").without(delta))
                        yield f"full disk: daemon {number} deletes d{delta.number}", after

    def _power_loss(self, state: State, undone: tuple[bool, ...]) -> Steps:
        """Some renames are undone; the trainer's host may live on.

        The number of a version that LATEST has not named is free again: nobody has leased it.
        """
        disk = state.disk
        for (_, what), is_undone in reversed([*zip(disk.unsynced, undone, strict=True)]):
            lost = disk._replace(latest=what) if isinstance(what, Latest) else disk.without(what)
            disk = lost if is_undone else disk
        lost = {version.sequence for version in {*state.disk.published} - {*disk.published}}
        free = {number for number in lost if number > state.disk.latest.newest()[0]}
        after = state._replace(
            named=tuple(save * (number not in free) for number, save in enumerate(state.named)),
            disk=disk._replace(unsynced=()),
            daemons=(Daemon(),) * 2,
            replaced=state.replaced if disk.latest == state.disk.latest else 0,
        )
        yield f"power loss undoes {sum(undone)} renames", after
        dead = state.trainer._replace(stage="dead")
        yield f"power loss, {sum(undone)}, and trainer killed", after._replace(trainer=dead)

    # -- the promises ------------------------------------------------------------------------------

    def violation(self, before: State, after: State) -> str | None:
        """Which promise a step breaks."""
        return next(self._broken(before, after), None)

    def _served(self, before: State, after: State) -> Iterator[str]:
        clients = [after.to(f"reader {number}") for number in range(len(after.readers))]
        for old, now, seen in zip(before.readers, after.readers, clients, strict=True):
            if now.serves == WRONG:
                yield "a delta is applied to another base than its own"
            if now.serves == BAD or after.saves[now.serves].nan:
                yield "a reader serves what no save has, or NaN"
            if now.sequence < old.sequence:
                yield "a reader goes back"
            if now.serves and after.named and after.named[now.sequence] != now.serves:
                yield f"{now.sequence} is {now.serves} for a reader, and another save in LATEST"
            loads = (old.sequence, old.restarts) != (now.sequence, now.restarts)
            knows = seen.disk.latest.sequence >= after.rolled > now.sequence
            is_tip = not after.version(now.sequence)
            if loads and knows and is_tip and not now.restarts and now.serves == after.replaced > 0:
                yield "a reader loads what people rolled back"
            if self._takes(before, after, now):
                yield "files are deleted that a reader fetches"
            if any(lease and not after.version(lease) for lease in now.leases):
                yield "a version is gone under a lease"

    def _broken(self, before: State, after: State) -> Iterator[str]:
        disk = after.disk
        if before.disk != disk or before.readers != after.readers:
            yield from self._served(before, after)
        if before.disk != disk:
            yield from self._wrong(before, after)
            yield from self._wrong_folders(before, after)
            if any(delta.files not in (delta.save, BAD) for delta in disk.deltas):
                yield "a delta has the files of another save"
        yield from self.unkept(before, after)
        if before.asked and not after.asked and before.disk.latest.tip and before.disk == disk:
            yield "a rollback of the tip is refused"
        if not any(delta.files == BAD for delta in disk.deltas):
            yield from self._lost(before, after)

    def _wrong(self, before: State, after: State) -> Iterator[str]:
        """What is wrong with LATEST, with published/, or with deltas/."""
        latest, was, disk = after.disk.latest, before.disk.latest, after.disk
        named, is_fault = after.version(latest.sequence), before.faults != after.faults
        is_old = not after.named
        if named is None or named.save != latest.save or latest.save < 0:
            yield f"LATEST names v{latest.sequence} = {latest.save}, which is not there"
        if latest.tip and latest.number <= latest.sequence:
            yield "the tip is not above LATEST"
        if latest.sequence < was.sequence and not is_fault:
            yield "LATEST goes back"
        old, new = was.newest(), latest.newest()
        is_back = latest.sequence == was.sequence and not latest.tip
        if new[0] <= old[0] and new != old and not (is_back or is_old or is_fault):
            yield f"readers of {old} do not follow LATEST to {new}"
        pointed = {before.pointed(), before.to("the daemon").pointed()}
        is_served = old[1] if pointed == {old[1]} and not is_old else None
        for version in set(disk.published).difference(before.disk.published):
            is_merge = version.sequence > was.number and not version.instead_of
            if is_merge and is_served not in (None, version.save):
                yield f"{version.save} is published while the pointer's save is served"
        for delta in {d[:2] for d in disk.deltas} - {d[:2] for d in before.disk.deltas}:
            if is_served not in (None, delta[1]):
                yield f"{delta[1]} becomes the tip while the pointer's save is served"
        is_older = new[0] > old[0] and new[1] < old[1] and not (latest.instead_of or is_old)
        if is_older and after.saves[old[1]].run == after.saves[new[1]].run == after.trainer.run:
            yield f"{new[1]} is served after {old[1]}, and no trainer has gone back"
        is_same = before.replaced == after.replaced
        replaced = {after.replaced * is_same, was.instead_of * (not is_fault)} - {0}
        if replaced & ({latest.save, latest.tip} - {was.save, was.tip}):
            yield "what people rolled back is published again"

    def _wrong_folders(self, before: State, after: State) -> Iterator[str]:
        """What is wrong with published/ or deltas/, or with what LATEST names there."""
        latest, was, disk = after.disk.latest, before.disk.latest, after.disk
        is_old = not after.named
        is_fault = before.faults != after.faults
        names = {(v.sequence, v.save) for v in disk.published} | {latest.newest()}
        if after.named and any(after.named[number] != save for number, save in names):
            yield "a number has two meanings"
        any_save = after._replace(disk=disk._replace(refused=0))
        root = self.lead(any_save, latest, latest.tip, latest.number + 1)
        changes = latest != was or disk.deltas != before.disk.deltas
        if latest.tip and root != latest.root and changes and not (is_old and latest == was):
            yield f"nothing leads to the tip {latest.tip}, or not its root"
        refused = disk.refused * (disk.refused != before.disk.refused)
        if refused and not after.saves[refused].unfit and after.written(refused):
            yield f"{refused} is refused, although it can be merged"
        numbers = {d.number for d in before.disk.deltas} - {d.number for d in disk.deltas}
        makes = {d.make.sequence for d in after.daemons if d.make.of_tip}
        if numbers & makes and not (is_fault or is_old):
            yield "files are deleted that a version is made of"

    def _lost(self, before: State, after: State) -> Iterator[str]:
        """Whether a save is announced of which there is too little, or a step takes it away."""
        new, stage = after.trainer.last, before.trainer.stage
        if any(save.unfit for save in after.saves):
            return
        announces = after.trainer.announced > before.trainer.announced
        if announces and not after.saves[new].nan and not self.available(after, new):
            yield f"{new} is announced, and cannot be made from what is there"
        # The trainer writes over saves of the same step, as always, also those of an earlier run.
        writes = after.trainer != before.trainer and stage not in ("idle", "dead")
        if writes:
            return
        if before.disk[2:5] == after.disk[2:5]:  # folders, versions, deltas
            return
        makes = {d.make.save for d in after.daemons if not d.make.base and not d.make.is_done}
        is_old = not after.named  # it deletes whole tips
        tip = 0 if is_old else before.disk.latest.tip
        for save in {before.pointed(), tip, *makes} - {0}:
            if self.available(before, save) and not self.available(after, save):
                yield f"{save}, which is announced, is lost"

    def served(self, state: State) -> bool:
        """Whether every reader serves the last save, and nobody has more to do."""
        latest, save, trainer = state.disk.latest, state.pointed(), state.trainer
        if state.asked or state.disk.aside[0] or trainer.stage not in ("idle", "dead"):
            return False
        if not save:
            return True
        alive = trainer.stage == "idle"
        if self.eager and alive and not self._base(state, trainer.step + 1):
            return True  # the next save will be full, and heals all
        if latest.tip and not latest.no_deltas:
            return False  # a version is still to be made
        is_settled = self._is_settled(state, save)
        return (is_settled or save == latest.newest()[1]) and all(
            reader.serves == save
            and reader.sequence == reader.wants(latest)[0]
            and not reader.restarts
            if not is_settled
            else reader.serves and reader.sequence >= latest.sequence
            for reader in state.readers
        )

    def _is_settled(self, state: State, save: int) -> bool:
        """Whether a save is never to be served."""
        found, disk = state.saves[save], state.disk
        on_version = found.base and not self.lead(state, disk.latest, found.base)
        if found.nan or save in (disk.latest.instead_of, disk.refused):
            return True
        if found.full:
            return found.unfit and found.base > 0
        is_root_nan = state.saves[found.base].nan
        return bool(disk.latest.instead_of and on_version) or (
            not is_root_nan and self._is_settled(state, found.base)
        )

    def _takes(self, before: State, after: State, reader: Reader) -> bool:
        """Whether a new daemon deletes what a reader fetches."""
        if not reader.goal[0] or reader.old or not reader.stage or after.faults < before.faults:
            return False
        old = not after.named
        save = reader.goal[1]
        return not old and self.fetched(before, save) > 0 and not self.fetched(after, save)


def _named(state: State) -> tuple[int, ...]:
    latest, named = state.disk.latest, [*state.named]
    versions = ((version.sequence, version.save) for version in state.disk.published)
    for number, save in (*versions, (latest.number, latest.tip)):
        named += [0] * (number + 1 - len(named))
        named[number] = named[number] or save
    return tuple(named)


def _with_reader(state: State, number: int, reader: Reader) -> State:
    readers = (*state.readers[:number], reader, *state.readers[number + 1 :])
    return state._replace(readers=readers)
