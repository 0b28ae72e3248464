"""Several hosts whose clients lag, on one job: at worst, what is right comes late."""

import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from explorer_hooks.reader import Reader
from syncd.checkpoint.version import read_manifest, verify_version
from syncd.daemon.config import DaemonConfig
from syncd.daemon.decide import RetireVersion
from syncd.daemon.loop import Loop
from syncd.daemon.prune import Pruner
from syncd.daemon.tenure import Tenure
from syncd.protocol.errors import SupersededError, VersionGoneError
from syncd.protocol.names import CHECKPOINT_POINTER, RECEIPTS, receipt_name
from syncd.protocol.records import Latest, Receipt, encode, parse
from syncd.protocol.reports import TrainerReport
from syncd.storage.epoch import Epoch
from syncd.storage.fsio import Storage
from syncd.storage.job import Job
from syncd.storage.judge import Judge
from syncd.storage.leases import Lease
from tests.jobs import LEASE_TIME, SmallJob, receipt_of, weights
from tests.lagging import LAG, LagClock, LaggingHosts, LaggingStorage
from tests.makers import work
from tests.storages import FastStorage

KEEP_1 = DaemonConfig(keep=1)
OPTIMIZER = "optim_world_size_1_rank_0.pt"


@pytest.fixture
def hosts(tmp_path: Path) -> LaggingHosts:
    return LaggingHosts(tmp_path)


@pytest.fixture
def job(tmp_path: Path, hosts: LaggingHosts) -> SmallJob:
    return SmallJob(tmp_path / "job", hosts=hosts)


def take_over(job: SmallJob, storage: Storage) -> Epoch:
    """Take over, once more where an old listing of the rooms made the first try one too low."""
    try:
        return job.take_over(storage)
    except SupersededError:
        return job.take_over(storage)


def clock_of(job: SmallJob) -> LagClock:
    return cast("LaggingHosts", job.hosts).clock


def serve(job: SmallJob, storage: Storage | None = None, config: DaemonConfig = KEEP_1) -> Loop:
    """A daemon that takes over, whatever the lock says: the lock only elects."""
    storage = storage or job.hosts.storage()
    clock = clock_of(job)
    tenure = Tenure(
        Job(storage, job.layout),
        cast("Any", SimpleNamespace(id="session", lease_time=LEASE_TIME)),
        take_over(job, storage),
        Judge(storage, LEASE_TIME, clock=clock),
        clock=clock,
        wall=lambda: 0.0,
    )
    loop = Loop(tenure, config, work=work())
    loop.begin()
    return loop


def rounds(loop: Loop, count: int) -> None:
    for _ in range(count):
        loop.run_once()


class Trainer:
    """What the hook of the only rank does, one call after the other, through its own client."""

    def __init__(self, job: SmallJob, storage: Storage) -> None:
        self._job, self._storage = job, storage
        self._saves = 0
        self.finished: tuple[int, str] | None = None

    def announce(self, step: int) -> None:
        report = TrainerReport(run_id="r", world_size=1, status="running", step=step, time=0.0)
        layout = self._job.layout
        self._storage.replace(layout.trainer_report, encode(report), room=layout.drafts)

    def save(self, step: int, *, full: bool = False) -> Iterator[None]:
        """A generator: between two steps of it, anything may happen elsewhere."""
        layout, storage = self._job.layout, self._storage
        self._saves += 1
        save_id = f"run-{step}-{self._saves}"
        self.announce(step)
        yield
        folder, actor = layout.step(step), layout.actor(step)
        for part in (folder, actor, actor / RECEIPTS):
            storage.make_folder(part, below=layout.root)
        try:
            storage.close(storage.create(folder / ".saving"))
        except FileExistsError:
            pass
        storage.unlink_if_there(folder / ".full_checkpoint")
        storage.unlink_if_there(actor / RECEIPTS / receipt_name(0))
        yield
        content = weights(float(self._saves), name=f"weight-{self._saves}")
        storage.replace(actor / "model.safetensors", content)
        yield
        files = (receipt_of(content),)
        receipt = Receipt(save_id=save_id, step=step, rank=0, world_size=1, files=files)
        storage.replace(actor / RECEIPTS / receipt_name(0), encode(receipt))
        if full:
            storage.replace(actor / OPTIMIZER, b"optimizer")
            yield
        storage.replace(layout.state_pointer, f"{step}\n".encode(), room=layout.drafts)
        self.finished = (step, save_id)
        if full:
            yield
            storage.close(storage.create(folder / ".full_checkpoint"))
            pointer = layout.root / CHECKPOINT_POINTER
            storage.replace(pointer, f"{step}\n".encode(), room=layout.drafts)
        storage.unlink_if_there(folder / ".saving")


class Watch:
    """What must hold on the server at every moment."""

    def __init__(self, job: SmallJob) -> None:
        self._job = job
        self._server = FastStorage()
        self._highest = 0
        self.held: list[Lease] = []

    def look(self) -> None:
        layout = self._job.layout
        if layout.latest.exists():
            latest = self._job.latest
            assert latest.sequence >= self._highest, "LATEST went back"
            self._highest = latest.sequence
            self._whole(latest.sequence)
        for lease in self.held:
            self._whole(lease.sequence)
        pointer = layout.root / CHECKPOINT_POINTER
        if pointer.exists():
            step = int(pointer.read_text())
            assert (layout.actor(step) / OPTIMIZER).exists(), "the checkpoint to resume from"

    def _whole(self, sequence: int) -> None:
        folder = self._job.layout.version(sequence)
        verify_version(self._server, folder, read_manifest(self._server, folder))


class Chance:
    """Hosts that do what comes to their minds, each through a client of its own."""

    def __init__(self, job: SmallJob, seed: int) -> None:
        self._job = job
        self._chance = random.Random(seed)
        self._clock = clock_of(job)
        self._watch = Watch(job)
        self._daemons = [self._client() for _ in range(2)]
        self._loops: dict[int, Loop] = {}
        self._explorer = self._client()
        self._trainer = Trainer(job, self._client())
        self._saving: Iterator[None] | None = None
        self._step = 0

    def _client(self) -> LaggingStorage:
        late = None if self._chance.random() < 0.5 else self._chance.randrange(1 << 30)
        return LaggingStorage(self._job.layout.root.parent, self._clock, seed=late)

    def run(self, actions: int) -> None:
        mind = [self.train] * 5 + [self.round] * 6 + [self.lease] * 2 + [self.take_over, self.drop]
        for _ in range(actions):
            self._clock.advance(self._chance.choice([0, 0, 0, 1, 1, 5, 12, LAG]))
            self._chance.choice(mind)()
            self._watch.look()
        for _ in self._saving or ():
            self._watch.look()
        self._clock.advance(LAG)
        last = serve(self._job, self._daemons[0])
        for _ in range(4):
            self._clock.advance(LAG)
            last.run_once()
            self._watch.look()
        if self._trainer.finished:
            assert save_of_latest(self._job) == self._trainer.finished[1]

    def train(self) -> None:
        if self._saving is None:
            self._step = max(1, self._step + self._chance.choice([1, 1, 1, 0, -1, -2]))
            self._saving = self._trainer.save(self._step, full=self._chance.random() < 0.3)
        elif next(self._saving, 0) == 0:
            self._saving = None

    def take_over(self) -> None:
        number = self._chance.randrange(2)
        self._loops[number] = serve(self._job, self._daemons[number])

    def round(self) -> None:
        for number, loop in list(self._loops.items()):
            if self._chance.random() < 0.5:
                try:
                    loop.run_once()
                except SupersededError:
                    del self._loops[number]

    def lease(self) -> None:
        layout = self._job.layout
        try:
            latest = parse(Latest, self._explorer.read(layout.latest), "LATEST")
            session = f"s{self._chance.randrange(1 << 30)}"
            layout.session(session).touch()
            lease = Lease.take(Job(self._explorer, layout), latest.sequence, "e", session)
        except (FileNotFoundError, VersionGoneError):
            return
        try:
            read_manifest(self._explorer, layout.version(latest.sequence))
        except FileNotFoundError:
            lease.release()
        else:
            self._watch.held.append(lease)

    def drop(self) -> None:
        if self._watch.held:
            self._watch.held.pop(0).release()


@pytest.mark.parametrize("seed", range(8))
def test_whatever_hosts_believe_latest_grows_and_nothing_that_is_needed_goes(
    job: SmallJob, seed: int
) -> None:
    Chance(job, seed).run(60)


def save_of_latest(job: SmallJob) -> str:
    return read_manifest(FastStorage(), job.version(job.latest.sequence)).save_id


def look_at_all(job: SmallJob, storage: Storage) -> None:
    """Let a client remember whatever a daemon could ever have asked for."""
    layout = job.layout
    for folder in (layout.root, layout.state, layout.published, layout.leases, layout.explorers):
        storage.names(folder)
    for path in (layout.latest, layout.saves, layout.daemon_report, layout.state_pointer):
        storage.exists(path)
    for sequence in range(1, 9):
        for folder in (layout.version(sequence), layout.lease_folder(sequence)):
            storage.names(folder)
            storage.exists(folder / "manifest.json")


def publish(job: SmallJob, loop: Loop, *steps: int) -> None:
    for step in steps:
        job.save(step)
        job.hosts.settle()
        loop.run_once()


@pytest.mark.parametrize("before", [0, 1, 3])
@pytest.mark.parametrize("seen_as", ["standing by", "active"])
def test_one_that_takes_over_again_and_believes_an_older_job_goes_on_from_what_is_there(
    job: SmallJob, hosts: LaggingHosts, before: int, seen_as: str
) -> None:
    here, there = hosts.storage(), hosts.storage()
    publish(job, serve(job, here), *range(1, before + 1))
    if seen_as == "active":
        serve(job, here)
    job.layout.daemon_report.unlink()  # it says how far the job is, and need not be there
    here.forget()
    look_at_all(job, here)
    elsewhere = serve(job, there)
    for step in (4, 5, 6):
        job.save(step)
        there.forget()
        elsewhere.run_once()
    outcomes, told = job.outcomes, job.latest
    assert told.sequence == before + 3
    again = serve(job, here)
    assert (job.latest, job.outcomes) == (told, outcomes)
    Watch(job).look()
    publish(job, again, 7)
    assert job.serves == (before + 4, 7)


def test_of_two_who_take_over_from_each_other_in_turn_the_last_one_serves(
    job: SmallJob, hosts: LaggingHosts
) -> None:
    clients = [hosts.storage(), hosts.storage()]
    watch = Watch(job)
    loops = [serve(job, client) for client in clients]
    for turn in range(6):
        job.save(turn)
        with pytest.raises(SupersededError):
            rounds(loops[turn % 2], 3)
        watch.look()
        loops[turn % 2] = serve(job, clients[turn % 2])
        rounds(loops[turn % 2], 3)  # the pointer, then the folder, each late by a look
        watch.look()
        hosts.clock.advance(1)
    hosts.settle()
    loops[1].run_once()
    assert save_of_latest(job) == "run-5-0"


@pytest.mark.parametrize("leased", [True, False])
def test_a_version_whose_lease_folder_was_looked_for_too_early_is_not_taken_for_a_retired_one(
    job: SmallJob, hosts: LaggingHosts, leased: bool
) -> None:
    early = hosts.storage()
    look_at_all(job, early)
    publish_unseen(job, serve(job, config=DaemonConfig(keep=9)), 1)
    lease = job.lease(1, "session") if leased else None
    job.session("session").touch()
    early.clear_listings()
    pruner = Pruner(Job(early, job.layout), job.take_over(early), "session")
    assert not early.exists(job.lease_folder(1))
    assert not pruner.retire_version(RetireVersion(1, "retired before, it seems"))
    assert Lease.take(Job(FastStorage(), job.layout), 1, "another", "session").sequence == 1
    assert job.versions == ["v000001"]
    assert lease is None or pruner.retire_version(RetireVersion(1, "not wanted")) is False


def test_an_explorer_that_believes_an_old_latest_gets_it_whole_or_the_newest(
    job: SmallJob,
) -> None:
    daemon = serve(job)
    publish(job, daemon, 1)
    with Reader(job.root, "explorer", poll=0.001, storage=job.explorers) as reader:
        assert reader.wait(0, 0).sequence == 1
        publish_unseen(job, daemon, 2, 3)
        with pytest.raises(VersionGoneError):
            reader.lease(reader.wait(0, 0))
        version = reader.next_version(1, 30)
        assert version.sequence == 3
        version.verify()
        publish_unseen(job, daemon, 4, 5)
        version.verify()


def test_an_explorer_that_looked_for_a_version_too_early_waits_and_leaves_no_lease(
    job: SmallJob, hosts: LaggingHosts
) -> None:
    look_at_all(job, job.explorers)
    publish_unseen(job, serve(job), 1)
    with Reader(job.root, "explorer", poll=0.001, storage=job.explorers) as reader:
        with pytest.raises(VersionGoneError):
            reader.lease(job.latest)
        assert list(job.lease_folder(1).iterdir()) == []
        hosts.let_time_pass()
        assert reader.next_version(0, 30).sequence == 1


def publish_unseen(job: SmallJob, daemon: Loop, *steps: int) -> None:
    """Publish with no time passing for the others."""
    client = cast("LaggingStorage", daemon._job.storage)
    for step in steps:
        job.save(step)
        client.forget()
        daemon.run_once()


def test_a_step_that_is_saved_again_is_published_though_the_old_receipt_was_seen_once_more(
    job: SmallJob, hosts: LaggingHosts
) -> None:
    daemon = serve(job)
    job.save(4)
    rounds(daemon, 3)
    assert save_of_latest(job) == "run-4-0"
    job.save(4, counter=1)
    for _ in range(5):
        hosts.clock.advance(1)
        daemon.run_once()
    assert save_of_latest(job) == "run-4-1"


def test_a_save_whose_receipts_folder_came_late_is_published_as_what_it_is(
    job: SmallJob, hosts: LaggingHosts
) -> None:
    daemon = serve(job)
    job.save(4, receipts=False)
    daemon.run_once()
    job.save(4)
    for _ in range(3):
        daemon.run_once()
        hosts.settle()
    hosts.clock.advance(60)
    daemon.run_once()
    assert save_of_latest(job) == "run-4-0"


def about_to_prune_step_3(job: SmallJob) -> tuple[Loop, Trainer]:
    """A daemon that remembers step 3 as it was, and will delete it in its next round."""
    daemon = serve(job, config=DaemonConfig(keep=1, prune_steps=False))
    trainer = Trainer(job, FastStorage())
    for step in (3, 4):
        for _ in trainer.save(step):
            pass
        rounds(daemon, 3)
    assert job.latest.step == 4
    daemon.config = KEEP_1
    return daemon, trainer


@pytest.mark.parametrize("done", [1, 2, 3, 4])
@pytest.mark.parametrize("full", [False, True])
def test_a_step_that_its_trainer_saves_again_is_not_pruned_by_one_who_does_not_see_it(
    job: SmallJob, hosts: LaggingHosts, done: int, full: bool
) -> None:
    daemon, trainer = about_to_prune_step_3(job)
    saving = trainer.save(3, full=full)
    for _ in range(done):
        next(saving, None)
    daemon.run_once()
    assert (job.actor(3) / "model.safetensors").exists()
    assert ("step", "global_step_3") not in job.audit
    for _ in saving:
        daemon.run_once()
    hosts.settle()
    rounds(daemon, 2)
    assert trainer.finished is not None
    assert save_of_latest(job) == trainer.finished[1]
    assert (job.actor(3) / OPTIMIZER).exists() == full


def test_a_step_that_nobody_needs_is_pruned_in_the_end(job: SmallJob, hosts: LaggingHosts) -> None:
    daemon, _ = about_to_prune_step_3(job)
    for _ in range(3):
        daemon.run_once()
        hosts.settle()
    assert not job.step(3).exists()


def test_what_came_into_a_step_unseen_is_given_back_where_its_name_is_in_use_again(
    job: SmallJob,
) -> None:
    daemon, _ = about_to_prune_step_3(job)
    storage = daemon._job.storage
    (job.step(3) / ".saving").touch()
    (job.actor(3) / OPTIMIZER).write_bytes(b"optimizer")
    moved = storage.rename

    def rename(source: Path, target: Path) -> None:
        moved(source, target)
        if source == job.step(3):
            job.actor(3).mkdir(parents=True)
            (job.actor(3) / "model.safetensors").write_bytes(b"newer")

    storage.rename = rename  # type: ignore[method-assign]
    daemon.run_once()
    assert (job.actor(3) / OPTIMIZER).read_bytes() == b"optimizer"
    assert (job.actor(3) / "model.safetensors").read_bytes() == b"newer"
    assert ("step", "global_step_3") not in job.audit
