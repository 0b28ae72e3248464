"""Steps that explorers evaluate: built for one explorer alone, and nobody else is moved."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from explorer_hooks import bench
from explorer_hooks.engines.fake import FakeEngine
from explorer_hooks.hook import ExplorerHook
from explorer_hooks.staging import Staging
from syncd.checkpoint.merging.options import Progress
from syncd.checkpoint.name_map import NameMap
from syncd.checkpoint.safetensors_header import HeaderEntry, header_bytes
from syncd.checkpoint.save import WholeSave
from syncd.checkpoint.version import read_manifest, verify_version
from syncd.coordination import TrainerSynchronizer
from syncd.coordination.member import Seams
from syncd.daemon.config import DaemonConfig
from syncd.daemon.loop import Loop
from syncd.daemon.turns import LEAST, Turns
from syncd.operate.offline import prune_now
from syncd.protocol.errors import (
    EngineMismatchError,
    InvalidSettingsError,
    JobUnavailableError,
    SaveFailedError,
    SaveNotReadyError,
    SupersededError,
    WaitTimeoutError,
)
from syncd.protocol.names import NAME_MAP
from syncd.protocol.policy import RunningStatus, SyncSettings, Version
from syncd.protocol.records import Manifest, encode, parse
from syncd.protocol.reports import DaemonReport
from syncd.protocol.requests import BenchRequest, Pause
from syncd.storage.job import Job
from tests.explorers import LONG, leased, publish, report
from tests.jobs import LEASE_TIME, SmallJob, receipt_of, weights
from tests.lagging import Hosts
from tests.multiprocess.processes import wait_until
from tests.storages import Clock, FastStorage, once, refuse

pytestmark = pytest.mark.lagging
STORAGE = FastStorage()
CONFIG = DaemonConfig(keep=1, prune_steps=False)
SESSION = "explorer-session"


def full(job: SmallJob, *steps: int) -> None:
    """Full checkpoints, which no pointer names."""
    for step in steps:
        job.save(step, point=False)
        (job.layout.step(step) / ".full_checkpoint").touch()


def builds(job: SmallJob) -> list[Path]:
    """What is in all sessions' folders."""
    return sorted(job.layout.bench.glob("*/*"))


def is_empty(job: SmallJob) -> bool:
    return list(job.layout.bench.iterdir()) == []


# -- the daemon ------------------------------------------------------------------------------------


def ask(job: SmallJob, step: int, name: str = "ask", session: str = SESSION) -> Path:
    """A request as it is on disk, of an explorer that lives."""
    beat(job, session)
    request = BenchRequest(id=name, session=session, step=step, by="me", time=0.0)
    job.put(job.layout.bench_request(name), encode(request))
    return job.layout.bench_build(session, name)


def beat(job: SmallJob, session: str = SESSION) -> None:
    job.layout.session(session).write_text(str(time.monotonic_ns()))


def answer(job: SmallJob, name: str = "ask") -> BenchRequest:
    return parse(BenchRequest, job.layout.bench_request(name).read_bytes(), name)


def verified(folder: Path) -> tuple[int, int, str]:
    manifest = read_manifest(STORAGE, folder)
    verify_version(STORAGE, folder, manifest)
    return manifest.sequence, manifest.step, manifest.save_id


def test_a_step_is_built_for_its_session_and_neither_latest_nor_a_record_changes(
    job: SmallJob,
) -> None:
    full(job, 0, 4)
    with job.daemon(CONFIG) as loop:
        job.save(8)
        loop.run_once()
        before = job.layout.latest.read_bytes(), job.layout.saves.read_bytes(), job.versions
        four, nought = ask(job, 4), ask(job, 0, "another")
        for _ in range(2):
            loop.run_once()
        assert (verified(four), verified(nought)) == ((0, 4, "run-4-0"), (0, 0, "run-0-0"))
        assert (job.layout.latest.read_bytes(), job.layout.saves.read_bytes()) == before[:2]
        assert job.versions == before[2]
        job.layout.bench_request("ask").unlink()  # the explorer needs it no more
        job.hosts.settle()
        loop.run_once()
        assert builds(job) == [nought]
        job.layout.bench_request("another").unlink()
        job.hosts.settle()
        loop.run_once()
        assert is_empty(job)
        job.save(9)
        loop.run_once()
        assert (job.latest.sequence, job.latest.step) == (2, 9)
    assert job.leftovers() == []


def test_a_build_has_the_name_map_of_its_type_as_a_version_has(job: SmallJob) -> None:
    full(job, 4)
    name, config = "model.encoder.weight", b'{"model_type": "granite_speech"}'
    content = header_bytes([HeaderEntry(name, "F32", (3,), 0, 12)]) + bytes(12)
    job.put(job.layout.actor(4) / "model.safetensors", content)
    job.put(job.layout.actor(4) / "huggingface" / "config.json", config)
    job.receipt(4, "run-4-1", 0, 1, receipt_of(content))
    with job.daemon(CONFIG) as loop:
        loop.run_once()
        folder = ask(job, 4)
        for _ in range(2):
            loop.run_once()
    manifest = read_manifest(STORAGE, folder)
    assert (manifest.names, [one.name for one in manifest.tensors]) == ("hub", ["encoder.weight"])
    names = NameMap.read((folder / NAME_MAP).read_bytes(), folder)
    assert names.tensors() == {name: (3,)}


def test_the_builds_of_a_dead_session_go_with_their_requests(job: SmallJob, clock: Clock) -> None:
    full(job, 0, 4)
    with job.daemon(CONFIG, clock=clock) as loop:
        of_dead, of_living = ask(job, 0, "dead", "dead"), ask(job, 4, "lives", "lives")
        for _ in range(8):
            loop.run_once()
            clock.advance(LEASE_TIME / 4)
            beat(job, "lives")
        assert builds(job) == [of_living]
        assert not of_dead.parent.exists()
        assert not job.layout.bench_request("dead").exists()
        job.layout.session("lives").unlink()  # it was closed, and did not come to its request
        job.hosts.settle()
        loop.run_once()
        assert is_empty(job)


def test_the_next_daemon_keeps_what_is_held_and_removes_what_is_not(job: SmallJob) -> None:
    full(job, 0, 4)
    with job.daemon(CONFIG) as loop:
        held, let_go = ask(job, 0), ask(job, 4, "other")
        for _ in range(2):
            loop.run_once()
    job.layout.bench_request("other").unlink()
    half = job.layout.bench / "gone-session"
    half.mkdir()
    with job.daemon(CONFIG) as loop:
        beat(job)
        loop.run_once()
    assert builds(job) == [held]
    assert not let_go.exists()
    assert not half.exists()


def test_a_build_whose_request_this_client_has_not_listed_yet_stays(
    tmp_path: Path, hosts: Hosts
) -> None:
    job = SmallJob(tmp_path / "job", hosts=hosts)
    full(job, 0, 4)
    second = hosts.storage()
    with job.daemon(CONFIG) as loop:
        first = ask(job, 0)
        loop.run_once()
        second.kinds(job.layout.bench)  # remembered, before the next request
        built = ask(job, 4, "late")
        loop.run_once()
        assert builds(job) == [first, built]
    job.storage = second
    with job.daemon(CONFIG) as loop:
        Loop.run_once(loop)  # before its client has forgotten
        assert builds(job) == [first, built]
        loop.run_once()
        assert builds(job) == [first, built]


def test_a_superseded_daemon_does_not_commit_its_build(tmp_path: Path, hosts: Hosts) -> None:
    storage = hosts.ruled()
    job = SmallJob(tmp_path / "job", storage, hosts=hosts)
    full(job, 4)
    with job.daemon(CONFIG) as loop:
        build = ask(job, 4)
        storage.rules.append(
            once("rename", lambda *_: job.take_over(), where=str(build))  # the commit itself
        )
        with pytest.raises(SupersededError):
            loop.run_once()
    assert builds(job) == []
    job.storage = hosts.storage()
    with job.daemon(CONFIG) as loop:
        loop.run_once()
        assert verified(build)[1] == 4


@pytest.mark.parametrize("breaks", ["damaged", "no room", "deleted"])
def test_what_cannot_be_built_is_refused_with_the_reason_and_nothing_is_quarantined(
    tmp_path: Path, hosts: Hosts, breaks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = hosts.ruled()
    job = SmallJob(tmp_path / "job", storage, hosts=hosts)
    full(job, 4)
    why = f"{job.layout.step(4)} was deleted"
    if breaks == "damaged":
        path = job.layout.actor(4) / "model.safetensors"
        job.put(path, path.read_bytes()[:-4])
        job.layout.actor(4).joinpath(".receipts/rank_0.json").unlink()
        job.layout.actor(4).joinpath(".receipts").rmdir()
        why = "model.safetensors"
    elif breaks == "no room":
        monkeypatch.setattr(
            type(storage), "free", lambda *_: FastStorage.free(storage, tmp_path)._replace(bytes=5)
        )
        why = "are free"
    else:
        job.hosts.settle()
        (job.layout.root / "elsewhere").mkdir()
        job.layout.step(4).rename(job.layout.root / "elsewhere" / "4")
    clock = Clock()
    with job.daemon(CONFIG, clock=clock) as loop:
        ask(job, 4)
        for _ in range(3):
            loop.run_once()
            clock.advance(2.0)
            beat(job)
    assert answer(job).outcome == "refused"
    assert why in answer(job).why
    assert builds(job) == []
    assert list(job.layout.quarantine.iterdir()) == []
    assert job.leftovers() == []


def test_what_storage_refuses_is_tried_again_and_refused_in_the_end(
    tmp_path: Path, hosts: Hosts
) -> None:
    storage = hosts.ruled(refuse("rename", errno.EIO, where=f"bench/{SESSION}"))
    job = SmallJob(tmp_path / "job", storage, hosts=hosts)
    full(job, 0, 4)
    clock = Clock()
    with job.daemon(CONFIG, clock=clock) as loop:
        build = ask(job, 4)
        loop.run_once()
        assert answer(job).outcome == "asked"
        storage.rules.clear()
        clock.advance(2.0)
        loop.run_once()
        assert verified(build)[1] == 4
        storage.rules.append(refuse("rename", errno.EIO, where=f"bench/{SESSION}"))
        ask(job, 0, "never")
        for _ in range(12):
            loop.run_once()
            clock.advance(LEASE_TIME / 4)
            beat(job)
        assert answer(job, "never").outcome == "refused"
        job.save(8)
        loop.run_once()
        assert job.latest.step == 8, "it keeps nobody from new weights"


def test_a_build_that_does_not_go_keeps_no_other_explorer_waiting(
    tmp_path: Path, hosts: Hosts
) -> None:
    storage = hosts.ruled()
    job = SmallJob(tmp_path / "job", storage, hosts=hosts)
    full(job, 0, 4)
    job.point(4)
    with job.daemon(CONFIG) as loop:
        stuck = ask(job, 0, "stuck", "a-session")
        loop.run_once()
        job.layout.bench_request("stuck").unlink()
        storage.rules.append(refuse("rename", errno.EIO, where=str(stuck)))
        build = ask(job, 4)
        job.hosts.settle()
        loop.run_once()
        assert verified(build)[1] == 4
        assert verified(stuck)[1] == 0
        assert "storage refuses" in loop._journal.waiting_for
        storage.rules.clear()
        loop.run_once()
        assert builds(job) == [build]


def test_a_save_without_receipts_must_lie_still_and_one_that_is_not_whole_is_waited_for(
    job: SmallJob, clock: Clock
) -> None:
    job.save(4, receipts=False, point=False)
    actor = job.layout.actor(4)
    (actor / "model.safetensors").rename(actor / "later")
    with job.daemon(CONFIG, clock=clock) as loop:
        build = ask(job, 4)
        for _ in range(3):
            loop.run_once()
            clock.advance(CONFIG.tick)
        assert not build.exists()
        (actor / "later").rename(actor / "model.safetensors")
        job.hosts.settle()
        loop.run_once()
        assert not build.exists()
        clock.advance(CONFIG.tick)
        loop.run_once()
        assert verified(build)[1] == 4


def test_new_weights_come_first_and_a_pause_keeps_no_bench_waiting(
    job: SmallJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    full(job, 4)
    with job.daemon(CONFIG) as loop:
        ask(job, 4)
        job.save(8)
        order: list[str] = []
        publisher = loop._publisher
        for name in ("publish", "build_for_bench"):
            real = getattr(publisher, name)
            monkeypatch.setattr(
                publisher, name, lambda *a, r=real, n=name, **k: (order.append(n), r(*a, **k))[1]
            )
        loop.run_once()
        assert order == ["publish", "build_for_bench"]
        job.put(job.layout.paused, encode(Pause(id="pause", by="me", time=0.0)))
        paused = ask(job, 4, "paused")
        loop.run_once()
        assert verified(paused)[1] == 4


def test_other_jobs_merges_come_before_a_build(job: SmallJob) -> None:
    full(job, 4)
    turns = Turns(1, lambda _: 0.0)
    with job.daemon(CONFIG) as loop:
        loop._benches._turn = loop._turn = turns.of("this", lambda: None)
        assert turns.take("other", lambda: None, None)
        build = ask(job, 4)
        loop.run_once()
        assert "other jobs are merged first" in loop._journal.waiting_for
        assert not build.exists()
        turns.leave("other")
        assert not turns.take("third", lambda: None, None), "this job asked first"
        loop.run_once()
        assert verified(build)[1] == 4
        assert turns.take("third", lambda: None, None)


def test_a_build_that_is_late_while_others_wait_ends_and_is_made_again(
    job: SmallJob, caplog: pytest.LogCaptureFixture
) -> None:
    full(job, 4)
    clock = Clock()
    turns = Turns(1, lambda _: 0.0, clock=clock)
    with job.daemon(CONFIG, clock=clock) as loop:
        loop._benches._turn = loop._turn = turns.of("this", lambda: None)
        assert turns.take("late", lambda: None, None)
        clock.advance(2 * LEAST)  # it goes on beside the others
        build = ask(job, 4)
        made = loop._publisher.build_for_bench

        def slow(request: BenchRequest, save: WholeSave, *, progress: Progress) -> Manifest:
            clock.advance(2 * LEAST)
            assert not turns.take("third", lambda: None, None)
            loop._may_go_on()
            return made(request, save, progress=progress)

        loop._publisher.build_for_bench = slow  # type: ignore[method-assign] - the merge that is late
        loop.run_once()
        assert "another late merge runs" in caplog.text
        assert not build.exists()
        turns.leave("late")
        turns.leave("third")
        loop._publisher.build_for_bench = made  # type: ignore[method-assign] - an ordinary one
        clock.advance(60)
        loop.run_once()
        assert verified(build)[1] == 4


def test_pruning_alone_builds_nothing_and_deletes_what_nobody_holds(job: SmallJob) -> None:
    full(job, 0, 4)
    publish(job, 8)
    with job.daemon(CONFIG) as loop:
        ask(job, 0)
        loop.run_once()
    job.layout.bench_request("ask").unlink()
    ask(job, 4, "other")
    prune_now(Job(job.hosts.storage(), job.layout), CONFIG)
    assert builds(job) == []
    assert answer(job, "other").outcome == "asked"


def test_names_that_are_no_requests_lead_nowhere(job: SmallJob) -> None:
    full(job, 4)
    outside = job.layout.root / "outside"
    outside.mkdir()
    request = BenchRequest(id="real", session=SESSION, step=4, by="me\n", time=0.0)
    beat(job)
    bench_dir = job.layout.bench
    job.put(bench_dir / "other.json", encode(request))
    job.put(bench_dir / "junk.json", b"{}")
    away = encode(request).replace(f'"{SESSION}"'.encode(), b'"../../outside"')
    job.put(bench_dir / "real.json", away)
    (bench_dir / "link.json").symlink_to("/etc/passwd")
    (bench_dir / "room").symlink_to(outside, target_is_directory=True)
    with job.daemon(CONFIG) as loop:
        loop.run_once()
        job.save(8)
        loop.run_once()
    assert builds(job) == []
    assert list(outside.iterdir()) == []
    assert job.latest.step == 8


# -- explorers -------------------------------------------------------------------------------------


class Here(FakeEngine):
    """Remembers the bytes of what it serves."""

    content = b""

    def load(self, version: Any) -> None:
        super().load(version)
        self.content = (version.folder / "model.safetensors").read_bytes()


def hook_of(job: SmallJob, name: str = "bench", **options: Any) -> ExplorerHook:
    engine = options.pop("engine", None) or Here()
    settings = SyncSettings(**options.pop("settings", {}))
    return ExplorerHook(job.layout.root, name, engine, settings=settings, poll=0.02, **options)


@contextmanager
def at_work(job: SmallJob, config: DaemonConfig = CONFIG) -> Iterator[None]:
    """A daemon that works behind."""
    over = threading.Event()
    with job.daemon(config) as loop:

        def work() -> None:
            while not over.wait(0.01):
                loop.run_once()

        working = threading.Thread(target=work)
        working.start()
        try:
            yield
        finally:
            over.set()
            working.join()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[SmallJob]:
    """A daemon that has published step 8; 0, 4 and 8 are full checkpoints."""
    job = SmallJob(tmp_path / "job")
    full(job, 0, 4, 8)
    job.point(8)
    with at_work(job):
        wait_until(job.layout.latest.exists, "it is published")
        yield job


def test_a_bench_of_every_full_checkpoint_moves_nobody_else(served: SmallJob) -> None:
    root, engine = served.layout.root, Here()
    with hook_of(served, "serving") as serving, hook_of(served, engine=engine) as hook:
        assert serving.pull(LONG) == Version(1, 8)
        before = served.layout.latest.read_bytes(), served.layout.saves.read_bytes()
        seen = bench.every_full_checkpoint(hook, root, timeout=LONG)
        for step, version in zip((0, 4, 8), seen, strict=True):
            assert version.step == step
            actor = served.layout.actor(step)
            assert engine.content == (actor / "model.safetensors").read_bytes()
            assert (report(served, "bench").bench, report(served, "bench").step) == (step, None)
            with pytest.raises(WaitTimeoutError):
                serving.pull(0)
            with hook_of(served, f"newcomer-{step}") as newcomer:
                assert newcomer.pull(LONG) == Version(1, 8)
        assert (served.layout.latest.read_bytes(), served.layout.saves.read_bytes()) == before
        assert served.layout.state_pointer.read_text() == "8\n"
        assert (served.versions, serving.version) == (["v000001"], Version(1, 8))
        wait_until(lambda: is_empty(served), "the builds of steps 0 and 4 go")


def test_what_was_evaluated_is_left_for_the_newest_version_and_goes(served: SmallJob) -> None:
    with hook_of(served) as hook:
        assert hook.load_step(4, LONG) == Version(0, 4)
        assert hook.load_step(4, LONG) == Version(0, 4)
        assert len(builds(served)) == 1, "it was there already"
        assert hook.get_weight("weight")[0] == 4
        assert len(list(hook.state_dict_iterator())) == 1
        assert hook.folder == builds(served)[0]
        assert hook.pull(LONG) == Version(1, 8)
        assert (report(served, "bench").bench, report(served, "bench").sequence) == (None, 1)
        wait_until(lambda: is_empty(served), "its build goes")
        hook.load_step(0, LONG)
    wait_until(lambda: is_empty(served), "it goes with the hook")


def test_a_staged_step_needs_no_build_any_more(served: SmallJob, tmp_path: Path) -> None:
    with hook_of(served, staging=Staging(tmp_path / "stage")) as hook:
        hook.load_step(4, LONG)
        wait_until(lambda: is_empty(served), "its build goes")
        assert hook.get_weight("weight")[0] == 4


def test_a_step_that_an_engine_refuses_leaves_it_and_the_job_as_they_were(served: SmallJob) -> None:
    engine = FakeEngine()
    engine.fail("load", EngineMismatchError("no"), sequence=0)
    with hook_of(served, engine=engine) as hook:
        hook.pull(LONG)
        with pytest.raises(EngineMismatchError):
            hook.load_step(4, LONG)
        assert hook.version == Version(1, 8)
        assert report(served, "bench").refused == "step 4: no"
        wait_until(lambda: is_empty(served), "its build goes")


def test_a_version_of_the_step_is_leased_and_no_daemon_is_needed(tmp_path: Path) -> None:
    job = SmallJob(tmp_path / "job")
    for step in (1, 2, 3):
        publish(job, step, keep=9)  # and prunes the folders below
    with hook_of(job) as hook:
        assert hook.load_step(2, 0) == Version(2, 2)
        assert leased(job) == [2]
        assert list(job.layout.bench.iterdir()) == []
        # A follower again: LATEST is what it is compared with.
        assert hook.pull(0) == Version(3, 3)
        assert hook.load_step(3, 0) == Version(3, 3)
        assert report(job, "bench").bench is None


def test_a_step_that_was_saved_again_since_it_was_published_is_built_as_it_is_now(
    tmp_path: Path,
) -> None:
    job = SmallJob(tmp_path / "job")
    full(job, 1)
    publish(job, 1)
    publish(job, 2)
    job.save(1, 7.0, counter=1, point=False)
    with at_work(job), hook_of(job) as hook:
        assert hook.load_step(1, LONG) == Version(0, 1)
        assert hook.get_weight("weight")[0] == 7


def test_a_step_that_is_not_on_disk_is_an_error_at_once_and_changes_nothing(
    served: SmallJob,
) -> None:
    with hook_of(served) as hook:
        with pytest.raises(
            SaveNotReadyError, match="99 is not on disk; the steps on disk are 0, 4, 8"
        ):
            bench.step(hook, 99)
        assert served.layout.state_pointer.read_text() == "8\n"
        assert is_empty(served)


def test_a_step_that_the_daemon_cannot_build_is_an_error_with_its_reason(served: SmallJob) -> None:
    broken = weights(4.0, 2.0, 3.0)[:-4]
    served.put(served.layout.actor(4) / "model.safetensors", broken)
    served.receipt(4, "run-4-1", 0, 1, receipt_of(broken))
    with hook_of(served) as hook:
        with pytest.raises(SaveFailedError, match=r"cannot build step 4: .*model\.safetensors"):
            bench.step(hook, 4, LONG)
        assert is_empty(served)


def test_a_daemon_of_an_older_release_is_named_at_once(served: SmallJob) -> None:
    path = served.layout.daemon_report
    told = parse(DaemonReport, path.read_bytes(), "it")
    assert told.release is not None
    with hook_of(served) as hook, ExitStack() as stack:
        # As the older one writes it, again and again.
        over = threading.Event()
        older = encode(told.model_copy(update={"release": None}))

        def write() -> None:
            while not over.wait(0.001):
                served.put(path, older)

        writing = threading.Thread(target=write)
        stack.callback(writing.join)
        stack.callback(over.set)
        served.put(path, older)
        writing.start()
        with pytest.raises(JobUnavailableError, match=r"daemon of .* runs an older release"):
            bench.step(hook, 4)
        assert is_empty(served)


def test_a_step_that_nobody_builds_in_time_is_a_timeout_and_no_request_stays(
    tmp_path: Path,
) -> None:
    job = SmallJob(tmp_path / "job")
    full(job, 4)
    with hook_of(job) as hook:
        with pytest.raises(WaitTimeoutError, match="step 4 was not built"):
            bench.step(hook, 4, 0.05)
        assert list(job.layout.bench.iterdir()) == []


def test_a_request_that_the_daemon_took_for_a_dead_ones_is_made_again(tmp_path: Path) -> None:
    job = SmallJob(tmp_path / "job")
    full(job, 4)
    with hook_of(job) as hook:
        found: list[Version] = []
        asking = threading.Thread(target=lambda: found.append(bench.step(hook, 4, LONG)))
        asking.start()
        wait_until(lambda: list(job.layout.bench.glob("*.json")), "it asks").pop().unlink()
        with at_work(job):
            asking.join(LONG)
        assert found == [Version(0, 4)]


def test_a_trainer_does_not_wait_for_an_explorer_that_evaluates_a_step(served: SmallJob) -> None:
    settings = SyncSettings(max_explorer_lag=0)
    with (
        hook_of(served) as hook,
        TrainerSynchronizer(
            served.layout.root, settings=settings, seams=Seams(poll=0.02)
        ) as trainer,
    ):
        trainer.set_trainer_status(RunningStatus.RUNNING)
        hook.load_step(4, LONG)
        assert trainer.wait_for_explorers(0.05)


def test_a_job_with_a_memory_folder_has_its_checkpoints_built_beside_it(
    served: SmallJob, tmp_path: Path
) -> None:
    memory = SmallJob(tmp_path / "memory")
    publish(memory, 9)
    with hook_of(served, memory_dir=memory.layout.root) as hook:
        assert hook.pull(0) == Version(1, 9)
        assert hook.load_step(4, LONG) == Version(0, 4)
        assert hook.get_weight("weight")[0] == 4
        assert hook.pull(LONG) == Version(1, 9)


def test_publishing_a_step_is_refused_while_another_explorer_follows(served: SmallJob) -> None:
    other = hook_of(served, "other")
    with hook_of(served) as hook:
        with pytest.raises(InvalidSettingsError, match="newest version for other too"):
            hook.pull_step(4, LONG)
        assert served.layout.state_pointer.read_text() == "8\n"
        other.load_step(0, LONG)  # it follows nothing now
        assert hook.pull_step(4, LONG) == Version(2, 4)
        other.pull(LONG)
        with pytest.raises(InvalidSettingsError):
            hook.synchronizer.set_model_state_dict_with_step_num(8, timeout=LONG)
        other.close()
        assert hook.pull_step(8, LONG) == Version(3, 8)
