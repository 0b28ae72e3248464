import errno
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from explorer_hooks.reader import Reader
from syncd.daemon.config import DaemonConfig
from syncd.protocol.errors import (
    CancelledError,
    JobUnavailableError,
    ProtocolMismatchError,
    VersionGoneError,
    WaitTimeoutError,
)
from syncd.protocol.policy import RunningStatus
from syncd.protocol.records import Latest, encode
from syncd.protocol.reports import ExplorerReport
from syncd.storage.fsio import Storage
from tests.explorers import LONG, publish
from tests.jobs import SmallJob, edit, flip, read
from tests.lagging import Hosts
from tests.refusals import invalid, too_late, unverified
from tests.storages import Clock, fails, once, refuse

pytestmark = pytest.mark.lagging


@pytest.fixture
def reader(job: SmallJob) -> Iterator[Reader]:
    with Reader(job.root, "explorer", poll=0.02, storage=job.explorers) as made:
        yield made


def markers(job: SmallJob, sequence: int) -> list[str]:
    return sorted(os.listdir(job.lease_folder(sequence)))


def test_the_newest_version_is_held_until_it_is_released(job: SmallJob, reader: Reader) -> None:
    publish(job, 3, 4)
    version = reader.next_version(0, 0)
    assert (version.sequence, version.step) == (2, 4)
    assert version.folder == job.version(2)
    version.verify()
    assert [file.path.name for file in version.open_weights()] == ["model.safetensors"]
    assert len(markers(job, 2)) == 1
    version.release()
    version.release()
    assert markers(job, 2) == []


def test_nothing_newer_in_time_is_a_timeout_that_says_what_was_waited_for(
    job: SmallJob, reader: Reader
) -> None:
    with too_late(r"no version newer than v0 .* within 0\.01 s"):
        reader.wait(0, 0.01)
    publish(job, 4)
    with too_late("no version newer than v1"):
        reader.next_version(1, 0)
    assert markers(job, 1) == []


def test_a_timeout_is_kept_by_the_readers_own_clock(job: SmallJob, clock: Clock) -> None:
    class Passing(Clock):
        def __call__(self) -> float:
            self.now += 7
            return self.now

    with (
        Reader(job.root, "explorer", poll=0.001, clock=Passing()) as reader,
        pytest.raises(WaitTimeoutError),
    ):
        reader.wait(0, 3600)
    assert clock.now == 1000


def test_a_lower_sequence_is_never_taken(job: SmallJob, reader: Reader) -> None:
    publish(job, 4)
    with pytest.raises(WaitTimeoutError):
        reader.next_version(7, 0)


def test_a_version_published_meanwhile_ends_the_wait(job: SmallJob, reader: Reader) -> None:
    job.hosts.let_time_pass()
    publisher = threading.Thread(target=publish, args=(job, 4))
    publisher.start()
    assert reader.wait(0, LONG).step == 4
    publisher.join()


def test_a_cancel_from_another_thread_ends_the_wait_and_every_later_one(reader: Reader) -> None:
    canceller = threading.Thread(target=reader.cancel)
    canceller.start()
    for _ in range(2):
        with pytest.raises(CancelledError, match="explorer was closed"):
            reader.next_version(0, None)
    canceller.join()


@pytest.mark.parametrize("content", [b"", b"{", b'{"sequence": 3}', b"\x00" * 40])
def test_a_latest_that_is_torn_is_waited_for(job: SmallJob, reader: Reader, content: bytes) -> None:
    job.layout.latest.write_bytes(content)
    assert reader.latest() is None
    with pytest.raises(WaitTimeoutError):
        reader.wait(0, 0)


def test_a_latest_of_a_newer_protocol_is_not_waited_for(job: SmallJob, reader: Reader) -> None:
    job.layout.latest.write_bytes(b'{"protocol": 2, "kind": "delta"}')
    with pytest.raises(ProtocolMismatchError):
        reader.wait(0, LONG)


def test_a_latest_that_names_a_version_that_is_gone_is_looked_at_again(
    job: SmallJob, reader: Reader
) -> None:
    latest = Latest(sequence=5, step=4, folder="v000005", save_id="run-4-0")
    job.layout.latest.write_bytes(encode(latest))
    with pytest.raises(VersionGoneError):
        reader.lease(latest)
    with too_late(r"v5 .* was pruned before explorer"):
        reader.next_version(0, 0)


def test_a_version_that_is_not_visible_yet_leaves_no_lease_behind(
    job: SmallJob, reader: Reader
) -> None:
    job.lease_folder(5).mkdir()
    with pytest.raises(VersionGoneError, match="is not there, or not visible yet"):
        reader.lease(Latest(sequence=5, step=4, folder="v000005", save_id="run-4-0"))
    assert markers(job, 5) == []


def test_a_version_that_is_retired_while_it_is_leased_is_passed_over(
    job: SmallJob, hosts: Hosts
) -> None:
    publish(job, 3)

    def go_on(*_: Path) -> None:
        with job.daemon() as loop:
            loop.publish(4)
        job.lease_folder(1).rmdir()

    storage = hosts.ruled(once("create", go_on, where="leases/v000001"))
    hosts.let_time_pass()
    with Reader(job.root, "explorer", poll=0.001, storage=storage) as reader:
        assert reader.next_version(0, LONG).sequence == 2


def test_storage_that_does_not_answer_is_an_error_and_no_timeout(
    job: SmallJob, hosts: Hosts
) -> None:
    publish(job, 3)
    storage = hosts.ruled(refuse("open_read", errno.EIO, where="LATEST"))
    with (
        Reader(job.root, "explorer", storage=storage) as reader,
        fails(errno.EIO),
    ):
        reader.wait(0, LONG)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
@pytest.mark.parametrize("damage", ["last bit", "first bit", "short", "long", "gone", "link"])
def test_a_damaged_version_is_refused_by_name(
    job: SmallJob, reader: Reader, name: str, damage: str
) -> None:
    publish(job, 4)
    version = reader.next_version(0, 0)
    path = version.folder / name
    match damage:
        case "last bit":
            flip(path)
        case "first bit":
            flip(path, 0)
        case "short":
            os.truncate(path, path.stat().st_size - 1)
        case "long":
            path.write_bytes(path.read_bytes() + b"\0")
        case "gone":
            path.unlink()
        case "link":
            path.rename(job.root / name)
            path.symlink_to(job.root / name)
    with unverified(name):
        version.verify()


@contextmanager
def manifest_of(job: SmallJob) -> Iterator[Any]:
    """That of version 1, to be changed in the block."""
    path = job.version(1) / "manifest.json"
    manifest = json.loads(path.read_bytes())
    yield manifest
    job.put(path, json.dumps(manifest).encode())
    job.hosts.settle()


def test_a_manifest_that_lists_no_file_for_a_tensor_is_refused(
    job: SmallJob, reader: Reader
) -> None:
    publish(job, 4)
    with manifest_of(job) as manifest:
        manifest["files"] = [file for file in manifest["files"] if file["name"] == "config.json"]
    with unverified("files lists no such file"):
        reader.next_version(0, 0)


def test_a_file_without_a_digest_is_refused_if_the_manifest_promises_digests(
    job: SmallJob, reader: Reader
) -> None:
    publish(job, 4)
    flip(job.version(1) / "model.safetensors")
    with manifest_of(job) as manifest:
        for file in manifest["files"]:
            if file["name"] == "model.safetensors":
                del file["digest"]
    with unverified(r"gives none for model\.safetensors"):
        reader.next_version(0, 0).verify()


def test_a_version_without_digests_is_taken_as_its_manifest_says(
    job: SmallJob, reader: Reader
) -> None:
    job.save(4)
    job.run(DaemonConfig(digests=False))
    job.hosts.settle()
    version = reader.next_version(0, 0)
    assert {file.digest for file in version.manifest.files} == {None}
    version.verify()


@pytest.mark.parametrize(
    "name", ["z.safetensors", "pytorch_model.bin", "model.gguf", "model.safetensors.index.json"]
)
def test_weights_that_no_manifest_lists_are_refused_in_the_folder_and_for_a_copy(
    job: SmallJob, reader: Reader, tmp_path: Path, name: str
) -> None:
    publish(job, 4)
    version = reader.next_version(0, 0)
    path = version.folder / name
    path.symlink_to("model.safetensors")
    job.hosts.settle()
    with unverified(f"{name} is not in the version's manifest"):
        version.verify()
    copy = tmp_path / "copy"
    copy.mkdir()
    with unverified(name):
        version.copy_to(Storage(copy), copy)
    assert list(copy.iterdir()) == []
    path.unlink()
    (version.folder / "results.json").write_bytes(b"{}")  # nothing that a server loads
    job.hosts.settle()
    version.verify()


def test_a_manifest_of_another_version_is_refused_and_its_lease_let_go(
    job: SmallJob, reader: Reader
) -> None:
    publish(job, 3, 4)
    edit(job.version(2) / "manifest.json", '"sequence":2', '"sequence":1')
    with unverified("found that of v1"):
        reader.next_version(1, 0)
    assert markers(job, 2) == []


def test_what_an_explorer_does_is_on_record(job: SmallJob, reader: Reader) -> None:
    reader.report(RunningStatus.REQUIRE_SYNC, sequence=3, step=9, nothing_new=2, refused="why")
    report = read(ExplorerReport, job.explorer("explorer"))
    assert (report.status, report.sequence, report.step) == ("require_sync", 3, 9)
    assert (report.nothing_new, report.refused) == (2, "why")
    assert not report.follows_tip
    assert job.session(report.session).exists()


def test_a_name_that_cannot_be_a_file_name_is_refused_at_construction(job: SmallJob) -> None:
    with invalid("the explorer's name 'a/b'"):
        Reader(job.root, "a/b")


def test_a_job_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(JobUnavailableError, match="Create the folder, or mount its storage"):
        Reader(tmp_path / "job", "explorer")
    assert not (tmp_path / "job").exists()


def test_closing_ends_the_session(job: SmallJob) -> None:
    reader = Reader(job.root, "explorer", storage=job.explorers)
    assert len(os.listdir(job.layout.sessions)) == 1
    reader.close()
    reader.close()
    assert os.listdir(job.layout.sessions) == []
