"""The journal: what is kept of versions, and what ``syncd history`` and ``status`` make of it."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from syncd.cli import cli
from syncd.daemon.config import DaemonConfig
from syncd.daemon.history import history
from syncd.daemon.journal_file import JournalFile, read_journal
from syncd.daemon.loop import Loop
from syncd.protocol.errors import JobUnavailableError
from syncd.protocol.journal import JournalLine
from syncd.protocol.layout import JobLayout, older_lines
from syncd.protocol.records import encode
from syncd.protocol.reports import ExplorerReport, Reload
from syncd.protocol.requests import RollbackRequest
from syncd.storage.append import LIMIT
from tests.jobs import Job
from tests.lagging import Hosts
from tests.storages import Clock, FastStorage, refuse

STORAGE = FastStorage()


def serves(
    job: Job,
    name: str,
    sequence: int | None,
    received: str | None = None,
    paused: tuple[int, float] | None = None,
) -> None:
    report = ExplorerReport(
        name=name,
        session=f"s-{name}",
        status="running",
        sequence=sequence,
        received=received,
        reload=Reload(sequence=paused[0], step=1, pause=paused[1]) if paused else None,
        time=1.0,
    )
    job.put(job.layout.explorer(name), encode(report))


def loads(job: Job, name: str, sequence: int) -> None:
    """An explorer leases a version, which it does not serve yet."""
    job.lease(sequence, f"s-{name}", name)
    job.layout.session(f"s-{name}").touch()


def publish(job: Job, loop: Loop, *steps: int) -> None:
    for step in steps:
        job.save(step)
        loop.run_once()


def events(job: Job) -> list[tuple[str, int | None, str | None]]:
    return [(one.event, one.version, one.explorer) for one in read_journal(STORAGE, job.layout)]


def syncd(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def test_a_version_is_followed_from_its_save_to_its_end(job: Job, clock: Clock) -> None:
    with job.daemon(DaemonConfig(keep=1), clock=clock) as loop:
        publish(job, loop, 4)
        loads(job, "node-1", 1)
        clock.advance(2.0)
        loop.run_once()
        serves(job, "node-1", 1)
        clock.advance(1.0)
        loop.run_once()
        loop.run_once()
        job.layout.lease_folder(1).joinpath("node-1.s-node-1").unlink()
        publish(job, loop, 5)
        loop.run_once()
    first, second = history(STORAGE, job.layout, 10)
    assert (first.version, first.step, first.kind, first.on_disk) == (1, 4, "full", False)
    assert first.bytes == second.bytes
    assert (first.merge_seconds, first.latency_seconds) == (0.0, 0.0)
    assert [(one.explorer, one.seconds) for one in first.live] == [("node-1", 3.0)]
    assert first.pruned is not None
    assert first.pruned_why == "not among the newest 1, and not leased"
    assert (second.version, second.step, second.latest, second.live) == (2, 5, True, [])
    assert history(STORAGE, job.layout, 1) == [second]


def test_a_daemon_that_takes_over_goes_on_and_repeats_nothing(job: Job) -> None:
    for _ in range(2):
        with job.daemon(DaemonConfig(keep=9)) as loop:
            job.save(1)
            loop.run_once()
            if not job.layout.explorer("node-1").exists():
                loads(job, "node-1", 1)
                serves(job, "node-1", 1)
            loop.run_once()
    assert events(job) == [
        ("active", None, None), ("published", 1, None), ("live", 1, "node-1"),
        ("active", None, None),
    ]  # fmt: skip


def test_an_explorer_with_a_copy_of_its_own_is_seen_though_its_lease_is_gone(
    job: Job, clock: Clock
) -> None:
    with job.daemon(DaemonConfig(keep=9), clock=clock) as loop:
        publish(job, loop, 1)
        loads(job, "node-1", 1)
        loop.run_once()
        job.layout.lease_folder(1).joinpath("node-1.s-node-1").unlink()
        loop.run_once()
        clock.advance(2.0)
        serves(job, "node-1", 1)
        loop.run_once()
        loop.run_once()
    assert [event for event in events(job) if event[0] == "live"] == [("live", 1, "node-1")]
    (only,) = history(STORAGE, job.layout, 10)
    assert [(one.explorer, one.seconds) for one in only.live] == [("node-1", 2.0)]


def test_how_long_an_engine_paused_for_a_version_is_kept_with_it(job: Job) -> None:
    with job.daemon(DaemonConfig(keep=9)) as loop:
        publish(job, loop, 1)
        for name in ("node-1", "node-2", "node-3"):
            loads(job, name, 1)
        serves(job, "node-1", 1, paused=(1, 0.25004))
        serves(job, "node-2", 1, paused=(7, 0.5))  # of what it had before
        serves(job, "node-3", 1)
        loop.run_once()
    serves(job, "node-1", 1, paused=(1, 9.0))  # the journal has it, and is right
    serves(job, "node-4", 1, paused=(1, 0.75))  # which no daemon has seen
    found = json.loads(syncd("history", job.layout.root, "--json").output)
    paused = {one["explorer"]: one["pause"] for one in found["versions"][0]["live"]}
    assert paused == {"node-1": 0.25, "node-2": None, "node-3": None, "node-4": 0.75}


def test_weights_that_came_by_broadcast_are_no_version_that_is_served(
    tmp_path: Path, hosts: Hosts
) -> None:
    storage = hosts.ruled()
    job = Job(tmp_path / "job", storage, hosts=hosts)
    with job.daemon(DaemonConfig(keep=9)) as loop:
        publish(job, loop, 1)
        loads(job, "node-1", 1)
        serves(job, "node-1", 1, received="run-000005-000000")
        loop.run_once()
        storage.calls.clear()
        loop.run_once()
        assert storage.count("open_read", job.layout.explorers) == 0
    assert [event for event in events(job) if event[0] == "live"] == []
    assert [one.live for one in history(STORAGE, job.layout, 10)] == [[]]


def test_who_loads_nothing_costs_no_look_and_many_are_looked_at_in_turn(
    tmp_path: Path, hosts: Hosts
) -> None:
    storage = hosts.ruled()
    job = Job(tmp_path / "job", storage, hosts=hosts)
    with job.daemon(DaemonConfig(keep=9)) as loop:
        publish(job, loop, 1)
        names = [f"node-{number}" for number in range(70)]
        for name in names:
            loads(job, name, 1)
            serves(job, name, None)
        loop.run_once()
        for name in names:
            serves(job, name, 1)
        storage.calls.clear()
        loop.run_once()
        assert storage.count("open_read", job.layout.explorers) <= 64
        loop.run_once()
        loop.run_once()
        storage.calls.clear()
        loop.run_once()
        assert storage.count("open_read", job.layout.explorers) == 0
        assert storage.count("open_append", job.layout.root) == 0
    assert sorted(name or "" for event, _, name in events(job) if event == "live") == sorted(names)


def test_what_else_becomes_of_saves_is_an_event_in_the_status(job: Job) -> None:
    with job.daemon(DaemonConfig(keep=9, prune_steps=False)) as loop:
        publish(job, loop, 1, 2)
        job.save(3)
        job.put(job.layout.actor(3) / "model.safetensors", b"x" * 100)
        receipt = job.layout.actor(3) / ".receipts" / "rank_0.json"
        receipt.write_text(receipt.read_text().replace('"size":', '"size":1'))
        loop.run_once()
        request = RollbackRequest(id="ask", sequence=1, by="me\n@x", time=0.0)
        job.put(job.layout.request("ask"), encode(request))
        loop.run_once()
    seen = json.loads(syncd("status", job.layout.root, "--json").output)
    assert seen["free"]["bytes"] > 0
    told = [one["event"] for one in seen["events"]]
    assert told == ["active", "published", "published", "quarantined", "rolled_back"]
    shown = syncd("status", job.layout.root).output
    assert "v1 is served again, as v3: asked for by me\\n@x" in shown
    assert "published step 2 as v2: " in shown
    assert "refused step 3:" in shown
    again = history(STORAGE, job.layout, 10)[-1]
    assert (again.version, again.of, again.step, again.by) == (3, 1, 1, "me\\n@x")
    assert "= v1" in syncd("history", job.layout.root).output


def test_the_file_is_bounded_and_its_oldest_lines_go_first(job: Job) -> None:
    file = JournalFile(STORAGE, job.layout, limit=1000)
    for number in range(1, 101):
        file.note("published", version=number)
        file.write()
    lines = [line.version for line in read_journal(STORAGE, job.layout)]
    assert lines == list(range(lines[0] or 0, 101))
    assert 10 < len(lines) < 50
    for path in (job.layout.journal, older_lines(job.layout.journal)):
        assert path.stat().st_size < 1200
    assert len(read_journal(STORAGE, job.layout, 500)) < len(lines)


def test_a_long_audit_log_is_begun_anew_and_what_it_told_is_still_known(job: Job) -> None:
    with job.daemon(DaemonConfig(keep=1)) as loop:
        publish(job, loop, 1)
        publish(job, loop, 2)
        loop.run_once()
        os.truncate(job.layout.audit, LIMIT)
        publish(job, loop, 3)
        loop.run_once()
    assert b'"v000001"' in older_lines(job.layout.audit).read_bytes()
    assert b'"v000002"' in job.layout.audit.read_bytes()
    assert job.layout.audit.stat().st_size < 10_000
    versions = history(STORAGE, job.layout, 10)
    assert [(one.version, one.pruned is None) for one in versions] == [
        (1, False),
        (2, False),
        (3, True),
    ]


def test_torn_and_foreign_lines_are_passed_over(job: Job) -> None:
    file = JournalFile(STORAGE, job.layout)
    file.note("published", version=1)
    file.write()
    with job.layout.journal.open("ab") as out:
        newer = {"protocol": 2, "event": "published", "time": 0}
        out.write(b'\x00\xff\n{"event": "dream", "time": 1}\n')
        out.write(json.dumps(newer).encode() + b'\n{"protocol":1,"time":0,"ev')
    file.note("published", version=2)
    file.write()
    assert [line.version for line in read_journal(STORAGE, job.layout)] == [1, 2]


@pytest.mark.parametrize("method", ["open_append", "status"])
def test_a_journal_that_storage_refuses_keeps_nobody_from_anything(
    tmp_path: Path, hosts: Hosts, method: str
) -> None:
    storage = hosts.ruled(refuse(method, errno.EIO, where="journal.jsonl"))
    job = Job(tmp_path / "job", storage, hosts=hosts)
    with job.daemon(DaemonConfig(keep=9)) as loop:
        publish(job, loop, 1)
        assert job.latest.step == 1
        storage.rules.clear()
        publish(job, loop, 2)
    assert [version for event, version, _ in events(job) if event == "published"] == [1, 2]


def test_versions_without_a_journal_say_what_their_manifests_do(job: Job) -> None:
    with job.daemon(DaemonConfig(keep=9)) as loop:
        publish(job, loop, 7)
    job.layout.journal.unlink()
    serves(job, "node-1", 1)
    (only,) = history(STORAGE, job.layout, 10)
    assert (only.version, only.step, only.kind, only.latest) == (1, 7, "full", True)
    assert only.merge_seconds is not None
    assert [(one.explorer, one.seconds) for one in only.live] == [("node-1", None)]
    (job.layout.version(1) / "manifest.json").write_bytes(b"x")
    assert history(STORAGE, job.layout, 10)[0].step is None
    assert syncd("history", job.layout.root).exit_code == 0


def test_a_history_fits_80_columns_and_needs_no_colour(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = JournalFile(STORAGE, job.layout, wall=lambda: 1.8e9)
    file.note("published", version=123456, step=1234567, kind="adapter", bytes=10**13,
              seconds=5900.0, latency=86000.0)  # fmt: skip
    for number in range(9):
        name = f"{'long-' * 9}\n{number}"
        file.note("live", version=123456, explorer=name, seconds=12.3)
    file.write()
    monkeypatch.setenv("COLUMNS", "80")
    result = syncd("history", job.layout.root)
    assert all(len(line) <= 80 for line in result.output.splitlines())
    assert "and 5 more +12 s" in result.output
    assert "\x1b" not in result.output
    assert "gone" in result.output


def test_what_is_no_job_or_has_no_version_says_so(job: Job, tmp_path: Path) -> None:
    assert syncd("history", job.layout.root).output == "nothing is published yet\n"
    with pytest.raises(JobUnavailableError, match="not a job that syncd has served"):
        history(STORAGE, JobLayout(tmp_path), 1)


def test_a_merge_says_how_far_it_is_and_not_more_often_than_it_costs(
    tmp_path: Path, clock: Clock, hosts: Hosts
) -> None:
    told: list[dict[str, Any]] = []

    def slowly(called: str, given: tuple[Any, ...]) -> None:
        if called == "pread_into":
            clock.advance(1.0)
        elif called == "rename" and given[1].name == "daemon.json":
            told.append(json.loads(given[0].read_bytes()))

    storage = hosts.ruled(slowly)
    job = Job(tmp_path / "job", storage, hosts=hosts)
    job.save(4, *map(float, range(2_000_000)))
    with job.daemon(clock=clock) as loop:
        loop.run_once()
    merges = [report["merge"] for report in told if "merge" in report]
    assert 2 <= len(merges) <= 4
    assert all(report["state"] == "merging" for report in told if "merge" in report)
    assert {merge["step"] for merge in merges} == {4}
    assert {merge["total"] for merge in merges} == {8_000_000}
    dones = [merge["done"] for merge in merges]
    assert dones == sorted(dones)
    assert merges[-1]["seconds"] > merges[0]["seconds"] >= 2.0
    assert "merge" not in told[-1]


def test_a_line_holds_what_belongs_to_its_event_alone() -> None:
    line = encode(JournalLine(time=1.0, event="skipped", step=3))
    assert json.loads(line) == {"protocol": 1, "time": 1.0, "event": "skipped", "step": 3}


def test_times_that_nobody_can_mean_leave_valid_json(job: Job) -> None:
    with job.daemon() as loop:
        publish(job, loop, 1)
    early = JournalFile(STORAGE, job.layout, wall=lambda: -1.7e308)
    early.note("published", version=2, step=2, bytes=1, seconds=1.0, latency=1.7e308)
    early.write()
    late = JournalFile(STORAGE, job.layout, wall=lambda: 1.7e308)
    late.note("live", version=2, explorer="node-1")
    late.write()
    printed = CliRunner().invoke(cli, ["history", str(job.layout.root), "--json"]).output
    assert "Infinity" not in printed
    version = json.loads(printed)["versions"][1]
    assert (version["saved"], version["live"][0]["seconds"]) == (None, None)
