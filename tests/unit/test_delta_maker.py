"""The daemon makes deltas beside its work: each version is published in time, whatever happens."""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from syncd.checkpoint.version import read_manifest
from syncd.cli import cli
from syncd.daemon.config import DaemonConfig
from syncd.daemon.delta_maker import DeltaWork, on_a_thread
from syncd.daemon.loop import Loop
from syncd.deltas.delta_folder import read_delta, verify_delta
from syncd.deltas.ends import NoDeltaError, content_of
from syncd.protocol.errors import SupersededError, VerificationError
from syncd.protocol.records import encode, parse
from syncd.protocol.reports import DeltaProgress, ExplorerReport, Load, Reload
from syncd.storage.leases import Lease
from tests.crash.invariants import check, leftovers, look, restart
from tests.jobs import LEASE_TIME, SmallJob
from tests.lagging import Hosts
from tests.made_deltas import quick, work
from tests.storages import CHANGES, Clock, RuledStorage, refuse

ON = DaemonConfig(deltas="on", keep=99)
pytestmark = pytest.mark.lagging

#: A guard against a thread that hangs, in seconds.
_HANGS = 60


@pytest.fixture
def storage(hosts: Hosts) -> RuledStorage:
    return hosts.ruled()


@pytest.fixture
def job(tmp_path: Path, storage: RuledStorage, hosts: Hosts) -> SmallJob:
    return SmallJob(tmp_path / "job", storage, hosts=hosts)


def deltas(job: SmallJob) -> list[str]:
    return sorted(os.listdir(job.layout.deltas)) if job.layout.deltas.exists() else []


def drafts(job: SmallJob) -> list[str]:
    return [path.name for path in job.layout.epochs.glob("*/building/*")]


def progress_of(job: SmallJob) -> DeltaProgress:
    path = job.layout.delta_progress
    return parse(DeltaProgress, path.read_bytes(), path)


def publish(job: SmallJob, loop: Loop, *steps: int) -> None:
    for step in steps:
        job.save(step)
        loop.run_once()
        assert job.latest.step == step


class Held:
    """Work on a delta that goes on until a test lets it, or until it is cancelled."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.may_go_on = threading.Event()
        self.threads: list[threading.Thread] = []

    def start(self, task: Callable[[], None]) -> Any:
        thread = on_a_thread(task)
        assert isinstance(thread, threading.Thread)
        self.threads.append(thread)
        return thread

    def make(self, *given: Any, cancel: Callable[[], None], progress: Any) -> Any:
        progress(0, 2)
        self.begun.set()
        while not self.may_go_on.wait(0.005):
            cancel()
        return quick(*given, cancel=cancel, progress=progress)

    def finish(self) -> None:
        self.may_go_on.set()
        self.join()

    def join(self) -> None:
        for thread in self.threads:
            thread.join(_HANGS)
            assert not thread.is_alive()

    @property
    def work(self) -> DeltaWork:
        return work(self.make, self.start)


@contextmanager
def begun(job: SmallJob, config: DaemonConfig = ON) -> Iterator[tuple[Held, Loop]]:
    """A daemon that has begun a delta to the second version, which ends after it at the latest."""
    held = Held()
    try:
        with job.daemon(config, deltas=held.work) as loop:
            publish(job, loop, 1, 2)
            assert held.begun.wait(_HANGS)
            yield held, loop
    finally:
        held.finish()


def test_each_version_gets_a_delta_from_the_one_before_it(job: SmallJob) -> None:
    with job.daemon(ON, deltas=work()) as loop:
        for step in (1, 2, 5):
            publish(job, loop, step)
            base = job.latest.sequence - 1
            assert job.latest.delta_from == (base or None)
    assert deltas(job) == ["d000002", "d000003"]
    for sequence in (2, 3):
        delta = read_delta(job.storage, job.layout.delta(sequence))
        verify_delta(job.storage, job.layout.delta(sequence), delta)
        for end, number in ((delta.base, sequence - 1), (delta.target, sequence)):
            manifest = read_manifest(job.storage, job.layout.version(number))
            assert (end.sequence, end.save_id) == (number, manifest.save_id)
            assert end.content == content_of(manifest)
    assert drafts(job) == []
    progress = progress_of(job)
    assert (progress.state, progress.sequence, progress.base) == ("made", 3, 2)


@pytest.mark.local_only("the lagging client is of one thread")
def test_a_real_child_makes_one_that_a_reader_believes(job: SmallJob) -> None:
    threads: list[Any] = []

    def start(task: Callable[[], None]) -> Any:
        threads.append(on_a_thread(task))
        return threads[-1]

    with job.daemon(ON, deltas=DeltaWork(start=start)) as loop:
        for step, last in ((1, 999.0), (2, -1.0)):
            job.save(step, *map(float, range(999)), last)
            loop.run_once()
        threads[0].join(_HANGS)
        loop.run_once()
    delta = read_delta(job.storage, job.layout.delta(2))
    verify_delta(job.storage, job.layout.delta(2), delta)
    assert (delta.changed, delta.elements) == (1, 1000)


def test_the_work_begins_once_latest_names_the_version(job: SmallJob) -> None:
    named: list[int] = []

    def make(*given: Any, **more: Any) -> Any:
        named.append(job.latest.sequence)
        return quick(*given, **more)

    with job.daemon(ON, deltas=work(make)) as loop:
        publish(job, loop, 1, 2, 3)
    assert named == [2, 3]


def test_a_reader_that_sees_the_new_latest_finds_the_delta_announced(
    job: SmallJob, storage: RuledStorage
) -> None:
    seen: list[tuple[int, str, int]] = []

    def after_latest(method: str, given: tuple[Any, ...]) -> None:
        is_named = method == "sync_folder" and given[0] == job.layout.state
        if is_named and job.layout.latest.exists() and job.latest.delta_from:
            told = progress_of(job)
            seen.append((told.sequence, told.state, told.base))

    storage.rules.append(after_latest)
    with job.daemon(ON, deltas=work()) as loop:
        publish(job, loop, 1, 2)
    assert seen[0] == (2, "making", 1)


ERRORS = (
    OSError(errno.ENOSPC, "full"),
    OSError(errno.EIO, "broken"),
    NoDeltaError("too many elements differ"),
    MemoryError(),
    ZeroDivisionError("a fault of ours"),
)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_whatever_fails_there_is_no_delta_one_warning_and_every_version_in_time(
    job: SmallJob, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    def make(*given: Any, **_: Any) -> Any:
        (given[3] / "blocks").write_bytes(b"half")
        raise error

    caplog.set_level(logging.WARNING)
    with job.daemon(ON, deltas=work(make)) as loop:
        for step in (1, 2, 3):
            publish(job, loop, step)
            assert progress_of(job).state == "none" if step > 1 else True
    assert deltas(job) == []
    assert drafts(job) == []
    said = [r for r in caplog.records if r.getMessage().startswith("no delta to version")]
    assert len(said) == 1


@pytest.mark.parametrize("refused", ["mkdir", "rename", "sync_folder"])
def test_storage_that_refuses_the_folder_of_deltas_delays_no_version(
    job: SmallJob, storage: RuledStorage, refused: str
) -> None:
    storage.rules.append(refuse(refused, errno.EACCES, where="/deltas"))
    storage.rules.append(refuse(refused, errno.EACCES, where="/d00000"))
    with job.daemon(ON, deltas=work()) as loop:
        publish(job, loop, 1, 2, 3)
    storage.rules.clear()
    with job.daemon(ON, deltas=work()) as loop:
        publish(job, loop, 4)
    assert "d000004" in deltas(job)
    assert drafts(job) == []


def test_a_name_that_is_taken_stays_as_it_is(job: SmallJob) -> None:
    with job.daemon(ON, deltas=work()) as loop:
        publish(job, loop, 1)
        foreign = job.layout.delta(2) / "foreign"
        foreign.parent.mkdir(parents=True)
        foreign.touch()
        job.hosts.settle()
        publish(job, loop, 2)
        assert "exists" in (progress_of(job).why or "")
        publish(job, loop, 3)
    assert [path.name for path in job.layout.delta(2).iterdir()] == ["foreign"]
    assert deltas(job) == ["d000002", "d000003"]


@pytest.mark.local_only("the lagging client is of one thread")
def test_a_delta_that_was_begun_is_finished_while_newer_versions_are_published(
    job: SmallJob,
) -> None:
    with begun(job) as (held, loop):
        for step in (3, 4, 5):
            publish(job, loop, step)
            assert job.latest.delta_from is None
        assert len(held.threads) == 1
        held.finish()
        loop.run_once()
        publish(job, loop, 6)
        held.join()
    assert deltas(job) == ["d000002", "d000006"]
    assert drafts(job) == []


@pytest.mark.local_only("the lagging client is of one thread")
def test_a_rollback_lets_a_delta_that_was_begun_finish(job: SmallJob) -> None:
    with begun(job) as (held, loop):
        job.ask_rollback(1)
        job.hosts.settle()
        loop.run_once()
        assert job.latest.sequence == 3
        held.finish()
    assert deltas(job) == ["d000002"]


def test_the_progress_says_how_long_the_last_three_deltas_took_at_most(job: SmallJob) -> None:
    clock, took = Clock(), [4.0, 2.0, 1.0, 3.0, 0.0]
    seconds: list[float | None] = []

    def make(*given: Any, **more: Any) -> Any:
        seconds.append(progress_of(job).seconds)
        clock.advance(took.pop(0))
        return quick(*given, **more)

    with job.daemon(ON, deltas=work(make), clock=clock) as loop:
        for step in range(1, 7):
            publish(job, loop, step)
    assert seconds == [None, 4.0, 4.0, 4.0, 3.0]


@pytest.mark.local_only("the lagging client is of one thread")
def test_base_and_target_are_not_pruned_while_the_work_goes_on_and_are_pruned_after_it(
    job: SmallJob,
) -> None:
    with begun(job, DaemonConfig(deltas="on", keep=1)) as (held, loop):
        publish(job, loop, 3)
        for _ in range(3):
            loop.run_once()
        assert job.versions == ["v000001", "v000002", "v000003"]
        held.finish()
        loop.run_once()
        assert deltas(job) == ["d000002"]
        assert job.versions == ["v000003"]


@pytest.mark.local_only("the lagging client is of one thread")
def test_a_sweep_leaves_the_draft_alone(job: SmallJob, storage: RuledStorage) -> None:
    with begun(job) as (held, loop):
        storage.rules.append(refuse("rename", errno.EIO, where="/building/v000003"))
        loop._tidying.leftovers()
        loop.run_once()
        assert drafts(job) == ["d000002"]
        held.finish()
    assert deltas(job) == ["d000002"]


@pytest.mark.local_only("the lagging client is of one thread")
def test_the_end_of_a_daemon_ends_the_work(job: SmallJob) -> None:
    held = Held()
    with job.daemon(ON, deltas=held.work) as loop:
        publish(job, loop, 1, 2)
        assert held.begun.wait(_HANGS)
    held.join()
    assert deltas(job) == []
    assert drafts(job) == []


@pytest.mark.local_only("the lagging client is of one thread")
def test_a_superseded_daemon_commits_no_delta(job: SmallJob) -> None:
    with begun(job) as (held, _):
        successor = job.take_over()
        held.finish()
        assert deltas(job) == []
        assert [path.name.partition("-")[0] for path in successor.condemned()] == ["d000002"]


@pytest.mark.local_only("the lagging client is of one thread")
def test_the_next_daemon_takes_the_progress_of_the_last_one_down(job: SmallJob) -> None:
    with begun(job):
        left = job.layout.delta_progress.read_bytes()
    job.layout.delta_progress.write_bytes(left)  # as after a kill
    assert progress_of(job).state == "making"
    with job.daemon(ON, deltas=work()):
        assert not job.layout.delta_progress.exists()
        assert job.latest.delta_from == 1  # which says nothing without it


def test_signs_of_life_come_while_the_work_advances_and_only_then(job: SmallJob) -> None:
    signs: list[int] = []
    clock = Clock()

    def make(*given: Any, cancel: Any, progress: Any) -> Any:
        for done in range(5):
            progress(done, 5)
            signs.append(progress_of(job).done)
            clock.advance(1.0 if done < 3 else 0.3)
        return quick(*given, cancel=cancel, progress=progress)

    with job.daemon(ON, deltas=work(make), clock=clock) as loop:
        publish(job, loop, 1, 2)
    assert signs == [0, 1, 2, 3, 3]


def report(job: SmallJob, name: str, *, base: int | None, **more: Any) -> None:
    usual = {"status": "running", "sequence": 1, "step": 1, "time": 0.0}
    told = ExplorerReport.model_validate(
        {"name": name, "session": f"{name}-session", "delta_base": base, **usual, **more}
    )
    job.put(job.layout.explorer(name), encode(told))


def lease(job: SmallJob, sequence: int, name: str) -> Lease:
    """A lease of a live explorer."""
    job.layout.session(f"{name}-session").touch()
    return job.lease(sequence, f"{name}-session", name)


@pytest.mark.parametrize(
    ("bases", "stages", "expected"),
    [
        ({}, {}, []),
        ({"a": 1}, {}, []),
        ({"a": 1, "b": None}, {}, []),
        ({"a": 1, "b": 1}, {}, ["d000002"]),  # explorers of 0.2 do not tell their host
        ({"a": 1, "b": 1}, {"a": "here", "b": "here"}, []),
        ({"a": 1, "b": 1, "c": None}, {"a": "here", "b": "there"}, ["d000002"]),
    ],
)
def test_auto_makes_deltas_while_live_explorers_of_two_hosts_could_use_one(
    job: SmallJob, bases: dict[str, int | None], stages: dict[str, str], expected: list[str]
) -> None:
    with job.daemon(DaemonConfig(keep=99), deltas=work()) as loop:
        publish(job, loop, 1)
        for name, base in bases.items():
            lease(job, 1, name)
            report(job, name, base=base, stage=stages.get(name))
        job.hosts.settle()
        loop.run_once()
        publish(job, loop, 2)
    assert deltas(job) == expected


@pytest.mark.parametrize("gone", ["stopped", "dead", "report gone"])
def test_an_explorer_that_is_gone_counts_no_more(job: SmallJob, gone: str) -> None:
    clock = Clock()
    config = DaemonConfig(keep=99, dead_reader_grace=10.0)
    with job.daemon(config, deltas=work(), clock=clock) as loop:
        publish(job, loop, 1)
        leases = {}
        for name in ("a", "b"):
            leases[name] = lease(job, 1, name)
            report(job, name, base=1)
        job.hosts.settle()
        loop.run_once()
        publish(job, loop, 2)
        assert deltas(job) == ["d000002"]
        match gone:
            case "stopped":
                report(job, "a", base=1, status="stopped")
                leases["a"].release()
            case "dead":
                for beat in range(16):
                    job.layout.session("b-session").write_text(f"{beat}")
                    job.hosts.settle()
                    loop.run_once()
                    clock.advance(LEASE_TIME / 4)
            case "report gone":
                job.layout.explorer("a").unlink()
        job.hosts.settle()
        loop.run_once()
        publish(job, loop, 3)
        assert deltas(job) == ["d000002"]


def test_auto_without_the_extra_is_off_and_says_so_once(
    job: SmallJob, caplog: pytest.LogCaptureFixture
) -> None:
    missing = work(why_not_here=lambda: "zstandard cannot be imported: pip install 'syncd[deltas]'")
    with job.daemon(ON, deltas=missing) as loop:
        for step in (1, 2, 3):
            publish(job, loop, step)
            assert job.latest.delta_from is None
    assert caplog.text.count("pip install 'syncd[deltas]'") == 1
    assert deltas(job) == []


def test_off_makes_none_and_prunes_those_there_are(job: SmallJob) -> None:
    with job.daemon(ON, deltas=work()) as loop:
        publish(job, loop, 1, 2)
        loop.config = ON.model_copy(update={"deltas": "off"})
        publish(job, loop, 3)
    assert deltas(job) == []
    assert ("delta", "d000002") in job.audit


def test_versions_without_digests_have_no_deltas(job: SmallJob) -> None:
    config = ON.model_copy(update={"digests": False})
    with job.daemon(config, deltas=work()) as loop:
        publish(job, loop, 1, 2)
        assert job.latest.delta_from is None
        loop.config = ON
        publish(job, loop, 3)
        assert "no digests" in (progress_of(job).why or "")
        publish(job, loop, 4)
    assert deltas(job) == ["d000004"]


def test_a_rollback_makes_none_and_the_version_after_it_does(job: SmallJob) -> None:
    with job.daemon(ON, deltas=work()) as loop:
        publish(job, loop, 1, 2)
        job.ask_rollback(1)
        job.hosts.settle()
        loop.run_once()
        assert (job.latest.sequence, job.latest.delta_from) == (3, None)
        publish(job, loop, 4)
    assert deltas(job) == ["d000002", "d000004"]
    delta = read_delta(job.storage, job.layout.delta(4))
    first = read_manifest(job.storage, job.layout.version(1))
    assert (delta.base.sequence, delta.base.content) == (3, content_of(first))


def test_deltas_give_way_to_a_version_that_finds_no_room(
    job: SmallJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    with job.daemon(ON, deltas=work()) as loop:
        publish(job, loop, 1, 2)
        real = job.storage.free

        def free(path: Path) -> Any:
            return real(path)._replace(bytes=0 if job.layout.delta(2).exists() else 10**12)

        monkeypatch.setattr(job.storage, "free", free)
        publish(job, loop, 3)
    assert deltas(job) == ["d000003"]
    assert ("delta", "d000002") in job.audit


def fails_at(version: int) -> Callable[..., Any]:
    """Makes the deltas to the versions before."""
    others = iter(range(2, version))

    def make(*given: Any, **more: Any) -> Any:
        if next(others, None) is None:
            raise NoDeltaError("95 % of the elements differ")
        return quick(*given, **more)

    return make


def test_the_journal_and_the_counters_tell_of_each(job: SmallJob) -> None:
    with job.daemon(ON, deltas=work(fails_at(3))) as loop:
        publish(job, loop, 1, 2, 3)
        assert loop._journal.counters.deltas_made == 1
    lines = map(json.loads, filter(None, job.layout.journal.read_bytes().splitlines()))
    told = [(one["event"], one["version"], one["of"]) for one in lines if "delta" in one["event"]]
    assert told == [("delta", 2, 1), ("no_delta", 3, 2)]


class TakeOver:
    """Another daemon takes over before the k-th change of storage once LATEST names step 2."""

    def __init__(self, job: SmallJob, moment: int) -> None:
        self._job = job
        self.left = moment

    def __call__(self, method: str, _: tuple[Any, ...]) -> None:
        if method in CHANGES and self._job.latest.step == 2:
            self.left -= 1
            if self.left == 0:
                self._job.take_over()


@pytest.mark.slow
def test_whichever_call_a_take_over_comes_before_there_is_a_whole_delta_or_none(
    tmp_path: Path, hosts: Hosts, request: pytest.FixtureRequest
) -> None:
    # The calls are the same on a lagging host: an ordinary run tries every fourth moment there.
    stride = 4 if hosts.lags and not request.config.getoption("--deep") else 1
    made, moment, going_on = [], 1 - stride, True
    while going_on:
        moment += stride
        storage = hosts.ruled()
        job = SmallJob(tmp_path / f"{moment}", storage, hosts=hosts)
        other = TakeOver(job, moment)
        with suppress(SupersededError), job.daemon(ON, deltas=work()) as loop:
            publish(job, loop, 1)
            storage.rules.append(other)
            publish(job, loop, 2)
        storage.rules.clear()
        going_on = other.left <= 0
        check(job, look(job))
        made.append(bool(deltas(job)))
        restart(job, Clock(), rounds=2)
        assert (job.latest.sequence, job.latest.step) == (2, 2)
        assert leftovers(job) == []
    assert moment > 10
    # Once it is there it stays, whoever comes.
    assert made == sorted(made)
    assert set(made) == {False, True}


def test_status_history_verify_and_the_dry_run_show_deltas(job: SmallJob) -> None:
    with job.daemon(ON, deltas=work(fails_at(4))) as loop:
        publish(job, loop, 1, 2, 3, 4)
    root = str(job.layout.root)
    told = json.loads(said("status", root, "--json"))
    size = told["deltas"][0]["bytes"]
    expected = [{"sequence": n, "base": n - 1, "bytes": size, "changed": 1 / 3} for n in (2, 3)]
    assert told["deltas"] == expected
    assert told["delta_progress"]["state"] == "none"
    assert told["latest"]["delta_from"] == 3
    text = " ".join(said("status", root).split())
    newest = f"deltas v2 to v3: {size} B, 33.33% of the elements"
    assert f"{newest}; 1 older: {size} B; no delta to v4" in text
    assert "made the delta from v1 to v2" in text
    assert "no delta from v3 to v4: 95 % of the elements differ" in text
    versions = json.loads(said("history", root, "--json"))["versions"]
    assert [one["delta"] and one["delta"]["bytes"] for one in versions] == [None, size, size, None]
    assert versions[3]["delta"]["why"] == "95 % of the elements differ"
    table = [line.split() for line in said("history", root).splitlines()]
    assert "delta" in table[0]
    assert "none" in table[4]
    assert f"d000003: delta from version 2, whole ({size} B, 33.33% of the elements)" in said(
        "verify", root
    )
    dry = said("prune", root, "--dry-run", "--keep", "9", "--keep-deltas", "1", "--no-prune-steps")
    assert dry.strip() == "would delete delta d000002: not among the newest 1"
    (job.layout.delta(2) / "blocks").write_bytes(b"other")
    done = CliRunner().invoke(cli, ["verify", root])
    assert isinstance(done.exception, VerificationError)
    assert "d000002" in str(done.exception)


def said(*arguments: str) -> str:
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_an_explorer_that_read_a_delta_is_marked(job: SmallJob) -> None:
    with job.daemon(ON, deltas=work()) as loop:
        publish(job, loop, 1, 2)
        lease(job, 2, "a")
        reload = Reload(sequence=2, step=2, staged=True, full_bytes=0, delta_bytes=77)
        loads = (Load(sequence=2, time=0.0, delta_bytes=77),)
        report(job, "a", base=2, sequence=2, step=2, reload=reload, loads=loads)
        job.hosts.settle()
        loop.run_once()
    root = str(job.layout.root)
    live = json.loads(said("history", root, "--json"))["versions"][1]["live"]
    assert [(one["explorer"], one["delta_bytes"]) for one in live] == [("a", 77)]
    assert "a +0 ms, delta" in said("history", root)
    assert "staged by delta" in said("status", root)
