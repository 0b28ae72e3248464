"""Trainers, daemons, explorers and a pruner, interleaved at storage calls in every drawn order.

Two daemons and a pruner all believe to be active: nothing but the fence keeps them apart. What must
hold is asked after every call that could break it, and at the end a restart must converge.

``SYNCD_DEEP=1`` draws far more.
"""

import os
import struct
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    precondition,
    rule,
    run_state_machine_as_test,
)

from syncd.checkpoint.save import look_at_save
from syncd.checkpoint.version import read_manifest, verify_version
from syncd.daemon.decide import PruneStep
from syncd.daemon.loop import Loop
from syncd.daemon.prune import Pruner
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import (
    FULL,
    RETIRED,
    SAVING,
    TEMPORARY,
    is_resumable_state,
    parse_pointer,
    parse_step_folder,
    parse_version_folder,
)
from syncd.protocol.records import SaveId
from syncd.storage.epoch import Epoch
from tests.crash.actors import (
    REST,
    Actor,
    Call,
    Order,
    Rules,
    Run,
    Sessions,
    config,
    daemon,
    deterministic,
    explorer,
    follower,
    pruner,
)
from tests.crash.invariants import check_delta, latest_sequence, leftovers, restart, serve, versions
from tests.jobs import SmallJob
from tests.storages import Clock, FastStorage

RANKS = ("rank 0", "rank 1")
#: A save that nobody disturbs; rank 0 waits for rank 1.
SAVING_ORDER = ("rank 1", "rank 0", "rank 1", "rank 0")
DAEMONS = ("daemon A", "daemon B")
EXPLORERS = ("explorer-1", "explorer-2")
WORKERS = (*DAEMONS, "pruner", "follower", *EXPLORERS)
ACTORS = (*RANKS, *WORKERS)
#: What may happen while somebody stands still.
MEANWHILE = (
    *ACTORS,
    *DAEMONS,
    "save",
    "save again",
    "full save",
    "roll back",
    "resume and save",
    "resume and begin",
    "time",
)
#: After these something may be missing, or another thing be there.
_HARMFUL = {"rename", "rmdir", "unlink", "link"}
#: What others may see the difference of.
_CHANGES = {*_HARMFUL, "mkdir", "create"}
#: A guard against an actor that never rests.
_MOST_CALLS = 5000
_SHOWN = 200

#: Path in the folder → inode, size and mtime.
Tree = dict[str, tuple[int, int, int]]


#: Paths in a folder, and their inodes.
Files = set[tuple[str, int]]


def tree(folder: Path) -> Tree:
    """Every file below a folder."""
    found: Tree = {}
    pending = [(folder, "")]
    while pending:
        path, prefix = pending.pop()
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    pending.append((path / entry.name, f"{prefix}{entry.name}/"))
                else:
                    status = entry.stat(follow_symlinks=False)
                    key = (status.st_ino, status.st_size, status.st_mtime_ns)
                    found[f"{prefix}{entry.name}"] = key
    return found


def pointed(path: Path) -> int | None:
    return parse_pointer(path.read_bytes()) if path.exists() else None


@dataclass
class Promises:
    """What must hold at every moment; each look also remembers what the next one compares with.

    Attributes:
        layout: the job.
        sessions: the explorers' heartbeats.
        orders: step → the last save that was ordered there, by a trainer that was not killed.
        values: save_id → what every weight of that save is.
    """

    layout: JobLayout
    sessions: Sessions
    orders: dict[int, Order]
    values: dict[str, float]
    _sequence: int = 0
    _versions: dict[int, Tree] = field(default_factory=dict)
    _touches_steps: bool = False
    _safe: dict[int, Files] = field(default_factory=dict)
    _deltas: Files = field(default_factory=set)

    def before(self, call: Call) -> None:
        """Note what a call of anybody but the trainer must leave where it is."""
        self._touches_steps = any(map(self._is_of_a_step, call.paths()))
        self._safe = self._needed() if self._touches_steps else {}

    def after(self) -> None:
        """Look whether the call did any harm."""
        if self._touches_steps:
            for step, needed in self._safe.items():
                lost = needed - self._files(step)
                assert not lost, f"step {step} lost {sorted(lost)}"
        self.check()

    def check(self) -> None:
        """Look at all that daemons have committed."""
        found = self._check_versions()
        self._check_latest(found)
        for delta in self.layout.deltas.glob("d*"):  # none where there is no such folder
            if (known := (delta.name, delta.stat().st_ino)) not in self._deltas:
                self._deltas.add(known)
                check_delta(delta, lambda made: self.values[made.save_id])
                COUNTED["tips"] += 1
        self._check_leases(found)
        assert not any(self.layout.quarantine.iterdir()), "a save was quarantined"

    def served(self) -> set[int | None]:
        """The steps that the pointers name."""
        return {pointed(self.layout.state_pointer), pointed(self.layout.checkpoint_pointer)}

    def _check_versions(self) -> set[int]:
        """What was committed never changes, and goes in one piece."""
        found = set()
        for folder in versions(self.layout):
            sequence = parse_version_folder(folder.name) or 0
            found.add(sequence)
            now = tree(folder)
            if sequence not in self._versions:
                self._check_new_version(folder, sequence)
                self._versions[sequence] = now
            assert now == self._versions[sequence], f"{folder.name} changed"
        return found

    def _check_new_version(self, folder: Path, sequence: int) -> None:
        """It is whole, above all others, and of one save only."""
        assert sequence > max(self._versions, default=0), f"{folder.name} is not a new number"
        manifest = read_manifest(FastStorage(), folder)
        verify_version(FastStorage(), folder, manifest)
        value = self.values[manifest.save_id]
        weights = (folder / "model.safetensors").read_bytes()
        assert weights.endswith(struct.pack("<3f", *[value] * 3)), f"of another save than {value}"
        assert (folder / "config.json").read_text() == config(value), "config of another save"

    def _check_latest(self, found: set[int]) -> None:
        sequence = latest_sequence(self.layout)
        assert sequence >= self._sequence, "LATEST went back"
        self._sequence = sequence
        if sequence:
            assert sequence in found, "LATEST names no version"
            assert self.layout.lease_folder(sequence).is_dir(), "LATEST cannot be leased"

    def _check_leases(self, found: set[int]) -> None:
        living = self.sessions.living()
        for lease in self.layout.leases.glob("*/*"):
            sequence = parse_version_folder(lease.parent.name)
            if lease.name.partition(".")[2] in living and sequence in self._versions:
                assert sequence in found, f"{lease.parent.name} went, and {lease.name} held it"

    def _is_of_a_step(self, path: Path) -> bool:
        where = path.relative_to(self.layout.root).parts
        return parse_step_folder(where[0]) is not None or "trash" in where

    def _needed(self) -> dict[int, Files]:
        """Step → the files of it that nobody but its trainer may take away.

        Those of a folder that can be resumed from; and what the ranks have written of a save that
        is in progress, or that a pointer names.
        """
        needed = defaultdict(set)
        for step, folder in self._step_folders():
            files = inodes(folder)
            if is_resumable(name for name, _ in files):
                needed[step] |= files
            order = self.orders.get(step)
            if order is not None and (order.in_progress or step in self.served()):
                needed[step] |= files & set(order.written.items())
        return needed

    def _files(self, step: int) -> Files:
        """What there is of a step. It may be in a trash for a while: from there it is put back."""
        folders = [folder for found, folder in self._step_folders() if found == step]
        return set().union(*map(inodes, folders))

    def _step_folders(self) -> list[tuple[int, Path]]:
        homes = [self.layout.root, *self.layout.epochs.glob("*/trash")]
        found = [
            (parse_step_folder(name.partition("-")[0]), home / name)
            for home in homes
            for name in os.listdir(home)
        ]
        return [(step, path) for step, path in found if step is not None]


def inodes(folder: Path) -> Files:
    """The files of a step folder that count, and their inodes."""
    return {
        (name, key[0]) for name, key in tree(folder).items() if _counts(name.rpartition("/")[2])
    }


def _counts(name: str) -> bool:
    return name != SAVING and not name.startswith(TEMPORARY)


def is_resumable(files: Iterable[str]) -> bool:
    """Whether a step folder's files say that it can be resumed from, and must stay."""
    names = {name.rpartition("/")[2] for name in files}
    return FULL in names or (RETIRED not in names and any(map(is_resumable_state, names)))


class World:
    """A job and everybody in it, and whatever they did so far.

    Args:
        root: an empty folder.
        rules: how its daemons work.
    """

    def __init__(self, root: Path, rules: Rules) -> None:
        self.job = SmallJob(root, FastStorage())
        self.layout = self.job.layout
        self._keep_no_reserve()
        self.clock = Clock()
        self.sessions = Sessions(self.layout)
        self.calls = 0
        self.trace: list[str] = []
        self._served: dict[str, list[int]] = {name: [] for name in EXPLORERS}
        self._runs = 0
        self._full: list[int] = []
        self._values: dict[str, float] = {}
        self._orders: dict[int, Order] = {}
        self.promises = Promises(self.layout, self.sessions, self._orders, self._values)
        self.actors: dict[str, Actor] = {}
        self._renamed: int | None = None
        self._rules = rules
        self._patched = ExitStack()
        self._patched.enter_context(deterministic(self.sessions))
        self.run = Run(self.layout, 0, self._full)
        for name in WORKERS:
            self.start(name)
        self.to_rest("follower")  # its report is there before the first save
        self.start_trainer()

    def _keep_no_reserve(self) -> None:
        self.layout.reserve.mkdir()
        for number in range(16):
            (self.layout.reserve / f"{number:02}").touch()

    # -- who there is ----------------------------------------------------------------------------

    def start(self, name: str) -> None:
        """Start an actor that is not a rank."""
        if name in DAEMONS:
            work = daemon(self._take_over, self.layout)
        elif name in EXPLORERS:
            work = explorer(name, self.layout, self.sessions, self._served[name])
        elif name == "follower":
            work = follower(self.layout, self.sessions, self._values)
        else:
            work = pruner(self._take_over, self.layout)
        self.actors[name] = Actor(name, work, self)

    def _take_over(self, actor: Actor, publishes: bool) -> Loop:
        return self._rules.begin(actor, self.layout, self.clock, publishes=publishes)

    def start_trainer(self) -> None:
        """Another run, of new processes."""
        for name in RANKS:
            self.kill(name)
        self._runs += 1
        self.run = Run(self.layout, self._runs, self._full)
        for rank, name in enumerate(RANKS):
            self.actors[name] = Actor(name, self.run.work_of(rank), self)

    def kill(self, name: str) -> None:
        """``kill -9``."""
        if name in self.actors:
            self.trace.append(f"{name} is killed")
            self.actors[name].kill()
            self.sessions.end(name)
            if name in RANKS:
                self.run.fail("a rank was killed")

    def order(self, step: int, *, full: bool, retires: bool) -> None:
        """Let the trainer save a step."""
        order = Order(
            SaveId(self.run.id, step, len(self.run.orders)),
            value=float(len(self._values) + 1),
            full=full,
            retires=retires,
        )
        self.trace.append(f"the trainer saves {order.save_id}{' in full' if full else ''}")
        self._values[str(order.save_id)] = order.value
        if step in self.promises.served() and step in self._orders:
            order.written.update(self._orders[step].written)
        self.run.orders.append(order)
        self._orders[step] = order

    # -- going on --------------------------------------------------------------------------------

    def before(self, actor: Actor, call: Call) -> None:
        if call.method == REST:
            return
        self.calls += 1
        self._renamed = _inode(call.given[0]) if call.method == "rename" else None
        if call.method in _CHANGES:
            self.trace.append(f"{actor.name}: {call.says(self.layout.root)}")

        if call.method in _HARMFUL and actor.name not in RANKS:
            self.promises.before(call)

    def after(self, actor: Actor, call: Call) -> None:
        if call.method not in _HARMFUL:
            return
        if actor.name not in RANKS:
            self.promises.after()
        elif self._renamed and _inode(call.given[1]) == self._renamed:
            self._note_written(call.given[1], self._renamed)

    def _note_written(self, path: Path, inode: int | None) -> None:
        where = path.relative_to(self.layout.root)
        step = parse_step_folder(where.parts[0])
        if step in self._orders and inode is not None:
            self._orders[step].written[str(Path(*where.parts[1:]))] = inode

    def go_on(self, name: str, calls: int = 1) -> None:
        """Let an actor do some calls; fewer where it rests before."""
        self.until(name, lambda _: True, times=calls)

    def until(self, name: str, reached: Callable[[Call], bool], times: int = 1) -> None:
        """Let an actor go on until it is about to do something for a number of times, or rests."""
        count = calls = 0

        def enough(call: Call) -> bool:
            nonlocal count, calls
            calls += 1
            assert calls < _MOST_CALLS, f"{name} never comes to rest"
            count += reached(call)
            return count == times

        try:
            self.actors[name].go_on(enough)
        except BaseException as error:
            raise AssertionError(f"{name}: {error!r}") from error

    def to_rest(self, *names: str) -> None:
        for name in names:
            self.until(name, lambda _: False)

    def save_in_peace(self, step: int, *, full: bool = False) -> None:
        """Let the trainer save a step, and nobody disturb it."""
        self.to_rest(*RANKS)
        self.order(step, full=full, retires=full)
        self.to_rest(*SAVING_ORDER)
        assert pointed(self.layout.state_pointer) == step, f"not announced: {self.run.failed}"

    def pass_time(self, seconds: float) -> None:
        """Let time pass, in which who lives gives a sign of it."""
        self.trace.append(f"{seconds:g} s pass")
        self.sessions.beat()
        self.clock.advance(seconds)
        self.sessions.beat()

    # -- the end ---------------------------------------------------------------------------------

    def end(self) -> None:
        """All are gone; one daemon, and then another trainer, must get the job to rest."""
        for name in ACTORS:
            self.kill(name)
        self._restart(rounds=24)
        self._check_served()
        step = max([0, *self._orders]) + 1
        self.start_trainer()
        self.save_in_peace(step)
        self._restart(rounds=6)
        self._check_served()
        assert self.job.latest.step == step
        left = [path.name for path in self.layout.root.iterdir() if self._is_in_the_way(path)]
        assert not left, f"nobody needs {left}"

    def _restart(self, *, rounds: int) -> None:
        restart(self.job, self.clock, rounds=rounds)
        self.promises.check()

    def _check_served(self) -> None:
        layout = self.layout
        step = pointed(layout.state_pointer)
        if step is not None:
            save = look_at_save(FastStorage(), layout.actor(step), step)
            assert save.identity in {None, self._served_save()}, "the pointed save is not served"
        assert leftovers(self.job) == []
        names = [path.name for path in versions(layout)]
        assert names in ([], [f"v{latest_sequence(layout):06}"]), names
        assert not layout.deltas.exists() or not os.listdir(layout.deltas)
        assert [path.name for path in layout.leases.iterdir()] == names
        assert not list(layout.leases.glob("*/*"))
        serve(self.job)

    def _served_save(self) -> str | None:
        sequence = latest_sequence(self.layout)
        if not sequence:
            return None
        return read_manifest(FastStorage(), self.layout.version(sequence)).settles

    def _is_in_the_way(self, path: Path) -> bool:
        """Whether a daemon should have deleted a step folder."""
        step = parse_step_folder(path.name)
        if step is None or (path / SAVING).exists():
            return False
        checkpoint = pointed(self.layout.checkpoint_pointer)
        named = {checkpoint, pointed(self.layout.state_pointer)}
        retired = (path / RETIRED).exists() and (checkpoint is None or checkpoint < step)
        whole = look_at_save(FastStorage(), path / "actor", step).identity is not None
        return whole and step not in named and not retired and not is_resumable(tree(path))

    def close(self) -> None:
        """Kill everybody."""
        for actor in self.actors.values():
            actor.kill()
        self._patched.close()


def _inode(path: Path) -> int | None:
    try:
        return path.lstat().st_ino
    except OSError:
        return None


def machine(rules: Rules) -> type[RuleBasedStateMachine]:
    """The moves by which a world goes on."""

    class Interleaved(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.folder = tempfile.TemporaryDirectory(dir=_QUICK if os.path.isdir(_QUICK) else None)
            self.world = World(Path(self.folder.name) / "job", rules)
            self.step = 0
            self.failed = False

        @rule(who=st.sampled_from(ACTORS), calls=st.integers(1, 8))
        def goes_on(self, who: str, calls: int) -> None:
            self.try_to(self.world.go_on, who, calls)

        @rule(who=st.sampled_from(ACTORS), times=st.integers(1, 4))
        def goes_on_to_its_next_change(self, who: str, times: int) -> None:
            self.try_to(self.world.until, who, changes, times)

        @rule(
            who=st.sampled_from((*DAEMONS, *DAEMONS, *ACTORS)),
            moment=st.integers(1, 6),
            meanwhile=st.lists(st.sampled_from(MEANWHILE), min_size=1, max_size=4),
            part=st.integers(1, 20),
            goes_on=st.booleans(),
        )
        def is_interrupted(
            self, who: str, moment: int, meanwhile: list[str], part: int, goes_on: bool
        ) -> None:
            """Most faults need no more than this: one stands still while others go on."""
            self.try_to(self.world.until, who, matters, moment)
            for what in meanwhile:
                self.does(what, part=part)
            if goes_on:
                self.try_to(self.world.to_rest, who)

        @rule(who=st.sampled_from((*ACTORS, *DAEMONS)))
        def goes_on_until_it_rests(self, who: str) -> None:
            self.try_to(self.world.to_rest, who)

        @precondition(lambda self: self.world.run.takes_orders)
        @rule(full=st.booleans(), retires=st.booleans(), again=st.booleans())
        def trainer_saves(self, full: bool, retires: bool, again: bool) -> None:
            self.step = max(1, self.step if again else self.step + 1)
            self.world.order(self.step, full=full, retires=retires)

        @precondition(lambda self: self.world.run.takes_orders)
        @rule(full=st.booleans(), count=st.integers(1, 3))
        def trainer_saves_in_peace(self, full: bool, count: int) -> None:
            for _ in range(count):
                self.step += 1
                self.world.order(self.step, full=full, retires=True)
                self.try_to(self.world.to_rest, *SAVING_ORDER)

        @precondition(lambda self: self.world.run.takes_orders)
        @rule(who=st.sampled_from(DAEMONS), moment=st.integers(1, 8))
        def whole_tip_comes(self, who: str, moment: int) -> None:
            for name in ("follower", who, who):
                self.world.pass_time(1)
                self.try_to(self.world.to_rest, name)
            self.trainer_saves_in_peace(full=False, count=1)
            self.try_to(self.world.until, who, matters, moment)

        @rule(back=st.integers(0, 3))
        def trainer_resumes(self, back: int) -> None:
            self.world.start_trainer()
            self.step = max(0, self.step - back)

        @rule(who=st.sampled_from(ACTORS), how=st.sampled_from(("kill", "stop", "silence")))
        def ends(self, who: str, how: str) -> None:
            if how == "kill" or who in RANKS or who == "pruner":
                self.world.kill(who)
                if who in WORKERS:
                    self.world.start(who)
            elif how == "stop" or who in DAEMONS:
                self.world.actors[who].asked_to_stop = True
            else:
                self.world.sessions.end(who)  # a process whose heartbeat alone has stopped

        @rule(
            who=st.sampled_from(DAEMONS), times=st.integers(1, 6), seconds=st.sampled_from((1, 10))
        )
        def watches(self, who: str, times: int, seconds: int) -> None:
            for _ in range(times):
                self.world.pass_time(seconds)
                self.try_to(self.world.to_rest, who)

        def does(self, what: str, *, part: int) -> None:
            if what == "time":
                self.world.pass_time(10)
                return
            if what == "roll back":
                if there := versions(self.world.layout):
                    self.world.job.ask_rollback(parse_version_folder(min(there).name) or 0)
                return
            if what in self.world.actors:
                self.try_to(self.world.to_rest, what)
                return
            if "resume" in what:
                self.trainer_resumes(back=2)
                self.try_to(self.world.to_rest, *RANKS)
            if self.world.run.takes_orders:
                self.trainer_saves(what == "full save", True, what == "save again")
                if "begin" in what:
                    self.try_to(self.world.until, RANKS[part % 2], changes, part)
                else:
                    self.try_to(self.world.to_rest, *SAVING_ORDER)

        def try_to(self, act: Callable[..., object], *given: object) -> None:
            """Do something; where a promise is broken, the trace says how."""
            try:
                act(*given)
            except BaseException as error:
                self.failed = True
                error.add_note("\n".join(self.world.trace[-_SHOWN:]))
                raise

        def teardown(self) -> None:
            COUNTED["worlds"] += 1
            try:
                if not self.failed:
                    self.try_to(self.world.end)
            finally:
                COUNTED["calls"] += self.world.calls
                self.world.close()
                self.folder.cleanup()

    return Interleaved


#: In memory, where there is room for it.
_QUICK = "/dev/shm"  # noqa: S108 - the folder in it has a name of its own
#: What the search has done, for whoever wants to know.
COUNTED = Counter[str]()


def changes(call: Call) -> bool:
    return call.method in _CHANGES


def matters(call: Call) -> bool:
    """Whether a call commits something, or takes it away, or holds it."""
    paths = [str(path) for path in call.paths()]
    if call.method == "create":
        return "/leases/" in paths[0]
    if call.method in {"unlink", "rmdir"}:
        return not any(room in paths[0] for room in ("/doomed/", "/building/", "/.tmp-"))
    return call.method in _HARMFUL and not paths[-1].endswith(("daemon.json", "publish.lock"))


def search(rules: Rules, **more: Any) -> None:
    """Draw moves, and let the world go on by them."""
    run_state_machine_as_test(
        machine(rules),
        settings=settings(
            stateful_step_count=60,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
            **more,
        ),
    )


def test_every_promise_holds_however_they_are_interleaved() -> None:
    COUNTED.clear()
    search(Rules(), max_examples=800 if "SYNCD_DEEP" in os.environ else 15)
    print(f"{COUNTED['worlds']} worlds, {COUNTED['calls']} calls, {COUNTED['tips']} tips")


# -- can it fail? --------------------------------------------------------------------------------


class LeavesRoomsOpen(Epoch):
    """A take-over that does not empty the rooms below it."""

    def _close_room(self, room: Path) -> None: ...


class LooksOnce(Pruner):
    """Deletes a step folder as it was decided on, whatever it is by now."""

    def prune_step(self, action: PruneStep) -> bool:
        trash = self.epoch.set_aside(self.job.layout.step(action.seen.step))
        self.job.storage.remove_tree(self.epoch.condemn(trash))
        return True


def renames_to(where: str) -> Callable[[Call], bool]:
    return lambda call: call.method == "rename" and where in str(call.given[1])


def test_the_drawn_moves_find_a_take_over_that_leaves_rooms_open() -> None:
    with pytest.raises(AssertionError):
        search(
            Rules(epoch=LeavesRoomsOpen),
            max_examples=60,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
        )


@pytest.mark.parametrize("epoch", [Epoch, LeavesRoomsOpen])
def test_a_superseded_daemon_moves_latest_back_only_where_its_room_was_left_open(
    tmp_path: Path, epoch: type[Epoch]
) -> None:
    with closing(World(tmp_path / "job", Rules(epoch=epoch))) as world:
        world.save_in_peace(1)
        world.until("daemon A", renames_to("LATEST"))
        world.to_rest("daemon B")
        assert world.job.latest.sequence == 1
        world.save_in_peace(2)
        world.to_rest("daemon B")
        assert world.job.latest.sequence == 2
        with ExitStack() as stack:
            if epoch is LeavesRoomsOpen:
                stack.enter_context(pytest.raises(AssertionError, match="LATEST went back"))
            world.to_rest("daemon A")
            world.end()


@pytest.mark.parametrize("pruner", [Pruner, LooksOnce])
def test_a_step_that_is_saved_again_while_it_is_pruned_is_lost_only_where_nobody_looks_again(
    tmp_path: Path, pruner: type[Pruner]
) -> None:
    with closing(World(tmp_path / "job", Rules(pruner=pruner))) as world:
        world.save_in_peace(1)
        world.to_rest("daemon A")
        world.save_in_peace(2)
        world.until("daemon A", renames_to("trash/global_step_1"))
        assert world.actors["daemon A"].next.method == "rename"
        world.start_trainer()
        world.save_in_peace(1)
        with ExitStack() as stack:
            if pruner is LooksOnce:
                stack.enter_context(pytest.raises(AssertionError, match="step 1 lost"))
            world.to_rest("daemon A")
            world.end()


# -- what was found ------------------------------------------------------------------------------


def test_a_step_that_was_saved_again_and_passed_is_pruned_too(tmp_path: Path) -> None:
    with closing(World(tmp_path / "job", Rules())) as world:
        world.save_in_peace(1)
        world.to_rest("daemon A")
        world.start_trainer()
        world.save_in_peace(1)
        world.save_in_peace(2)
        world.end()
