"""Steps that explorers evaluate: built for one explorer alone, and nobody else is moved."""

import errno
import os
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from explorer_hooks import bench
from explorer_hooks.engines.fake import FakeEngine
from explorer_hooks.engines.sglang_server import SGLangServer
from explorer_hooks.hook import ExplorerHook
from explorer_hooks.staging import Staging
from syncd.checkpoint.safetensors_header import HeaderEntry, header_bytes
from syncd.checkpoint.version import read_manifest
from syncd.coordination import TrainerSynchronizer
from syncd.coordination.member import Doubles
from syncd.daemon.config import DaemonConfig
from syncd.operate.offline import prune_now
from syncd.protocol.errors import (
    CancelledError,
    EngineMismatchError,
    InvalidSettingsError,
    JobUnavailableError,
    NoRoomError,
    SaveNotReadyError,
    SupersededError,
)
from syncd.protocol.names import NAME_MAP
from syncd.protocol.policy import RunningStatus, SyncSettings, Version
from syncd.protocol.records import Names
from syncd.storage.calls import Calls, Free
from syncd.storage.job import Job
from tests.engines.sglang_fake import FakeSGLang
from tests.explorers import LONG, leased, publish, pulls, report
from tests.jobs import LEASE_TIME, SmallJob, receipt_of, weights
from tests.multiprocess.processes import wait_until
from tests.refusals import invalid, save_fails, too_late
from tests.storages import STORAGE, Clock, RuledStorage

pytestmark = pytest.mark.lagging
CONFIG = DaemonConfig(keep=1, prune_steps=False)


def full(job: SmallJob, *steps: int) -> None:
    """Full checkpoints, which no pointer names."""
    for step in steps:
        job.save(step, point=False)
        (job.step(step) / ".full_checkpoint").touch()


def builds(job: SmallJob) -> list[Path]:
    """What is in all sessions' folders."""
    return sorted(job.layout.bench.glob("*/*"))


def is_empty(job: SmallJob) -> bool:
    return list(job.layout.bench.iterdir()) == []


# -- the daemon ------------------------------------------------------------------------------------


def build(job: SmallJob, session: str, step: int) -> Path:
    """A build of an explorer that lives."""
    beat(job, session)
    folder = job.layout.bench / session / f"global_step_{step}-0"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").touch()
    return folder


def beat(job: SmallJob, session: str) -> None:
    job.session(session).write_text(str(time.monotonic_ns()))


def test_a_step_is_kept_while_its_explorer_lives_and_then_pruned_and_its_build_swept(
    job: SmallJob, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    job.save(1)
    with job.daemon(DaemonConfig(keep=1), clock=clock) as loop:
        loop.run_once()
        folder = build(job, "explorer", 1)
        job.save(2)
        for _ in range(8):
            loop.run_once()
            clock.advance(LEASE_TIME / 4)
            beat(job, "explorer")
        assert job.step(1).exists()
        assert folder.exists()
        assert "it was being pruned" not in caplog.text, "an explorer is reading there"
        for _ in range(24):
            loop.run_once()
            clock.advance(LEASE_TIME / 4)
        assert is_empty(job)
        assert not job.step(1).exists()


def test_a_step_that_is_built_while_it_is_pruned_is_put_back(
    ruled: SmallJob, storage: RuledStorage
) -> None:
    ruled.save(1)
    with ruled.daemon(DaemonConfig(keep=1)) as loop:
        loop.run_once()
        ruled.save(2)
        step = str(ruled.step(1))
        storage.once("rename", lambda *_: build(ruled, "explorer", 1), where=step)
        loop.run_once()
        assert ruled.step(1).exists()
        assert ("step", "global_step_1") not in ruled.audit


def test_whatever_is_not_a_live_explorers_folder_is_swept(job: SmallJob) -> None:
    bench_dir, outside = job.layout.bench, job.root / "outside"
    outside.mkdir()
    (outside / "file").touch()
    living, dead = build(job, "living", 1), build(job, "dead", 2)
    job.session("dead").unlink()
    (dead / ("n" * 255)).mkdir()
    (dead / "link").symlink_to(outside, target_is_directory=True)
    os.mkfifo(dead / "pipe")
    (bench_dir / ("n" * 251)).mkdir()
    (bench_dir / "ask.json").write_bytes(b"{}")  # a request of syncd 0.2
    (bench_dir / "link").symlink_to(outside, target_is_directory=True)
    os.mkfifo(bench_dir / "pipe")
    (bench_dir / os.fsdecode(b"\xff\n")).mkdir()
    os.mknod(bench_dir / "socket", stat.S_IFSOCK | 0o600)
    job.hosts.settle()
    job.run(CONFIG)
    assert builds(job) == [living]
    assert list(bench_dir.iterdir()) == [living.parent]
    assert list(outside.iterdir()) == [outside / "file"]


def test_a_folder_that_cannot_be_swept_stops_nothing_else(
    ruled: SmallJob, storage: RuledStorage
) -> None:
    storage.refuse("rename", errno.EBUSY, where="bench/a-dead")
    stuck = ruled.layout.bench / "a-dead"
    stuck.mkdir()
    (ruled.layout.bench / "b-dead").mkdir()
    with ruled.daemon(CONFIG) as loop:
        ruled.save(1)
        loop.run_once()
        assert ruled.latest.step == 1
        assert list(ruled.layout.bench.iterdir()) == [stuck]
        storage.rules.clear()
        loop.run_once()
    assert is_empty(ruled)


def test_a_superseded_daemon_sweeps_nothing(job: SmallJob) -> None:
    (job.layout.bench / "dead").mkdir()
    with job.daemon(CONFIG) as loop:
        job.take_over()
        with pytest.raises(SupersededError):
            loop.run_once()
    assert not is_empty(job)


def test_pruning_alone_sweeps_dead_explorers_folders(job: SmallJob) -> None:
    publish(job, 8)
    living = build(job, "living", 8)
    (job.layout.bench / "dead").mkdir()
    prune_now(Job(job.hosts.storage(), job.layout), CONFIG)
    assert list(job.layout.bench.iterdir()) == [living.parent]


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
    return ExplorerHook(job.root, name, engine, settings=settings, poll=0.02, **options)


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
def here(tmp_path: Path) -> SmallJob:
    """A job on a local disk."""
    return SmallJob(tmp_path / "job")


@pytest.fixture
def served(here: SmallJob) -> Iterator[SmallJob]:
    """A daemon that has published step 8; 0, 4 and 8 are full checkpoints."""
    full(here, 0, 4, 8)
    here.point(8)
    with at_work(here):
        wait_until(here.layout.latest.exists, "it is published")
        yield here


def test_a_bench_of_every_full_checkpoint_moves_nobody_else(served: SmallJob) -> None:
    root, engine = served.root, Here()
    with hook_of(served, "serving") as serving, hook_of(served, engine=engine) as hook:
        assert serving.pull(LONG) == Version(1, 8)
        before = served.layout.latest.read_bytes(), served.layout.saves.read_bytes()
        seen = bench.every_full_checkpoint(hook, root, timeout=LONG)
        for step, version in zip((0, 4, 8), seen, strict=True):
            assert version.step == step
            assert engine.content == (served.actor(step) / "model.safetensors").read_bytes()
            assert (report(served, "bench").bench, report(served, "bench").step) == (step, None)
            assert serving.pull(0) is None
            with hook_of(served, f"newcomer-{step}") as newcomer:
                assert newcomer.pull(LONG) == Version(1, 8)
        assert (served.layout.latest.read_bytes(), served.layout.saves.read_bytes()) == before
        assert served.pointed == "8\n"
        assert (served.versions, serving.version) == (["v000001"], Version(1, 8))
        assert builds(served) == []
    wait_until(lambda: is_empty(served), "the explorer's folder goes with its session")


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
        assert builds(served) == []
        hook.load_step(0, LONG)
    assert builds(served) == []


def test_a_server_in_a_container_that_mounts_only_the_job_loads_a_step(served: SmallJob) -> None:
    root = served.root.resolve()
    fake = FakeSGLang(str(served.version(1)))
    server = SGLangServer("http://127.0.0.1:1", transport=fake.transport)
    with hook_of(served, "server", engine=server) as hook:
        assert hook.load_step(4, LONG) == Version(0, 4)
        loaded = Path(fake.model_path)
        assert loaded == loaded.resolve()
        assert loaded.is_relative_to(root)
        assert not [path for path in loaded.iterdir() if path.is_symlink()]


def test_a_staged_step_needs_no_build_any_more(served: SmallJob, tmp_path: Path) -> None:
    with hook_of(served, staging=Staging(tmp_path / "stage")) as hook:
        hook.load_step(4, LONG)
        assert builds(served) == []
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
        assert builds(served) == []


def test_a_version_of_the_step_is_leased_and_no_daemon_is_needed(here: SmallJob) -> None:
    for step in (1, 2, 3):
        publish(here, step, keep=9)  # and prunes the folders below
    with hook_of(here) as hook:
        assert hook.load_step(2, 0) == Version(2, 2)
        assert leased(here) == [2]
        assert list(here.layout.bench.iterdir()) == []
        # A follower again: LATEST is what it is compared with.
        pulls(hook, 3, 3)
        assert hook.load_step(3, 0) == Version(3, 3)
        assert report(here, "bench").bench is None


def test_a_step_that_was_saved_again_since_it_was_published_is_built_as_it_is_now(
    here: SmallJob,
) -> None:
    full(here, 1)
    publish(here, 1)
    publish(here, 2)
    here.save(1, 7.0, counter=1, point=False)
    with at_work(here), hook_of(here) as hook:
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
        assert served.pointed == "8\n"
        assert is_empty(served)


def test_a_step_that_cannot_be_built_is_an_error_with_its_reason(served: SmallJob) -> None:
    broken = weights(4.0, 2.0, 3.0)[:-4]
    served.put(served.actor(4) / "model.safetensors", broken)
    served.receipt(4, "run-4-1", 0, 1, receipt_of(broken))
    with hook_of(served) as hook:
        with save_fails(r"step 4 cannot be built: .*model\.safetensors"):
            bench.step(hook, 4, LONG)
        assert builds(served) == []
        assert list(served.layout.quarantine.iterdir()) == []


def test_a_daemon_that_has_not_reported_its_settings_is_named_at_once(here: SmallJob) -> None:
    full(here, 4)
    publish(here, 8)
    here.layout.daemon_report.unlink()
    with hook_of(here) as hook, pytest.raises(JobUnavailableError, match="versions: start it"):
        bench.step(hook, 4)
    assert is_empty(here)


@pytest.mark.slow
@pytest.mark.parametrize("names", [None, "trainer"])
def test_a_build_is_what_the_daemon_would_publish(here: SmallJob, names: Names | None) -> None:
    entries = [HeaderEntry(f"model.encoder.{name}", "F32", (3,), at, at + 12)
               for name, at in (("a", 0), ("b", 12))]  # fmt: skip
    content = header_bytes(entries) + bytes(24)
    for step in (4, 8):
        full(here, step)
        config = here.actor(step) / "huggingface" / "config.json"
        here.put(config, b'{"model_type": "granite_speech"}')
        here.put(here.actor(step) / "model.safetensors", content)
        here.receipt(step, f"run-{step}-1", 0, 1, receipt_of(content))
    here.point(8)
    config = DaemonConfig(cast="bf16", names=names, max_shard_size=6, digests=False)
    here.run(config)
    published = read_manifest(STORAGE, here.version(1))
    with hook_of(here) as hook:
        built = hook.synchronizer.hold_step(4).manifest
    changes = {"sequence": 0, "step": 4, "save_id": "run-4-1", "timings": built.timings}
    assert built == published.model_copy(update=changes)
    assert (built.dtype, built.names) == ("BF16", names or "hub")
    assert NAME_MAP in [file.name for file in built.files]


def test_an_explorer_holds_two_builds_at_most(served: SmallJob) -> None:
    served.save(2, point=False)
    with hook_of(served) as hook:
        held = [hook.synchronizer.hold_step(step) for step in (0, 2)]
        for _ in range(2):
            with invalid("holds 2 built steps already"):
                hook.synchronizer.hold_step(4)
        held[0].release()
        assert hook.synchronizer.hold_step(4).step == 4


def test_a_build_that_does_not_fit_on_the_disk_is_not_begun(
    served: SmallJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hook_of(served) as hook:
        monkeypatch.setattr(Calls, "free", lambda *_: Free(5, None))
        with pytest.raises(NoRoomError, match=r"step 4 needs .* are free"):
            bench.step(hook, 4)
        assert builds(served) == []


def test_a_save_that_is_not_complete_is_waited_for_at_most_the_timeout(here: SmallJob) -> None:
    publish(here, 8)
    here.save(4, receipts=False, point=False)
    actor = here.actor(4)
    (actor / "model.safetensors").rename(actor / "later")
    with hook_of(here) as hook:
        with too_late("step 4 was not complete in time"):
            bench.step(hook, 4, 0.05)
        (actor / "later").rename(actor / "model.safetensors")
        with too_late("no receipts"):
            bench.step(hook, 4, 0.05)
        assert is_empty(here)
        assert bench.step(hook, 4, LONG) == Version(0, 4)


def test_a_build_ends_when_its_hook_is_cancelled(here: SmallJob) -> None:
    storage = RuledStorage()
    full(here, 4)
    publish(here, 8)
    with hook_of(here, storage=storage) as hook:
        storage.once("create", lambda *_: hook.cancel(), where="bench")
        with pytest.raises(CancelledError):
            bench.step(hook, 4)
        assert builds(here) == []


def test_a_trainer_does_not_wait_for_an_explorer_that_evaluates_a_step(served: SmallJob) -> None:
    settings = SyncSettings(max_explorer_lag=0)
    with (
        hook_of(served) as hook,
        TrainerSynchronizer(served.root, settings=settings, doubles=Doubles(poll=0.02)) as trainer,
    ):
        trainer.set_trainer_status(RunningStatus.RUNNING)
        hook.load_step(4, LONG)
        assert trainer.wait_for_explorers(0.05)


def test_a_job_with_a_memory_folder_has_its_checkpoints_built_beside_it(
    served: SmallJob, tmp_path: Path
) -> None:
    memory = SmallJob(tmp_path / "memory")
    publish(memory, 9)
    with hook_of(served, memory_dir=memory.root) as hook:
        pulls(hook, 1, 9)
        assert hook.load_step(4, LONG) == Version(0, 4)
        assert hook.get_weight("weight")[0] == 4
        assert hook.pull(LONG) == Version(1, 9)


def test_publishing_a_step_is_refused_while_another_explorer_follows(served: SmallJob) -> None:
    other = hook_of(served, "other")
    with hook_of(served) as hook:
        with invalid("newest version for other too"):
            hook.pull_step(4, LONG)
        assert served.pointed == "8\n"
        other.load_step(0, LONG)  # it follows nothing now
        assert hook.pull_step(4, LONG) == Version(2, 4)
        other.pull(LONG)
        with pytest.raises(InvalidSettingsError):
            hook.synchronizer.set_model_state_dict_with_step_num(8, timeout=LONG)
        other.close()
        assert hook.pull_step(8, LONG) == Version(3, 8)
