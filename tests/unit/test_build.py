from __future__ import annotations

import pytest

from syncd.checkpoint.version import read_manifest
from syncd.protocol.errors import SupersededError
from syncd.protocol.records import DaemonReport, parse
from tests.jobs import Job
from tests.storages import Clock, RuledStorage, once


def test_a_vouched_file_that_is_gone_is_waited_for_and_not_left_out(job: Job, clock: Clock) -> None:
    job.save(4)
    config = job.layout.actor(4) / "huggingface" / "config.json"
    content = config.read_bytes()
    config.unlink()
    with job.daemon(clock=clock) as loop:
        loop.run_once()
        assert job.versions == []
        config.write_bytes(content)
        clock.advance(1)
        loop.run_once()
    assert (job.layout.version(1) / "config.json").read_bytes() == content


def test_a_vouched_file_that_was_changed_is_said_by_name_before_any_weights_are_copied(
    job: Job, clock: Clock
) -> None:
    job.save(4)
    config = job.layout.actor(4) / "huggingface" / "config.json"
    config.write_bytes(b"changed by hand")
    storage = RuledStorage()
    job.storage = storage
    with job.daemon(clock=clock) as loop:
        for _ in range(3):
            loop.run_once()
            clock.advance(1)
        report = parse(DaemonReport, job.layout.daemon_report.read_bytes(), "daemon.json")
    assert report.detail.startswith(f"{config} is not the file that the receipt of save run-4-0")
    written = [str(given[-1]) for method, given in storage.calls if method in {"link", "create"}]
    assert not [path for path in written if path.endswith("model.safetensors")]
    assert job.versions == []


def test_a_superseded_daemon_leaves_its_successors_notice(job: Job) -> None:
    def take_over(*_: object) -> None:
        job.take_over().publish_file(job.layout.publish_lock, b"the successor's")

    job.storage = RuledStorage(once("rename", take_over, where="published/v000001"))
    job.save(4)
    with pytest.raises(SupersededError), job.daemon() as loop:
        loop.run_once()
    assert job.layout.publish_lock.read_bytes() == b"the successor's"


def test_a_later_save_of_the_published_step_stays_quarantined_for_the_next_daemon(
    job: Job, clock: Clock
) -> None:
    job.save(4)
    with job.daemon() as loop:
        loop.run_once()
    (job.layout.actor(4) / ".receipts" / "rank_0.json").unlink()
    (job.layout.actor(4) / ".receipts").rmdir()
    job.put(job.layout.actor(4) / "model.safetensors", b"x" * 64)
    job.point(4)
    tried = []
    for _ in range(3):
        with job.daemon(clock=clock) as loop:
            for _ in range(3):
                tried.extend(loop.run_once().actions)
                clock.advance(5)
    assert len(tried) == 1
    assert job.outcomes == {4: "quarantined"}
    assert read_manifest(job.storage, job.layout.version(1)).step == 4
