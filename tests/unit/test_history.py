"""The journal: what is kept of versions, and what ``syncd history`` and ``status`` make of it."""

import errno
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest

from explorer_hooks.engines.fake import FakeEngine
from explorer_hooks.hook import ExplorerHook
from explorer_hooks.reader import Reader
from explorer_hooks.staging import Staging
from syncd.coordination.explorer import ExplorerSynchronizer
from syncd.coordination.member import Doubles
from syncd.daemon.config import DaemonConfig
from syncd.daemon.makes import MakeWork
from syncd.daemon.telling.journal import Journal, Meter, read_journal
from syncd.operate.history import history
from syncd.protocol.errors import JobUnavailableError
from syncd.protocol.events import Event
from syncd.protocol.journal_lines import JournalLine
from syncd.protocol.layout import older_lines
from syncd.protocol.policy import RunningStatus, Version
from syncd.protocol.records import Manifest, encode
from syncd.protocol.reports import ExplorerReport, Load, Reload
from syncd.protocol.version_events import VersionPublished
from syncd.storage.append import LIMIT, append
from syncd.storage.job import Job
from tests.commands import invoke
from tests.explorers import LONG, report
from tests.jobs import Rounds, SmallJob, edit
from tests.makers import MakerHere
from tests.storages import Clock, FastStorage, RuledStorage, refuse

KEEP = DaemonConfig(keep=9)
KEEP_1 = DaemonConfig(keep=1)


def serves(job: SmallJob, name: str, sequence: int | None, **more: Any) -> None:
    usual = {"status": "running", "sequence": sequence, "time": 1.0}
    if sequence is not None:
        usual["loads"] = (Load(sequence=sequence, time=1.0),)
    record = ExplorerReport.model_validate({"name": name, "session": f"s-{name}", **usual, **more})
    job.put(job.explorer(name), encode(record))


def loads(job: SmallJob, name: str, sequence: int) -> None:
    """An explorer leases a version, which it does not serve yet."""
    job.lease(sequence, f"s-{name}", name)
    job.session(f"s-{name}").touch()


def tells(job: SmallJob, name: str, loads: list[Load], time: float) -> None:
    """An explorer's report with its last loads; it needs no lease, and has a copy of its own."""
    sequence = loads[-1].sequence
    serves(job, name, sequence, step=sequence, loads=tuple(loads), time=time)


def synchronizer(job: SmallJob, name: str, **more: Any) -> ExplorerSynchronizer:
    return ExplorerSynchronizer(job.root, name, doubles=Doubles(storage=job.explorers), **more)


def lives(job: SmallJob) -> list[tuple[int | None, str | None]]:
    return [(version, name) for event, version, name in events(job) if event == "live"]


def events(job: SmallJob) -> list[tuple[str, int | None, str | None]]:
    return [(one.event, one.version, one.explorer) for one in read_journal(job)]


def looks(loop: Rounds) -> int:
    """How many explorers' files a round opens."""
    storage = cast("RuledStorage", loop.job.storage)
    storage.calls.clear()
    loop.run_once()
    return storage.count("open_read", loop.job.layout.explorers)


@pytest.fixture
def loop(job: SmallJob, clock: Clock) -> Iterator[Rounds]:
    """A daemon that has published a version, and keeps nine."""
    with job.daemon(KEEP, clock=clock) as loop:
        loop.publish(1)
        yield loop


class Fast(Meter):
    """Explorers that take each version while the daemon's round still goes on."""

    def __init__(self) -> None:
        self.takes: list[Callable[[], object]] = []

    def tell(self, event: Event) -> None:
        for take in self.takes if isinstance(event, VersionPublished) else ():
            take()


def test_a_version_is_followed_from_its_save_to_its_end(job: SmallJob, clock: Clock) -> None:
    with job.daemon(KEEP_1, clock=clock) as loop:
        loop.publish(4)
        loads(job, "node-1", 1)
        clock.advance(2.0)
        loop.run_once()
        serves(job, "node-1", 1)
        clock.advance(1.0)
        loop.run_once()
        loop.run_once()
        job.lease_folder(1).joinpath("node-1.s-node-1").unlink()
        loop.publish(5)
        loop.run_once()
    first, second = history(job, 10)
    assert (first.version, first.step, first.on_disk) == (1, 4, False)
    assert (first.merge_seconds, first.saved) == (0.0, first.published)
    assert [(one.explorer, one.seconds) for one in first.live] == [("node-1", 3.0)]
    assert first.pruned is not None
    assert first.pruned_why == "not among the newest 1, and not leased"
    assert (second.version, second.step, second.latest, second.live) == (2, 5, True, [])
    assert history(job, 1) == [second]


def test_a_version_on_disk_is_there_however_few_are_asked_for(job: SmallJob) -> None:
    with job.daemon(DaemonConfig(keep=1)) as loop:
        for step in range(1, 6):
            loop.publish(step)
            if step == 2:
                job.lease(2, "session")
        loop.run_once()
    assert [one.version for one in history(job, 2)] == [2, 4, 5]


def test_a_daemon_that_takes_over_goes_on_and_repeats_nothing(job: SmallJob) -> None:
    for _ in range(2):
        with job.daemon(KEEP) as loop:
            loop.publish(1)
            if not job.explorer("node-1").exists():
                loads(job, "node-1", 1)
                serves(job, "node-1", 1)
            loop.run_once()
    assert events(job) == [
        ("active", None, None), ("published", 1, None), ("live", 1, "node-1"),
        ("active", None, None),
    ]  # fmt: skip


def test_an_explorer_with_a_copy_of_its_own_is_seen_though_its_lease_is_gone(
    job: SmallJob, loop: Rounds
) -> None:
    loads(job, "node-1", 1)
    loop.run_once()
    job.lease_folder(1).joinpath("node-1.s-node-1").unlink()
    loop.run_once()
    loop.clock.advance(2.0)
    serves(job, "node-1", 1)
    loop.run_once()
    loop.run_once()
    assert lives(job) == [(1, "node-1")]
    (only,) = history(job, 10)
    assert [(one.explorer, one.seconds) for one in only.live] == [("node-1", 2.0)]


def test_how_long_an_engine_paused_for_a_version_is_kept_with_it(
    job: SmallJob, loop: Rounds
) -> None:
    for name in ("node-1", "node-2"):
        loads(job, name, 1)
    tells(job, "node-1", [Load(sequence=1, time=1.0, pause=0.25004)], time=1.0)
    serves(job, "node-2", 1)
    loop.run_once()
    # The journal has it, and is right.
    tells(job, "node-1", [Load(sequence=1, time=1.0, pause=9.0)], time=1.0)
    found = json.loads(invoke("history", job.root, "--json").output)
    paused = {one["explorer"]: one["pause"] for one in found["versions"][0]["live"]}
    assert paused == {"node-1": 0.25, "node-2": None}


def test_an_explorer_that_read_deltas_is_marked(
    job: SmallJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    with job.daemon(KEEP) as loop:
        loop.publish(1)
        reload = Reload(sequence=1, step=1, staged=True, full_bytes=0, delta_bytes=77)
        serves(job, "a", 1, reload=reload)
    assert "staged by delta" in invoke("status", job.root).output


def test_weights_that_came_by_broadcast_are_no_version_that_is_served(
    job: SmallJob,
) -> None:
    job.storage = RuledStorage()
    with job.daemon(KEEP) as loop:
        loop.publish(1)
        loads(job, "node-1", 1)
        serves(job, "node-1", 1, received="run-000005-000000", loads=())
        loop.run_once()
        assert looks(loop) == 0
    assert lives(job) == []
    assert [one.live for one in history(job, 10)] == [[]]


class Killed(BaseException):
    """The daemon was killed at this call."""


@pytest.mark.slow
@pytest.mark.parametrize("staged", [False, True])
def test_every_load_is_on_record_once_at_one_version_a_round(
    job: SmallJob, tmp_path: Path, staged: bool
) -> None:
    fast = Fast()
    staging = Staging(tmp_path / "stage") if staged else None
    versions = range(1, 25)
    with ExitStack() as stack:
        hook = stack.enter_context(
            ExplorerHook(job.root, "hook", FakeEngine(), staging=staging, storage=job.explorers)
        )
        other = stack.enter_context(synchronizer(job, "synchronizer"))
        reader = stack.enter_context(Reader(job.root, "reader", storage=job.explorers))

        def read() -> None:
            version = reader.next_version(0)
            version.release()
            reader.report(RunningStatus.RUNNING, sequence=version.sequence, step=version.step)

        def synchronize() -> None:
            version = other.get_latest_model_version()
            assert version is not None
            other.set_explorer_version(version)

        fast.takes += [lambda: hook.pull(timeout=LONG), read, synchronize]
        for first in versions[::8]:  # each daemon takes over from the one before
            with job.daemon(DaemonConfig(keep=2), meter=fast) as loop:
                loop.publish(*range(first, first + 8))
        job.run(DaemonConfig(keep=2), rounds=2)
    names = ("hook", "reader", "synchronizer")
    assert sorted(lives(job)) == [(version, name) for version in versions for name in names]
    found = history(job, 100)
    assert [(one.version, len(one.live)) for one in found] == [(n, 3) for n in versions]
    pauses = [one.pause for version in found for one in version.live if one.explorer == "hook"]
    assert None not in pauses


def test_every_load_is_on_record_though_few_of_many_explorers_are_read(
    job: SmallJob,
) -> None:
    job.storage = RuledStorage()
    names = [f"node-{number}" for number in range(130)]
    told: list[Load] = []
    with job.daemon(KEEP_1) as loop:
        for version in range(1, 7):
            loop.publish(version)
            told.append(Load(sequence=version, time=float(version)))
            for name in names:
                tells(job, name, told, time=float(version))
        for _ in range(4):
            assert looks(loop) <= 64
    assert len(lives(job)) == 6 * 130
    assert set(lives(job)) == {(version, name) for version in range(1, 7) for name in names}


@pytest.mark.parametrize("written", [0.0, 0.5, 1.0])
def test_a_daemon_that_is_killed_at_the_journal_loses_no_load_and_repeats_none(
    job: SmallJob, written: float
) -> None:
    def kill(called: str, given: tuple[Any, ...]) -> None:
        if called == "write" and b'"live"' in bytes(given[1]):
            os.write(given[0], given[1][: int(written * len(given[1]))])
            raise Killed

    storage = job.storage = RuledStorage()
    told = [Load(sequence=version, time=0.0) for version in range(1, 6)]
    with job.daemon(KEEP_1) as loop:
        loop.publish(1, 2)
        tells(job, "node-1", told[:1], time=0.0)
        loop.run_once()
        loop.publish(3, 4, 5)
        tells(job, "node-1", told[:5], time=0.0)
        tells(job, "node-2", told[:5], time=0.0)
        storage.rules.append(kill)
        with pytest.raises(Killed):
            loop.run_once()
        storage.rules.clear()
        loop._journal._lines.clear()  # it is dead: what it had in memory is gone
    for _ in range(2):
        job.run(KEEP_1)
    assert sorted(lives(job)) == [(n, name) for n in range(1, 6) for name in ("node-1", "node-2")]


def test_a_daemon_that_takes_over_repeats_nothing_that_the_journal_has_lost(job: SmallJob) -> None:
    told = [Load(sequence=version, time=0.0) for version in range(1, 5)]
    with job.daemon(KEEP_1) as loop:
        loop.publish(1, 2, 3)
        tells(job, "node-1", told[:3], time=0.0)
        loop.run_once()
    lines = job.layout.journal.read_bytes().splitlines(keepends=True)
    (at,) = (n for n, line in enumerate(lines) if b'"published","version":3' in line)
    job.put(job.layout.journal, b"".join(lines[at : at + 1]))  # the rest was bounded away
    with job.daemon(KEEP_1) as loop:
        loop.publish(4)
        tells(job, "node-1", told, time=0.0)
        loop.run_once()
    assert lives(job) == [(3, "node-1"), (4, "node-1")]


def test_loads_that_are_found_together_have_their_own_times(job: SmallJob, clock: Clock) -> None:
    with job.daemon(KEEP, clock=clock) as loop:
        for step in (1, 2, 3):
            loop.publish(step)
            clock.advance(10.0)
        # By the explorer's own clock, which is far from the daemon's.
        told = [Load(sequence=n, time=77.0 + 10 * n, pause=n / 4) for n in (1, 2, 3)]
        tells(job, "node-1", told, time=77.0 + 30 + 4)
        loop.run_once()
    found = [one.live[0] for one in history(job, 10)]
    assert [(one.seconds, one.pause) for one in found] == [(6.0, 0.25), (6.0, 0.5), (6.0, 0.75)]
    times = [one.time for one in found]
    assert None not in times
    assert times == sorted(times)


def test_a_load_is_at_no_time_before_its_version(job: SmallJob, loop: Rounds) -> None:
    loop.clock.advance(2.0)
    tells(job, "node-1", [Load(sequence=1, time=-1.7e308)], time=1.7e308)
    tells(job, "node-2", [Load(sequence=1, time=0.0)], time=1e300)
    tells(job, "node-3", [Load(sequence=1, time=9.0)], time=1.0)
    loop.run_once()
    (only,) = history(job, 10)
    assert {one.explorer: one.seconds for one in only.live} == {
        "node-1": 2.0, "node-2": 0.0, "node-3": 2.0,
    }  # fmt: skip


def test_an_impossible_load_is_not_on_record(job: SmallJob, loop: Rounds) -> None:
    tells(job, "node-1", [Load(sequence=n, time=0.0) for n in (1, 2, 2**62)], time=0.0)
    loop.run_once()
    loop.publish(2)
    loop.run_once()
    assert lives(job) == [(1, "node-1"), (2, "node-1")]


def test_an_explorer_that_was_started_anew_tells_the_loads_of_the_one_before(
    job: SmallJob, loop: Rounds
) -> None:
    with synchronizer(job, "node-1") as explorer:
        explorer.set_explorer_version(Version(1, 1))
    with Reader(job.root, "node-2", storage=job.explorers) as reader:
        reader.report(RunningStatus.RUNNING, sequence=1, step=1)
    with synchronizer(job, "node-1") as explorer:
        with Reader(job.root, "node-2", storage=job.explorers) as reader:
            reader.report(RunningStatus.RUNNING, sequence=None, step=None)
        loop.run_once()
        explorer.set_explorer_version(Version(1, 1))
        loop.run_once()
    assert sorted(lives(job)) == [(1, "node-1"), (1, "node-2")]


def test_a_report_names_the_last_loads_of_files_and_of_this_job(
    job: SmallJob, tmp_path: Path
) -> None:
    with synchronizer(job, "node-1") as explorer:
        explorer.report(Version(1, 1), received="run-000009-000000")
        assert report(job, "node-1").loads == ()
        for sequence in range(2, 40):
            explorer.report(
                Version(sequence, 1), reload=Reload(sequence=sequence, step=1, pause=0.5)
            )
        explorer.report(Version(7, 1))  # after a bench, say
        explorer.report(None)
        loads = report(job, "node-1").loads
        assert [(one.sequence, one.pause) for one in loads] == [(n, 0.5) for n in range(24, 40)]
    memory = SmallJob(tmp_path / "memory", hosts=job.hosts)
    with synchronizer(job, "node-2", memory_dir=memory.root) as explorer:
        explorer.set_explorer_version(Version(5, 5))
        assert report(job, "node-2").loads == ()


def test_explorers_that_load_nothing_cost_no_look_and_many_take_turns(
    job: SmallJob,
) -> None:
    storage = job.storage = RuledStorage()
    with job.daemon(KEEP) as loop:
        loop.publish(1)
        names = [f"node-{number}" for number in range(70)]
        for name in names:
            loads(job, name, 1)
            serves(job, name, None)
        loop.run_once()
        for name in names:
            serves(job, name, 1)
        assert looks(loop) <= 64
        loop.run_once()
        loop.run_once()
        assert looks(loop) == 0
        assert storage.count("open_append", job.root) == 0
    assert sorted(lives(job)) == sorted((1, name) for name in names)


def test_the_log_and_the_status_give_a_small_version_the_same_size(
    job: SmallJob, caplog: pytest.LogCaptureFixture
) -> None:
    with job.daemon() as loop, caplog.at_level("INFO"):
        loop.publish(1)
    [line] = [text for text in caplog.messages if text.startswith("published step 1")]
    told = line.removeprefix("published step 1 as v1: ").split(" in ")[0]
    assert told.endswith(" kB")
    assert f"published step 1 as v1: {told} in " in invoke("status", job.root).output


def test_refusals_and_rollbacks_are_events_in_the_status(job: SmallJob) -> None:
    with job.daemon(DaemonConfig(keep=9, prune_steps=False)) as loop:
        loop.publish(1, 2)
        job.save(3)
        job.put(job.actor(3) / "model.safetensors", b"x" * 100)
        edit(job.actor(3) / ".receipts" / "rank_0.json", '"size":', '"size":1')
        loop.run_once()
        job.ask_rollback(1, by="me\n@x")
        loop.run_once()
    seen = json.loads(invoke("status", job.root, "--json").output)
    assert seen["free"]["bytes"] > 0
    told = [one["event"] for one in seen["events"]]
    assert told == ["active", "published", "published", "quarantined", "rolled_back"]
    shown = invoke("status", job.root).output
    assert "v1 is served again, as v3: asked for by me\\n@x" in shown
    assert "published step 2 as v2: " in shown
    assert "quarantined step 3:" in shown
    again = history(job, 10)[-1]
    assert (again.version, again.of, again.step, again.by) == (3, 1, 1, "me\\n@x")
    assert "v3 = v1" in invoke("history", job.root).output


def test_the_file_is_bounded_and_its_oldest_lines_go_first(job: SmallJob) -> None:
    file = Journal(job, limit=1000)
    for number in range(1, 101):
        file.note("published", version=number)
        file.write()
    lines = [line.version for line in read_journal(job)]
    assert lines == list(range(lines[0] or 0, 101))
    assert 10 < len(lines) < 50
    for path in (job.layout.journal, older_lines(job.layout.journal)):
        assert path.stat().st_size < 1200
    assert len(list(read_journal(job, 500))) < len(lines)


def test_a_long_audit_log_is_begun_anew_and_what_it_told_is_still_known(job: SmallJob) -> None:
    with job.daemon(KEEP_1) as loop:
        loop.publish(1, 2)
        loop.run_once()
        os.truncate(job.layout.audit, LIMIT)
        loop.publish(3)
        loop.run_once()
    assert b'"v000001"' in older_lines(job.layout.audit).read_bytes()
    assert b'"v000002"' in job.layout.audit.read_bytes()
    assert job.layout.audit.stat().st_size < 10_000
    versions = history(job, 10)
    assert [(one.version, one.pruned is None) for one in versions] == [
        (1, False),
        (2, False),
        (3, True),
    ]


def test_torn_and_foreign_lines_are_passed_over(job: SmallJob) -> None:
    file = Journal(job)
    file.note("published", version=1)
    file.write()
    with job.layout.journal.open("ab") as out:
        newer = {"protocol": 2, "event": "published", "time": 0}
        out.write(b'\x00\xff\n{"event": "dream", "time": 1}\n')
        out.write(json.dumps(newer).encode() + b'\n{"protocol":1,"time":0,"ev')
    file.note("published", version=2)
    file.write()
    assert [line.version for line in read_journal(job)] == [1, 2]


@pytest.mark.parametrize("method", ["open_append", "status"])
def test_a_journal_that_storage_refuses_keeps_nobody_from_anything(
    job: SmallJob, method: str
) -> None:
    storage = job.storage = RuledStorage(refuse(method, errno.EIO, where="journal.jsonl"))
    with job.daemon(KEEP) as loop:
        loop.publish(1)
        assert job.latest.step == 1
        storage.rules.clear()
        loop.publish(2)
    assert [version for event, version, _ in events(job) if event == "published"] == [1, 2]


def test_a_line_that_cannot_be_written_names_its_file(tmp_path: Path) -> None:
    class Broken(FastStorage):
        def write(self, fd: int, data: bytes | memoryview) -> int:  # noqa: ARG002 # the seam's
            raise OSError(errno.EACCES, "refused")

    with pytest.raises(PermissionError) as refused:
        append(Broken(), tmp_path / "journal.jsonl", b"line\n", durable=True)
    assert refused.value.filename == str(tmp_path / "journal.jsonl")


def test_versions_without_a_journal_say_what_their_manifests_do(job: SmallJob) -> None:
    with job.daemon(KEEP) as loop:
        loop.publish(7)
    job.layout.journal.unlink()
    (only,) = history(job, 10)
    assert (only.version, only.step, only.latest) == (1, 7, True)
    assert only.merge_seconds is not None
    (job.version(1) / "manifest.json").write_bytes(b"x")
    assert history(job, 10)[0].step is None
    assert invoke("history", job.root).exit_code == 0


def test_a_history_fits_80_columns_and_needs_no_colour(
    job: SmallJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = Journal(job, wall=lambda: 1.8e9)
    file.note("published", version=123456, step=1234567, seconds=5900.0, latency=86000.0)
    for number in range(9):
        file.note("live", version=123456, explorer=f"{'long-' * 9}\n{number}", seconds=12.3)
    file.write()
    monkeypatch.setenv("COLUMNS", "80")
    result = invoke("history", job.root)
    assert all(len(line) <= 80 for line in result.output.splitlines())
    assert "and 5 more (--json)" in result.output
    assert "\x1b" not in result.output
    assert "gone" in result.output


def test_a_folder_without_a_job_or_a_version_says_so(job: SmallJob, tmp_path: Path) -> None:
    assert invoke("history", job.root).output == "nothing is published yet\n"
    with pytest.raises(JobUnavailableError, match="not a job that syncd has served"):
        history(Job.at(tmp_path), 1)


def test_a_merge_says_how_far_it_is_and_not_more_often_than_it_costs(
    job: SmallJob, clock: Clock
) -> None:
    told: list[dict[str, Any]] = []

    def look(called: str, given: tuple[Any, ...]) -> None:
        if called == "rename" and given[1].name == "daemon.json":
            told.append(json.loads(given[0].read_bytes()))

    class Slow(MakerHere):
        at = 0

        def poll(self) -> Manifest | None:
            if self.order is not None and self.at < 10:
                self.at += 1
                self._work.progress(self.at, 10)
                return None
            return super().poll()

    job.storage = RuledStorage(look)
    job.save(4)
    job.run(clock=clock, rounds=12, seconds=1, deltas=MakeWork(Slow))
    merges = [report["merge"] for report in told if "merge" in report]
    assert 4 <= len(merges) <= 6
    assert all(report["state"] == "merging" for report in told if "merge" in report)
    assert {(merge["step"], merge["total"]) for merge in merges} == {(4, 10)}
    dones = [merge["done"] for merge in merges]
    assert dones == sorted(dones)
    assert merges[-1]["seconds"] > merges[0]["seconds"]
    assert "merge" not in told[-1]


def test_a_line_holds_what_belongs_to_its_event_alone() -> None:
    line = json.loads(encode(JournalLine(time=1.0, event="skipped", step=3)))
    assert line.keys() == {"protocol", "time", "event", "step", "xxh3-64"}


def test_times_that_nobody_can_mean_leave_valid_json(job: SmallJob) -> None:
    with job.daemon() as loop:
        loop.publish(1)
    early = Journal(job, wall=lambda: -1.7e308)
    early.note("published", version=2, step=2, bytes=1, seconds=1.0, latency=1.7e308)
    early.write()
    late = Journal(job, wall=lambda: 1.7e308)
    late.note("live", version=2, explorer="node-1")
    late.write()
    printed = invoke("history", job.root, "--json").output
    assert "Infinity" not in printed
    version = json.loads(printed)["versions"][1]
    assert (version["saved"], version["live"][0]["seconds"]) == (None, None)
