"""Copies on a host that are made from links: equal to the fold, or the version, or none."""

import errno
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from explorer_hooks.staging import NotStagedError, Staging
from syncd.checkpoint.safetensors_file import SafetensorsFile
from syncd.coordination.leased_version import LeasedVersion
from syncd.deltas.link_index import LinkRecord
from syncd.protocol.errors import CancelledError, VersionGoneError
from syncd.protocol.names import DELTA, MANIFEST
from syncd.protocol.records import Ahead, encode
from tests.deltas import STORAGE
from tests.jobs import SmallJob, flip
from tests.staged_links import SMALL, LinkedJob, copies, state
from tests.storages import RuledStorage, os_error


@pytest.fixture
def linked(job: SmallJob, tmp_path: Path) -> LinkedJob:
    return LinkedJob(job, tmp_path)


def bytes_of(linked: LinkedJob, *numbers: int) -> int:
    """The bytes of the links to these saves."""
    return sum(file.size for n in numbers for file in linked.links[n - 2].link.files)


def size(linked: LinkedJob) -> int:
    return linked.whole[0].manifest.size


def follow(linked: LinkedJob, staging: Staging) -> LeasedVersion:
    return staging.follow(linked.lead(), linked.hold)


def check_third(linked: LinkedJob, staging: Staging) -> None:
    linked.check(staging.stage(linked.version(3)), 3)


@pytest.fixture
def staging(memory: Path) -> Staging:
    return Staging(memory)


@pytest.fixture
def held(linked: LinkedJob, staging: Staging) -> Iterator[LeasedVersion]:
    base = staging.stage(linked.version(1))
    yield base
    base.release()


beside_the_first = pytest.mark.usefixtures("held")


def test_the_next_save_is_made_from_a_copy_and_links_alone(linked: LinkedJob, memory: Path) -> None:
    staging = Staging(memory, storage=RuledStorage())
    base = staging.stage(linked.version(1))
    before = state(base.folder), state(linked.job.layout.root)
    linked.storage.calls.clear()
    copy = linked.follow(staging)
    assert copy.source == linked.job.version(3)
    assert staging.fetched.full_bytes == 0
    assert staging.fetched.delta_bytes == bytes_of(linked, 2, 3)
    assert staging.fetched.fetch is not None
    assert staging.fetched.rebuild is not None
    assert linked.storage.count("open_read", linked.job.layout.published) == 0
    assert linked.holds == 0
    assert before == (state(base.folder), state(linked.job.layout.root))
    linked.link()
    later = linked.follow(staging)  # from the nearer copy
    assert staging.fetched.delta_bytes == bytes_of(linked, 4)
    for one in (base, copy, later):
        one.release()
    staging.tidy()
    assert copies(memory) == []


def test_engines_of_one_host_read_a_link_once(linked: LinkedJob, memory: Path) -> None:
    ours, theirs = Staging(memory), Staging(memory)
    held = [ours.stage(linked.version(1)), linked.follow(ours)]
    linked.storage.calls.clear()
    again = linked.follow(theirs)
    assert again.folder == held[1].folder
    assert (theirs.fetched.full_bytes, theirs.fetched.delta_bytes) == (0, None)
    assert linked.storage.count("open_read", linked.job.layout.deltas) == 0
    assert ours.hold_again(again).folder == again.folder


@beside_the_first
def test_a_fold_costs_no_second_copy(linked: LinkedJob, staging: Staging) -> None:
    copy = linked.follow(staging)
    linked.publish(3)
    linked.storage.calls.clear()
    assert staging.stage(linked.version(3)).folder == copy.folder
    assert not linked.storage.calls


@beside_the_first
def test_a_version_behind_which_a_host_is_comes_by_links_too(
    linked: LinkedJob, staging: Staging
) -> None:
    linked.publish(3)
    check_third(linked, staging)
    assert staging.fetched.full_bytes == 0
    assert staging.fetched.delta_bytes == bytes_of(linked, 2, 3)


@beside_the_first
def test_links_from_a_copy_here_are_read_rather_than_a_version(
    linked: LinkedJob, staging: Staging
) -> None:
    ahead = linked.latest.ahead
    linked.publish(2)
    linked.put(ahead=ahead)
    linked.follow(staging)
    assert (linked.holds, staging.fetched.full_bytes) == (0, 0)
    assert staging.fetched.delta_bytes == bytes_of(linked, 2, 3)


@beside_the_first
def test_a_link_of_no_use_that_cannot_be_read_is_passed_over(
    linked: LinkedJob, staging: Staging
) -> None:
    folder, link = linked.links[1]
    shutil.move(folder, linked.job.link(4))
    folder.mkdir()
    (folder / DELTA).touch()
    linked.storage.refuse("open_read", errno.EIO, where=f"{folder.name}/{DELTA}")
    linked.put(ahead=Ahead(sequence=4, step=3, save_id=link.target))
    assert follow(linked, staging).sequence == 4


@beside_the_first
def test_what_is_rolled_back_meanwhile_is_not_served(
    linked: LinkedJob, memory: Path, staging: Staging
) -> None:

    def roll_back() -> None:
        linked.put(ahead=None, sequence=4, folder="v000004", closed="v000001 is served again")

    with pytest.raises(NotStagedError, match="served again"):
        staging.follow(linked.lead(), linked.hold, cancel=roll_back)
    staging.tidy()
    assert copies(memory) == ["v000001"]


def test_a_host_without_a_copy_reads_the_version_and_the_links(
    linked: LinkedJob, memory: Path, staging: Staging
) -> None:
    copy = linked.follow(staging)
    assert linked.holds == 1
    assert staging.fetched.full_bytes == size(linked)
    assert staging.fetched.delta_bytes == bytes_of(linked, 2, 3)
    staging.tidy()
    assert copies(memory) == ["v000003"]
    copy.release()


def cut(path: Path) -> None:
    os.truncate(path, 1000)


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (cut, "model-00002-of-00002.safetensors"),
        (Path.unlink, "model-00001-of-00002.safetensors"),
        (Path.unlink, "config.json"),
    ],
)
def test_a_damaged_base_goes_and_the_version_is_read_again(
    linked: LinkedJob,
    staging: Staging,
    held: LeasedVersion,
    damage: Callable[[Path], None],
    name: str,
) -> None:
    damage(held.folder / name)
    linked.follow(staging)
    assert linked.holds == 1
    assert staging.fetched.full_bytes == size(linked)


def places(folder: Path) -> Iterator[tuple[str, int]]:
    """A byte of a small file, of each header, and at both ends of each tensor."""
    yield "tokenizer/vocab.json", 0
    for path in folder.glob("*.safetensors"):
        yield path.name, 9
        with SafetensorsFile.open(STORAGE, path) as file:
            for entry in file.entries:
                yield from ((path.name, entry.begin), (path.name, entry.end - 1))


def test_no_flipped_bit_of_a_base_gets_into_the_next_copy(linked: LinkedJob) -> None:
    flips = list(places(linked.whole[0].folder))
    assert len(flips) == 1 + 2 + 2 * len(linked.tensors[0])
    for number, (name, at) in enumerate(flips, 1):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as stage:
            staging = Staging(stage)
            base = staging.stage(linked.version(1))
            flip(base.folder / name, at)
            linked.follow(staging).release()
            assert linked.holds == number, "it read LATEST's version instead of the base"
            base.release()


def test_a_base_with_another_flipped_byte_is_replaced_for_a_published_version_too(
    linked: LinkedJob, memory: Path, staging: Staging, held: LeasedVersion
) -> None:
    flip(held.folder / "model-00001-of-00002.safetensors")
    linked.publish(3)
    check_third(linked, staging)
    assert staging.fetched.delta_bytes is None
    assert "no links lead" in (staging.fetched.no_delta or "")
    assert copies(memory) == ["v000003"]


def gone(linked: LinkedJob) -> None:
    shutil.rmtree(linked.links[0].folder)


def torn_record(linked: LinkedJob) -> None:
    os.truncate(linked.links[0].folder / DELTA, 30)


def torn_file(linked: LinkedJob) -> None:
    path = linked.links[1].folder / "rank-1"
    os.truncate(path, path.stat().st_size - 1)


def flipped_block(linked: LinkedJob) -> None:
    flip(linked.links[1].folder / "rank-0", 0)


def flipped_index(linked: LinkedJob) -> None:
    flip(linked.links[1].folder / "rank-0")


def huge(linked: LinkedJob) -> None:
    """Its record says so, and the file is as long."""
    folder, link = linked.links[1]
    file = link.files[0].model_copy(update={"size": 2**40})
    os.truncate(folder / file.name, 2**40)
    (folder / DELTA).write_bytes(encode(link.model_copy(update={"files": (file, *link.files[1:])})))


def other_base(linked: LinkedJob) -> None:
    """A link in a circle."""
    folder, link = linked.links[1]
    (folder / DELTA).write_bytes(encode(link.model_copy(update={"base": link.target})))


@pytest.mark.parametrize(
    "damage", [gone, torn_record, torn_file, flipped_block, flipped_index, huge, other_base]
)
def test_a_link_that_cannot_be_used_costs_no_version(
    linked: LinkedJob,
    memory: Path,
    staging: Staging,
    held: LeasedVersion,
    damage: Callable[[LinkedJob], None],
) -> None:
    before = state(held.folder)
    damage(linked)
    with pytest.raises(NotStagedError, match="a version only" if damage is huge else None):
        follow(linked, staging)
    assert linked.holds == 0
    assert state(held.folder) == before
    assert copies(memory) == ["v000001"]
    linked.publish(3)
    check_third(linked, staging)
    assert staging.fetched.delta_bytes is None
    assert staging.fetched.no_delta is not None


@pytest.mark.parametrize(
    "error",
    [
        os_error(errno.EIO),
        os_error(errno.ESTALE),
        MemoryError("no 8 MiB"),
        IndexError("a bug"),
        ImportError("no module"),
        VersionGoneError("pruned"),
    ],
)
@beside_the_first
def test_whatever_fails_is_no_refusal(
    linked: LinkedJob, staging: Staging, error: Exception
) -> None:
    def rule(name: str, given: tuple[Any, ...]) -> None:
        if name == "open_read" and "rank-0" in str(given[0]):
            raise error

    linked.storage.rules.append(rule)
    with pytest.raises(NotStagedError, match=str(error).split("]")[-1].strip()):
        follow(linked, staging)
    linked.storage.rules.clear()
    linked.follow(staging)


@beside_the_first
def test_a_cancellation_ends_it(linked: LinkedJob, memory: Path, staging: Staging) -> None:
    left = 3

    def cancel() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise CancelledError("enough")

    with pytest.raises(CancelledError):
        staging.follow(linked.lead(), linked.hold, cancel=cancel)
    assert copies(memory) == ["v000001"]
    linked.publish(3)
    left = 3
    with pytest.raises(CancelledError):
        staging.stage(linked.version(3), cancel=cancel)


def test_without_numpy_versions_are_copied_and_one_line_says_so_without_a_warning(
    linked: LinkedJob,
    memory: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    for module in ("folding", "encoding", "links"):
        monkeypatch.delitem(sys.modules, f"syncd.deltas.{module}", raising=False)
    monkeypatch.setitem(sys.modules, "numpy", None)
    staging = Staging(memory)
    assert not staging.follows(linked.job.root)
    held = staging.stage(linked.version(1))
    linked.publish(3)
    check_third(linked, staging)
    assert "pip install" in (staging.fetched.no_delta or "")
    assert "pip install 'syncd[deltas]'" in caplog.text
    assert {record.levelname for record in caplog.records} == {"INFO"}
    held.release()


@pytest.mark.parametrize("room_for", [1, 2, 3])
def test_without_room_for_both_a_version_takes_the_place_of_its_base(
    linked: LinkedJob, memory: Path, room_for: int
) -> None:
    first = Staging(memory, keep_last=True)
    copy = first.stage(linked.version(1))
    first.serves(copy.folder)
    copy.release()
    staging = Staging(memory, room_for * (size(linked) + 6000))
    if room_for == 1:
        with pytest.raises(NotStagedError, match="do not fit"):
            follow(linked, staging)
        linked.publish(3)
        check_third(linked, staging)
        assert copies(memory) == ["v000003"]
        assert "do not fit" in (staging.fetched.no_delta or "")
    else:
        linked.follow(staging)


def test_a_copy_whose_manifest_is_damaged_is_no_copy(
    linked: LinkedJob, staging: Staging, held: LeasedVersion
) -> None:
    cut(held.folder / MANIFEST)
    with pytest.raises(NotStagedError, match=MANIFEST):
        staging.stage(linked.version(1))
    with pytest.raises(NotStagedError):
        follow(linked, staging)
    held.release()
    staging.tidy()
    linked.follow(staging)


def test_copies_that_nobody_holds_make_room(linked: LinkedJob, memory: Path) -> None:
    staging = Staging(memory, int(2.7 * size(linked)))
    staging.stage(linked.version(1)).release()
    held = linked.follow(staging)
    linked.link()
    linked.follow(staging)
    assert copies(memory) == ["v000003", "v000004"]
    held.release()


@beside_the_first
def test_more_bytes_of_links_than_of_a_version_are_not_read(
    linked: LinkedJob, staging: Staging
) -> None:
    for _ in range(64):
        linked.link()
    linked.storage.calls.clear()
    with pytest.raises(NotStagedError, match="no links lead"):
        follow(linked, staging)
    assert not [given for name, given in linked.storage.calls if "rank-" in str(given[0])]


def test_copies_of_other_jobs_are_no_base(
    linked: LinkedJob, memory: Path, staging: Staging, tmp_path: Path
) -> None:
    other = LinkedJob(SmallJob(tmp_path / "other"), tmp_path / "other")
    held = Staging(memory).stage(other.version(1))
    linked.follow(staging)
    assert linked.holds == 1
    held.release()


def test_on_the_jobs_own_filesystem_nobody_follows(linked: LinkedJob, tmp_path: Path) -> None:
    staging = Staging(tmp_path / "near")
    assert not staging.follows(linked.job.root)
    held = staging.stage(linked.version(1))
    linked.publish(3)
    copy = staging.stage(linked.version(3))
    name = "model-00001-of-00002.safetensors"
    assert (copy.folder / name).samefile(linked.whole[2].folder / name)
    assert "on the job's filesystem" in (staging.fetched.no_delta or "")
    held.release()


@beside_the_first
def test_what_is_read_is_the_record_and_each_file_once(linked: LinkedJob, staging: Staging) -> None:
    linked.storage.calls.clear()
    linked.follow(staging)
    read = [given[0] for name, given in linked.storage.calls if name == "open_read"]
    files = [link.folder / name for link in linked.links for name in (DELTA, "rank-0", "rank-1")]
    assert sorted(read) == sorted([linked.job.layout.latest, *files])


def test_a_folder_that_cannot_be_looked_into_is_no_refusal(
    linked: LinkedJob, staging: Staging, held: LeasedVersion
) -> None:
    linked.storage.refuse("utime", errno.EROFS)
    linked.follow(staging)
    assert SMALL["config.json"] == held.read_file("config.json")


@beside_the_first
def test_a_record_with_a_foreign_name_is_not_followed_out_of_the_folder(
    linked: LinkedJob, staging: Staging, tmp_path: Path
) -> None:
    folder, link = linked.links[1]
    (folder / "rank-0").rename(tmp_path / "away")
    (folder / "rank-0").symlink_to(tmp_path / "away")
    assert isinstance(link, LinkRecord)
    with pytest.raises(NotStagedError):
        follow(linked, staging)
