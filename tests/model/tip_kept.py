"""Who keeps what the daemons of the model (tip.py) prune: people by pins, explorers by benches.

A step folder is pruned in three steps: it is set aside in trash/, looked at once more, and deleted.
Without pins and benches (`keeps`) these are one. At its decision a daemon knows of none: what it
has read may be old. A file of a pin may come into the folder that was opened before it was moved,
or into the lease folder of a version that is not there yet. A bench builds only what can be merged;
for a version it takes a lease (lease.py), and so does a pin.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from .tip_state import Bench, Daemon, Pin, PinAt, State
from .tip_ways import Ways

Step: TypeAlias = tuple[str, State]
Steps: TypeAlias = Iterator[Step]


@dataclass(frozen=True)
class Kept(Ways):
    """What people and a bench do next, and how a daemon prunes a step."""

    def people(self, state: State) -> Steps:
        """Pin something, once."""
        pin, disk = state.pin, state.disk
        is_there = pin.at == "step" or state.version(pin.number * (pin.at == "leases"))
        if pin.is_sure:
            return
        if pin.number:
            if is_there or not self.rules.pin_looks_again:
                yield f"{pin.number} is pinned", state._replace(pin=pin._replace(is_sure=True))
            elif pin.at != "trash":  # else people look once more
                yield f"there is no {pin.number} to pin", state._replace(pin=Pin())
            return
        pins = [Pin(disk.aside[0], "trash")] * (disk.aside[0] > 0)
        pins += (Pin(step, "step") for step, parts in enumerate(disk.folders) if any(parts))
        pins *= "s" in self.keeps
        if "v" in self.keeps:
            numbers = {version.sequence for version in disk.published}
            numbers.update(daemon.make.sequence for daemon in state.daemons)
            pins += (Pin(number, "leases") for number in sorted(numbers - {0}))
        for pin in pins:
            yield f"pin {pin.number} in {pin.at}", state._replace(pin=pin)

    def bench(self, state: State) -> Steps:
        """Look at a step, keep it, read it rank by rank, and check what was read."""
        me, rules, folders = state.bench, self.rules, state.disk.folders
        if not me.save:
            saves = {first for first, _ in folders} if "b" in self.keeps else set[int]()
            for save in sorted(saves):
                if state.written(save) and state.saves[save].full:
                    yield f"a bench sees {save}", state._replace(bench=Bench(save))
            return
        rank = int(me.parts[0] > 0)
        found = folders[state.saves[me.save].step][rank]
        text, now = "the bench begins again", Bench()
        if not me.pins and (rank or rules.pins_before_reading):
            text, now = "the bench keeps its step", me._replace(pins=True)
        elif me.is_built:
            text = "the bench ends"
        elif found and not me.parts[1]:
            now = me._replace(parts=(me.parts[0] or found, found * rank))
            text = f"the bench reads {found} of rank {rank}"
        elif me.parts == (me.save, me.save) or (me.parts[1] and not rules.builds_one_save):
            text, now = f"the bench has {me.save}", me._replace(is_built=True)
        yield text, state._replace(bench=now)

    def set_aside(self, state: State, number: int, step: int) -> Step:
        """Begin to prune a step."""
        disk, files = state.disk.write(step, (0, 0)), state.disk.folders[step]
        if self.keeps:
            me = state.daemons[number]._replace(place="set aside")
            disk = disk._replace(aside=(step, files))
            state = _with_pin(state.by(number, me), step, "step", "trash")
        return f"prune step {step}", state._replace(disk=disk)

    def prune(self, state: State, number: int, me: Daemon) -> Step:
        """Look into trash/; then delete what is there."""
        (step, _), rules, bench = state.disk.aside, self.rules, state.bench
        ready = state.by(number, me.ready(me.latest))
        if me.place == "looked":
            ready = ready._replace(disk=ready.disk._replace(aside=(0, (0, 0))))
            return f"delete step {step}", _with_pin(ready, step, "trash", "")
        is_pinned = state.pin.at == "trash" and rules.pins_count
        is_benched = bench.pins and state.saves[bench.save].step == step and rules.benches_count
        if is_pinned or is_benched:
            return f"put step {step} back", self.put_back(ready)
        return f"look at step {step}", state.by(number, me._replace(place="looked"))

    def put_back(self, state: State) -> State:
        """Empty trash/; what the trainer has written meanwhile stays."""
        step, files = state.disk.aside
        now = state.disk.folders[step]
        disk = state.disk.write(step, (now[0] or files[0], now[1] or files[1]))
        state = state._replace(disk=disk._replace(aside=(0, (0, 0))))
        return _with_pin(state, step, "trash", "step")

    def unkept(self, before: State, after: State) -> Iterator[str]:
        """What is deleted although somebody keeps it, or is no save's."""
        pin, bench, (step, parts) = after.pin, after.bench, before.disk.aside
        is_there = pin.at != "leases" or after.version(pin.number)
        if pin.is_sure and not (pin.at and is_there):
            yield f"{pin.number} is pinned, and is not there"
        is_gone = step and not after.disk.aside[0] and not any(after.disk.folders[step])
        if is_gone and bench.pins and bench.parts[0] == parts[0]:
            yield f"step {step} is deleted, and a bench reads it"
        if bench.is_built and set(bench.parts) != {bench.save}:
            yield "a bench has what no save has"


def _with_pin(state: State, step: int, old: PinAt, new: PinAt) -> State:
    """Move the pin with the folder of a step."""
    pin = state.pin
    return state._replace(pin=pin._replace(at=new)) if pin[:2] == (step, old) else state
