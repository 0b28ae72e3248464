"""Power loss at every call that changes storage: what was not synced is gone, or not, by chance."""

import os
import random
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

from syncd.protocol.names import (
    CHECKPOINT_POINTER,
    FULL,
    RECEIPTS,
    SAVING,
    STATE_POINTER,
    TEMPORARY,
    delta_folder,
    parse_delta_folder,
    parse_pointer,
    parse_step_folder,
    parse_version_folder,
    version_folder,
)
from syncd.protocol.records import Latest, parse
from tests.crash.invariants import (
    Files,
    Seen,
    check,
    check_converged,
    look,
    restart,
    serve,
    stand_by,
)
from tests.crash.power import (
    Disk,
    Forgotten,
    Killed,
    Loss,
    RecordingStorage,
    Watch,
    dropped,
    losses,
    none_forgotten,
)
from tests.crash.scenarios import SCENARIOS, Scenario, dirty, published, rounds
from tests.jobs import SmallJob
from tests.storages import Clock

_DEEP = "SYNCD_DEEP" in os.environ
#: Between the two extremes of each moment, so many by chance.
_BY_CHANCE = 6 if _DEEP else 1
#: States of each scenario that are made real and restarted from; all of them where it is deep.
_RESTARTS = 6
#: Kills of each scenario at most; as many as it syncs folders where it is deep.
_KILLS = 7
#: No process has such a number.
_NOBODY = b"pid=4194305"
_ROOM = r"\.syncd/epoch/[^/]+"


def is_heartbeat(path: Path) -> bool:
    """Whether filelock makes it, past the seam."""
    return path.parent.name == "sessions" or path.name.startswith("daemon.lock")


@cache
def is_committed(path: str) -> bool:
    """Whether a file under this name never changes: it is replaced, or removed, as a whole.

    ``publish.lock`` is, while there is power; it is a hint, and not synced.
    """
    name = path.rpartition("/")[2]
    return not (
        name.startswith(TEMPORARY)
        or name in {"audit.jsonl", "journal.jsonl", "publish.lock"}
        or is_heartbeat(Path(path))
        or re.match(rf"{_ROOM}/|\.syncd/(bench|reserve)/", path)
    )


def vouched(disk: Disk, folder: Path) -> Files:
    """The files of a folder as processes see them; marks and temporaries are nothing to keep."""
    return {
        name: content
        for name, (_, content) in disk.below(folder).items()
        if content is not None
        and not Path(name).name.startswith((TEMPORARY, SAVING, "failed_rank_"))
    }


@dataclass
class Witness:
    """What was announced, as it was in memory at that moment, by the inode that announces it."""

    disk: Disk
    before: Seen
    rewritten: frozenset[int] = frozenset()
    named: dict[int, tuple[str, Files]] = field(default_factory=dict)
    pointers: dict[int, str] = field(default_factory=dict)
    steps: dict[str, Files] = field(default_factory=dict)

    def __post_init__(self) -> None:
        root = self.disk.root
        for path in [*root.glob("published/v*"), *root.glob("deltas/d*")]:
            self.note("rename", path)
        for path in root.glob(f"global_step_*/{FULL}"):
            self.note("create", path)
        for pointer in (STATE_POINTER, CHECKPOINT_POINTER):
            if (root / pointer).exists():
                self.note("rename", root / pointer)
        trash = root.glob(".syncd/epoch/*/trash/global_step_*")
        for path in [*root.glob("global_step_*"), *trash]:
            name = path.name.partition("-")[0]
            if parse_step_folder(name) not in self.rewritten:
                self.steps[name] = {**vouched(self.disk, path), **self.steps.get(name, {})}

    def note(self, method: str, path: Path) -> None:
        """Look at a call that was just done."""
        root = self.disk.root
        if method == "rename" and path.parent in {root / "published", root / "deltas"}:
            files = vouched(self.disk, path)
            self.named[self.disk.at(path)] = (f"{path.parent.name}/{path.name}", files)
        elif method == "rename" and path.name in {STATE_POINTER, CHECKPOINT_POINTER}:
            step = parse_pointer(self.disk.file(self.disk.at(path)).now)
            folder = root / f"global_step_{step}"
            files = vouched(self.disk, folder)
            if path.name == STATE_POINTER:  # it says nothing of what else is in the folder
                files.pop(FULL, None)
            self.named[self.disk.at(path)] = (folder.name, files)
            self.pointers[self.disk.at(path)] = path.name
        elif method == "create" and path.name == FULL:
            files = vouched(self.disk, path.parent)
            self.named[self.disk.at(path)] = (path.parent.name, files)
        elif method == "unlink" and (path.parent.name == RECEIPTS or path.name == FULL):
            # That save is being replaced: a pointer to it, synced or not, names nothing any more.
            step_folder = path.relative_to(root).parts[0]
            given_up = CHECKPOINT_POINTER if path.name == FULL else STATE_POINTER
            for node, pointer in self.pointers.items():
                if pointer == given_up and self.named[node][0] == step_folder:
                    self.named[node] = ("", {})

    def check(self, loss: Loss) -> None:
        """What must hold of what a power loss leaves, before anything is restarted."""
        for path, (node, content) in loss.tree.items():
            if content is not None and is_committed(path):
                assert content == self.disk.file(node).now, f"{path} is torn"
            parent, _, name = path.rpartition("/")
            if (parent == "published" and parse_version_folder(name) is not None) or (
                parent == "deltas" and parse_delta_folder(name) is not None
            ):
                assert loss.below(path) == self.named[node][1], f"{path} is not whole"
            elif name == FULL and parse_step_folder(parent) is not None:
                self._check_whole(loss, node, f"{path} stands there")
        for pointer in (STATE_POINTER, CHECKPOINT_POINTER):
            if pointer in loss.tree:
                self._check_whole(loss, loss.tree[pointer][0], f"{pointer} names it")
        self._check_latest(loss)
        self._check_deletions(loss)

    def _check_whole(self, loss: Loss, node: int, why: str) -> None:
        folder, files = self.named[node]
        lost = _lost(files, loss.below(folder))
        assert not lost, f"{why}, and {folder} lost {lost}"

    def _check_latest(self, loss: Loss) -> None:
        content = loss.content(".syncd/LATEST")
        named = parse(Latest, content, "LATEST") if content is not None else None
        latest = named.sequence if named else 0
        assert latest >= self.before.sequence, "LATEST went back"
        if latest:
            name = version_folder(latest)
            assert f"published/{name}" in loss.tree, f"LATEST names {name}, which is not there"
            assert f".syncd/leases/{name}" in loss.tree, "LATEST cannot be leased"
            tip = named.tip if named else None
            for number in {tip.sequence, tip.root or tip.sequence} if tip else ():
                assert f"deltas/{delta_folder(number)}" in loss.tree, "the tip went"
        for leased in self.before.leased:
            assert f"published/{version_folder(leased)}" in loss.tree, "a leased version went"

    def _check_deletions(self, loss: Loss) -> None:
        """What was there is there, whole; or set aside; or its deletion is decided, on record."""
        audit = (loss.content(".syncd/audit.jsonl") or b"").decode()
        rooms = [path for path in loss.tree if re.fullmatch(rf"{_ROOM}/(trash|doomed)/[^/]+", path)]
        for name, files in self.steps.items():
            if name in loss.tree:
                lost = _lost(files, loss.below(name))
                assert not lost or self._is_elsewhere(loss, rooms, name, lost), (
                    f"{name} is there, and lost {lost}"
                )
        for name in [*self.steps, *self.before.versions]:
            there = name in loss.tree or f"published/{name}" in loss.tree
            aside = any(path.rpartition("/")[2].startswith(f"{name}-") for path in rooms)
            assert there or aside or f'"{name}"' in audit, f"{name} went, and nothing says so"
        for name, files in self.before.kept.items():
            lost = _lost(files, loss.below(name))
            assert not lost, f"{name} is to be kept, and lost {lost}"

    def _is_elsewhere(self, loss: Loss, rooms: list[str], name: str, lost: set[str]) -> bool:
        """Whether what a step folder lacks is still set aside, and will be put back."""
        return any(
            f"/trash/{name}-" in path and not _lost({x: self.steps[name][x] for x in lost}, found)
            for path in rooms
            for found in [loss.below(path)]
        )


def _lost(files: Files, found: Files) -> set[str]:
    return {name for name, content in files.items() if found.get(name) != content}


class Recorded:
    """A scenario on a recording storage, watched at every call.

    Args:
        folder: where the job is made.
        scenario: the work.
        forgotten: the syncs that a broken product would leave out.
        by_chance: states of each moment besides the two extremes; -1 for the worst alone, and only
            after a sync.

    Attributes:
        losses: what a power loss may leave, each distinct state once, in order.
    """

    def __init__(
        self,
        folder: Path,
        scenario: Scenario,
        *,
        forgotten: Forgotten = none_forgotten,
        by_chance: int = _BY_CHANCE,
    ) -> None:
        root = folder / "job"
        self.scenario = scenario
        self.job = SmallJob(root)
        scenario.prepare(self.job)
        self.before = look(self.job, rewritten=scenario.rewritten)
        self.storage = RecordingStorage(root, foreign=is_heartbeat)
        self.storage.forgotten = forgotten
        self.witness = Witness(self.storage.disk, self.before, scenario.rewritten)
        self.job.storage = self.storage
        self.storage.watch = self._look
        self.losses: list[Loss] = []
        self._failed: list[AssertionError] = []
        self._seen: set[object] = set()
        self._chance = random.Random(str(scenario))
        self._by_chance = by_chance
        self._beats: dict[str, bytes] = {}

    def act(self) -> None:
        """Do the work; judge what a power loss after each call would leave."""
        self._look(0, "nothing yet", self.job.root)
        self.scenario.act(self.job, Clock())
        self._judge()

    def act_until(self, moment: int, *, seen: Watch = lambda *_: None) -> None:
        """Do the work until it is killed before a call; what that leaves is judged elsewhere."""

        def watch(number: int, method: str, path: Path) -> None:
            self.witness.note(method, path)
            seen(number, method, path)

        self.storage.watch = watch
        self.storage.kill_at = moment
        with suppress(Killed):
            self.scenario.act(self.job, Clock())
        self.storage.kill_at = 0
        self.storage.watch = self._look

    def act_again(self) -> None:
        """Let whoever works on the job start again."""
        self.scenario.again(self.job, Clock())
        rounds(2)(self.job, Clock())
        self._judge()

    def _judge(self) -> None:
        # Not raised where it is found: a daemon takes what is raised under it for a fault of its.
        if self._failed:
            raise self._failed[0]
        self.check_model()

    def _look(self, number: int, method: str, path: Path) -> None:
        """Note a call, and judge what a power loss after it would leave."""
        self.witness.note(method, path)
        disk, root = self.storage.disk, self.job.root
        shown = path.relative_to(root) if disk.covers(path) else path.name
        name = f"{self.scenario}, call {number}, {method} {shown}"
        if self._by_chance < 0:
            found = [Loss(name, disk.after_loss((), dropped), {})] if "sync" in method else []
        else:
            found = list(losses(disk, name, self._heartbeats(), self._chance, self._by_chance))
        for loss in found:
            key = hash(loss.key)
            if key not in self._seen:
                self._seen.add(key)
                self.losses.append(loss)
                try:
                    self.witness.check(loss)
                except AssertionError as error:
                    error.add_note(f"after a power loss: {loss.name}")
                    self._failed.append(error)

    def _heartbeats(self) -> dict[str, bytes]:
        """What filelock has on the disk now, as if of a process that is gone."""
        layout = self.job.layout
        there: dict[str, bytes] = {}
        for folder in (layout.sessions, layout.state):
            for name in os.listdir(folder) if folder.is_dir() else ():
                path = folder / name
                known = str(path.relative_to(layout.root))
                if not is_heartbeat(path) or self.storage.disk.find(path) is not None:
                    continue
                if known not in self._beats:
                    try:
                        content = path.read_bytes()
                    except FileNotFoundError:
                        continue
                    self._beats[known] = re.sub(rb"pid=\d+", _NOBODY, content)
                there[known] = self._beats[known]
        return there

    def check_model(self) -> None:
        """The model knows exactly what is on the disk."""
        root = self.job.root
        on_disk = {
            str(path.relative_to(root)): path.read_bytes() if path.is_file() else None
            for path in root.rglob("*")
            if not is_heartbeat(path)
        }
        modelled = {
            path: content
            for path, (_, content) in self.storage.disk.below(root).items()
            if not is_heartbeat(Path(path))
        }
        assert modelled == on_disk

    def check_finished(self) -> None:
        """What the work has committed survives, now that it is done."""
        disk = self.storage.disk
        found = disk.after_loss((), dropped)
        for path, node in disk.below(disk.root).items():
            if is_committed(path) and not path.endswith(SAVING):
                assert found.get(path) == node, f"{path} was committed, and did not survive"
        for path in found.keys() - disk.below(disk.root).keys():
            assert not re.fullmatch(r"published/[^/]+|global_step_[^/]+", path), f"{path} is back"


def spaced(found: int, wanted: int) -> list[int]:
    """So many numbers below ``found``, evenly, the first and the last among them."""
    if _DEEP or found <= wanted:
        return list(range(found))
    return sorted({round(number * (found - 1) / (wanted - 1)) for number in range(wanted)})


def _put_back(job: SmallJob) -> None:
    """Two trainers' files of one step: one set aside by a daemon that died, one in use."""
    dirty(job)
    actor = job.actor(1)
    (actor / "huggingface").mkdir(parents=True)
    (actor / "huggingface" / "tokenizer.json").write_bytes(b"newer")
    (actor / "optim_world_size_1_rank_0.pt").write_bytes(b"newer")
    (job.step(1) / FULL).touch()


def _saved_three(job: SmallJob) -> None:
    published(job, 1, 2, 3)
    job.save(4, point=False)


def _announce_and_prune(job: SmallJob, clock: Clock) -> None:
    """A trainer's pointer is seen by the daemon before the trainer's own sync of it is through."""
    draft = job.layout.drafts / ".tmp-pointer"
    job.storage.write_new(draft, b"4\n")
    job.storage.rename(draft, job.state_pointer)
    rounds(8)(job, clock)


ALL = (
    *SCENARIOS,
    Scenario("put back", _put_back, rounds(1)),
    Scenario("announced, and not synced", _saved_three, _announce_and_prune),
)


each_scenario = pytest.mark.parametrize("scenario", ALL, ids=str)


@each_scenario
def test_whatever_call_is_the_last_before_a_power_loss_a_restart_converges(
    in_memory: Path, scenario: Scenario
) -> None:
    recorded = Recorded(in_memory / "recorded", scenario)
    recorded.act()
    recorded.check_finished()
    found = recorded.losses
    chosen = spaced(len(found), _RESTARTS)
    for number in chosen:
        found[number].onto(in_memory / "lost" / "job")
        try:
            _restart_from(SmallJob(in_memory / "lost" / "job"), recorded)
        except BaseException as error:
            error.add_note(f"after a power loss: {found[number].name}")
            raise
        shutil.rmtree(in_memory / "lost")
    print(f"{recorded.storage.calls} calls, {len(found)} states, {len(chosen)} restarted from")


def _restart_from(job: SmallJob, recorded: Recorded) -> None:
    check(job, recorded.before)
    serve(job)
    recorded.scenario.again(job, Clock())
    clock = Clock()
    stand_by(job, clock)
    restart(job, clock)
    check_converged(job, recorded.before)


def before_each_sync(in_memory: Path, scenario: Scenario) -> list[int]:
    """The calls that sync a folder: the first of some kinds, or all where it is deep."""
    counted = Recorded(in_memory / "counted", scenario)
    calls: dict[object, int] = {}
    before = ""

    def seen(number: int, method: str, path: Path) -> None:
        nonlocal before
        if method == "sync_folder":
            place = re.sub(r"/epoch/[^/]+", "", str(path))
            calls.setdefault(number if _DEEP else (place, before), number)
        before = method

    counted.act_until(0, seen=seen)
    shutil.rmtree(in_memory / "counted")
    kinds = list(calls.values())
    return [kinds[number] for number in spaced(len(kinds), _KILLS)]


@each_scenario
def test_what_a_killed_process_left_unsynced_is_safe_before_anyone_relies_on_it(
    in_memory: Path, scenario: Scenario
) -> None:
    chosen = before_each_sync(in_memory, scenario)
    states = 0
    for number in chosen:
        recorded = Recorded(in_memory / "recorded", scenario, by_chance=-1)
        recorded.act_until(number)
        try:
            recorded.act_again()
        except BaseException as error:
            error.add_note(f"killed before call {number} of {scenario}")
            raise
        states += len(recorded.losses)
        shutil.rmtree(in_memory / "recorded")
    print(f"{len(chosen)} kills, {states} states")


@dataclass(frozen=True)
class Broken:
    """A product that leaves one kind of sync out, and what that does."""

    scenario: str
    method: str
    path: str
    does: str

    def forgets(self, method: str, path: Path) -> bool:
        return method == self.method and re.search(self.path, f"{path}") is not None


_NAMED = {str(scenario): scenario for scenario in ALL}
BROKEN = (
    Broken("save", "fsync", r"\.pt-", "torn"),
    Broken("save", "fsync", r"rank_0\.json-", "torn"),
    Broken("save", "fsync", r"huggingface/", "torn"),
    Broken("save", "fsync", r"drafts/.*iteration", "torn"),
    Broken("save", "sync_folder", r"/actor$", "names it, and global_step_2 lost"),
    Broken("save", "sync_folder", r"/huggingface$", "names it, and global_step_2 lost"),
    Broken("save", "sync_folder", r"/\.receipts$", "names it, and global_step_2 lost"),
    Broken("save", "sync_folder", r"/job$", "did not survive"),
    Broken("full save", "sync_folder", r"/global_step_2$", "names it, and global_step_2 lost"),
    Broken("full save again", "sync_folder", r"/global_step_2$", "stands there, and"),
    Broken("publish", "fsync", r"LATEST", "torn"),
    Broken("publish", "fsync", r"saves\.json", "torn"),
    Broken("publish", "fsync", r"building/v000002/manifest", "not whole"),
    Broken("publish", "fsync", r"building/v000002/config", "not whole"),
    Broken("publish", "sync_folder", r"building/v000002$", "not whole"),
    Broken("publish", "sync_folder", r"/published$", "LATEST names v000002"),
    Broken("publish", "sync_folder", r"/leases$", "cannot be leased"),
    Broken("publish", "sync_folder", r"/\.syncd$", "did not survive"),
    Broken("delta", "fsync", r"building/d000002/delta\.json$", "not whole"),
    Broken("delta", "sync_folder", r"building/d000002$", "not whole"),
    Broken("tip", "fsync", r"building/d000002/tip\.json$", "not whole"),
    Broken("tip", "fsync", r"building/d000002/plan$", "not whole"),
    Broken("tip", "sync_folder", r"building/d000002/shards$", "not whole"),
    Broken("tip", "sync_folder", r"building/d000002$", "not whole"),
    Broken("version of a tip", "fsync", r"building/v000002/model", "not whole"),
    Broken("version of a tip", "sync_folder", r"building/v000002$", "not whole"),
    Broken("merge and publish", "fsync", r"building/.*safetensors$", "not whole"),
    Broken("prune", "fsync", r"audit\.jsonl$", "nothing says so"),
    Broken("prune", "sync_folder", r"/doomed$", "lost|back|went"),
    Broken("take-over", "sync_folder", r"/epoch$", "global_step_1 went"),
    Broken("take-over", "sync_folder", r"/epoch/10-[^/]+$", "global_step_1 went"),
    Broken("put back", "sync_folder", r"global_step_1/actor(/.*)?$", "lost"),
    Broken("announced, and not synced", "sync_folder", r"/job$", "names it, and global_step_3"),
    Broken("open", "fsync", r"format", "torn"),
)


@pytest.mark.parametrize("broken", BROKEN, ids=lambda b: f"{b.scenario}-{b.method}-{b.path}")
def test_a_sync_that_is_left_out_is_found(in_memory: Path, broken: Broken) -> None:
    recorded = Recorded(
        in_memory / "recorded", _NAMED[broken.scenario], forgotten=broken.forgets, by_chance=0
    )

    def work() -> None:
        recorded.act()
        recorded.check_finished()

    with pytest.raises(AssertionError, match=broken.does):
        work()


# -- the model itself ------------------------------------------------------------------------------


@pytest.fixture
def storage(in_memory: Path) -> RecordingStorage:
    for name in ("here", "there"):
        (in_memory / name).mkdir()
    (in_memory / "here" / "old").write_bytes(b"old")
    return RecordingStorage(in_memory, foreign=lambda _: False)


def found(storage: RecordingStorage) -> dict[str, bytes]:
    """The files after the worst power loss."""
    tree = storage.disk.after_loss((), dropped)
    return {path: content for path, (_, content) in tree.items() if content is not None}


def test_a_folder_that_ends_has_first_lost_what_was_taken_out(
    storage: RecordingStorage, in_memory: Path
) -> None:
    storage.rename(in_memory / "here" / "old", in_memory / "there" / "new")
    storage.rmdir(in_memory / "here")
    storage.sync_folder(in_memory)
    assert found(storage) == {"there/new": b"old"}


def test_what_is_durable_in_a_folder_that_is_not_is_lost(
    storage: RecordingStorage, in_memory: Path
) -> None:
    storage.mkdir(in_memory / "made")
    storage.rename(in_memory / "here" / "old", in_memory / "made" / "old")
    storage.sync_folder(in_memory / "made")
    assert found(storage) == {}
    storage.sync_folder(in_memory)
    assert found(storage) == {"made/old": b"old"}


def test_chance_never_splits_a_rename(storage: RecordingStorage, in_memory: Path) -> None:
    storage.rename(in_memory / "here" / "old", in_memory / "there" / "new")
    storage.rename(in_memory / "there" / "new", in_memory / "here" / "newest")
    storage.write_new(in_memory / "there" / "new", b"other")
    for seed in range(50):
        for loss in losses(storage.disk, "", {}, random.Random(seed), 3):
            assert len([path for path in loss.tree if loss.content(path) == b"old"]) == 1, loss.name


def test_a_loss_is_made_real_as_it_is(storage: RecordingStorage, in_memory: Path) -> None:
    storage.link(in_memory / "here" / "old", in_memory / "there" / "second")
    storage.write_new(in_memory / "there" / "zeros", bytes(100_000))
    survived = Loss("", storage.disk.after_loss(list(storage.disk.pending), dropped), {})
    real = in_memory / "real"
    survived.onto(real)
    assert storage.disk.below(in_memory).keys() == Disk(real).below(real).keys()
    assert (real / "here" / "old").samefile(real / "there" / "second")
    assert (real / "there" / "zeros").read_bytes() == bytes(100_000)
