import errno
import json
from pathlib import Path

import pytest

from syncd.checkpoint.version import read_manifest, verify_version
from syncd.daemon.config import DaemonConfig
from syncd.daemon.loop import Loop
from syncd.protocol.errors import (
    JobUnavailableError,
    ProtocolMismatchError,
    SupersededError,
)
from syncd.protocol.records import PublishNotice, encode
from tests.explorers import publish
from tests.jobs import SmallJob, edit, read, weights
from tests.lagging import Hosts
from tests.storages import Clock, RuledStorage, fails, once

pytestmark = pytest.mark.lagging


def test_a_save_becomes_a_whole_version_that_latest_names(job: SmallJob) -> None:
    publish(job, 4)
    assert (job.latest.sequence, job.latest.step, job.latest.folder) == (1, 4, "v000001")
    folder = job.version(1)
    manifest = read_manifest(job.storage, folder)
    verify_version(job.storage, folder, manifest)
    assert manifest.save_id == "run-4-0"
    assert manifest.checked == "receipt"
    config = job.actor(4) / "huggingface" / "config.json"
    assert (folder / "config.json").read_bytes() == config.read_bytes()
    assert job.outcomes == {4: "published"}
    assert job.lease_folder(1).is_dir()
    assert job.leftovers() == []


def test_the_same_save_is_published_once_over_any_number_of_daemons(job: SmallJob) -> None:
    job.save(4)
    for _ in range(3):
        job.run(rounds=3)
    assert job.versions == ["v000001"]


def test_every_new_save_gets_the_next_sequence_whatever_its_step(job: SmallJob) -> None:
    config = DaemonConfig(keep=9)
    with job.daemon(config) as loop:
        for step, counter in ((4, 0), (5, 1), (2, 2), (2, 3)):
            job.save(step, counter=counter)
            loop.run_once()
    assert job.versions == [f"v00000{n}" for n in (1, 2, 3, 4)]
    assert job.serves == (4, 2)


def test_lease_folder_and_version_are_there_before_latest_names_them(
    ruled: SmallJob, storage: RuledStorage
) -> None:
    publish(ruled, 4)
    targets = [given[1] for method, given in storage.calls if method == "rename"]
    order = [
        targets.index(ruled.layout.publish_lock),
        targets.index(ruled.lease_folder(1)),
        targets.index(ruled.version(1)),
        targets.index(ruled.layout.latest),
        targets.index(ruled.layout.saves),
    ]
    assert order == sorted(order)
    named = [given[1:] for _, given in storage.calls].index((ruled.layout.latest,))
    assert ("unlink", (ruled.layout.publish_lock,)) in storage.calls[named:]


def test_the_publish_lock_says_what_is_on_its_way_and_goes(job: SmallJob, hosts: Hosts) -> None:
    said: list[PublishNotice] = []

    def look(*_: Path) -> None:
        said.append(read(PublishNotice, job.layout.publish_lock))

    job.storage = hosts.ruled(once("rename", look, where="published"))
    publish(job, 4)
    assert (said[0].sequence, said[0].step) == (1, 4)
    assert not job.layout.publish_lock.exists()


def test_the_publish_lock_is_replaced_by_one_rename_and_not_synced(
    ruled: SmallJob, storage: RuledStorage
) -> None:
    publish(ruled, 4)
    begun = [
        number
        for number, (method, given) in enumerate(storage.calls)
        if method == "create" and "publish.lock" in given[-1].name
    ]
    assert len(begun) == 1
    calls = [method for method, _ in storage.calls[begun[0] :]]
    renamed = calls.index("rename")
    assert "fsync" not in calls[:renamed]
    assert calls[renamed + 1] != "sync_folder"


@pytest.mark.parametrize("rename", ["published/v000001", ".syncd/LATEST", "leases/v000001"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_refused_commit_is_tried_again_and_nothing_is_lost(
    ruled: SmallJob, storage: RuledStorage, rename: str, code: int, clock: Clock
) -> None:
    storage.refuse("rename", code, where=rename)
    ruled.save(4)
    with ruled.daemon(clock=clock) as loop:
        loop.run_once()
        assert not ruled.layout.latest.exists()
        storage.rules.clear()
        clock.advance(60)
        loop.run_once()
        assert (ruled.latest.step, ruled.outcomes) == (4, {4: "published"})
    assert ruled.leftovers() == []


def test_a_finished_version_that_latest_does_not_name_is_adopted(
    ruled: SmallJob, storage: RuledStorage
) -> None:
    storage.refuse("rename", errno.EIO, where=".syncd/LATEST")
    publish(ruled, 4)
    assert ruled.versions == ["v000001"]
    storage.rules.clear()
    with ruled.daemon() as loop:
        assert ruled.serves == (1, 4)
        loop.run_once()
    assert ruled.versions == ["v000001"]
    assert ruled.outcomes == {4: "published"}


@pytest.mark.parametrize("damage", ["no manifest", "torn manifest", "short file", "missing file"])
def test_an_unfinished_version_above_latest_is_discarded_on_record_and_its_number_not_used_again(
    job: SmallJob, damage: str
) -> None:
    publish(job, 4, 5)
    job.layout.latest.unlink()
    folder = job.version(2)
    match damage:
        case "no manifest":
            (folder / "manifest.json").unlink()
        case "torn manifest":
            (folder / "manifest.json").write_bytes(b"{")
        case "short file":
            # Its file is also the trainer's, by a hard link: another one takes its name.
            job.put(folder / "model.safetensors", b"short")
        case "missing file":
            (folder / "config.json").unlink()
    job.hosts.settle()
    with job.daemon() as loop:
        assert job.latest.sequence == 1
        assert ("version", "v000002") in job.audit
        loop.run_once()
        assert job.serves == (3, 5)
    assert job.versions == ["v000001", "v000003"]


def test_storage_that_does_not_answer_is_no_reason_to_discard_a_version(
    ruled: SmallJob, storage: RuledStorage
) -> None:
    publish(ruled, 4)
    ruled.layout.latest.unlink()
    storage.refuse("open_read", errno.EIO, where="v000001/manifest.json")
    with fails(errno.EIO), ruled.daemon():
        pass
    storage.rules.clear()
    assert ruled.versions == ["v000001"]
    ruled.run()
    assert ruled.latest.sequence == 1


def test_a_version_of_another_save_than_latest_says_is_made_anew(job: SmallJob) -> None:
    publish(job, 4)
    edit(job.version(1) / "manifest.json", "run-4-0", "run-4-2")
    job.hosts.settle()
    job.run()
    assert (job.serves, job.latest.save_id) == ((2, 4), "run-4-0")


@pytest.mark.parametrize("content", [None, b"", b'{"sequence": 2', b"\x00" * 80])
def test_a_lost_or_damaged_latest_comes_back_and_the_sequence_goes_on(
    job: SmallJob, content: bytes | None
) -> None:
    publish(job, 4, 5)
    job.layout.latest.unlink()
    if content is not None:
        job.layout.latest.write_bytes(content)
    job.run()
    assert job.serves == (2, 5)
    publish(job, 6)
    assert job.latest.sequence == 3


@pytest.mark.parametrize("witness", ["leases", "explorer", "daemon.json", "saves.json"])
def test_a_sequence_is_never_given_twice_though_all_versions_are_lost(
    job: SmallJob, witness: str
) -> None:
    publish(job, 4, 5, 6)
    assert job.lease_folder(3).exists()
    job.layout.latest.unlink()
    for sequence in (1, 2, 3):
        job.storage.remove_tree(job.version(sequence))
        if witness != "leases":
            job.storage.remove_tree(job.lease_folder(sequence))
    if witness != "daemon.json":
        job.layout.daemon_report.unlink()
    if witness != "saves.json":
        job.layout.saves.unlink()
    if witness == "explorer":
        report = {"name": "e", "session": "s", "status": "running", "sequence": 3, "time": 1.0}
        job.explorer("e").write_text(json.dumps(report))
    job.run()
    assert job.latest.sequence == 4


def test_a_latest_of_a_newer_protocol_ends_the_daemon_and_changes_nothing(job: SmallJob) -> None:
    publish(job, 4)
    newer = b'{"protocol": 2, "sequence": 1, "step": 4, "kind": "delta"}'
    job.layout.latest.write_bytes(newer)
    with pytest.raises(ProtocolMismatchError, match="install the newer syncd"), job.daemon():
        pass
    assert job.layout.latest.read_bytes() == newer


def broken_save(job: SmallJob, step: int) -> None:
    """A foreign save that can never be merged."""
    job.save(step, receipts=False)
    job.put(job.actor(step) / "model.safetensors", b"x" * 64)
    job.point(step)


def test_a_save_that_cannot_be_published_is_quarantined_once_with_its_reason(
    job: SmallJob, clock: Clock
) -> None:
    broken_save(job, 4)
    with job.daemon(clock=clock) as loop:
        decisions = [(loop.run_once(), clock.advance(5))[0] for _ in range(5)]
    assert sum(len(decision.actions) for decision in decisions) == 1
    record = job.refused
    assert (record.step, record.error) == (4, "ShardFormatError")
    assert "is not a whole safetensors file" in record.reason
    assert job.outcomes == {4: "quarantined"}
    assert job.versions == []
    assert job.leftovers() == []


def test_a_quarantined_save_stays_so_for_the_next_daemon_and_a_new_one_is_tried(
    job: SmallJob,
) -> None:
    broken_save(job, 4)
    for _ in range(2):
        job.run(rounds=3, seconds=5)
    assert len(list(job.layout.quarantine.iterdir())) == 1
    publish(job, 4)
    assert job.latest.step == 4
    assert job.outcomes == {4: "published"}


def test_a_save_that_changes_while_it_is_merged_is_published_as_it_became(
    job: SmallJob, hosts: Hosts
) -> None:
    job.storage = hosts.ruled(
        once("create", lambda _: job.save(4, 9.0, counter=1), where="building/v000001/config.json")
    )
    job.save(4, 1.0)
    with job.daemon() as loop:
        for _ in range(3):
            loop.run_once()
    assert read_manifest(job.storage, job.version(job.latest.sequence)).save_id == "run-4-1"


def test_a_foreign_save_that_changes_while_it_is_merged_is_not_published(
    job: SmallJob, clock: Clock, hosts: Hosts
) -> None:
    job.storage = hosts.ruled(
        once("create", lambda _: job.save(4, 9.0, receipts=False), where="config.json")
    )
    job.save(4, 1.0, receipts=False)
    with job.daemon(clock=clock) as loop:
        loop.run_once()
        clock.advance(2)
        loop.run_once()
        if hosts.lags and job.versions:  # it saw the change too late, and has what was there, whole
            assert (job.version(1) / "model.safetensors").read_bytes() == weights(1.0)
        else:
            assert job.versions == []
        assert job.layout.quarantine.exists()
        assert list(job.layout.quarantine.iterdir()) == []


def test_a_published_version_does_not_change_when_its_step_is_saved_again(job: SmallJob) -> None:
    job.save(4, 1.0)
    with job.daemon(DaemonConfig(keep=5)) as loop:
        loop.run_once()
        before = (job.version(1) / "model.safetensors").read_bytes()
        job.save(4, 9.0, counter=1)
        loop.run_once()
    assert job.latest.sequence == 2
    assert (job.version(1) / "model.safetensors").read_bytes() == before
    assert (job.version(2) / "model.safetensors").read_bytes() != before


def test_a_superseded_daemon_publishes_nothing_and_says_so(job: SmallJob) -> None:
    job.save(4)
    with job.daemon() as loop:
        job.take_over()
        with pytest.raises(SupersededError):
            loop.run_once()
    assert job.versions == []
    assert not job.layout.latest.exists()


def begin_again_after(loop: Loop, job: SmallJob) -> None:
    job.layout.state.rename(job.root / "away")
    try:
        with pytest.raises(JobUnavailableError):
            loop.run_once()
    finally:
        (job.root / "away").rename(job.layout.state)
        job.hosts.settle()


def test_a_job_that_comes_back_is_as_it_was(job: SmallJob) -> None:
    job.save(4)
    with job.daemon() as loop:
        loop.run_once()
        before = job.layout.saves.read_bytes()
        begin_again_after(loop, job)
        loop.run_once()
    assert job.layout.saves.read_bytes() == before
    assert encode(job.latest)
