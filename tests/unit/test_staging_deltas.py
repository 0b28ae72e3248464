"""Copies on a host that are made from deltas: equal to the fold, or the version, or none."""

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
from syncd.deltas.delta_index import DeltaRecord
from syncd.protocol.errors import CancelledError, VersionGoneError
from syncd.protocol.names import DELTA, MANIFEST
from syncd.protocol.records import Tip, encode
from tests.deltas import STORAGE
from tests.jobs import SmallJob, flip
from tests.staged_deltas import SMALL, DeltaChain, copies, state
from tests.storages import RuledStorage, os_error


@pytest.fixture
def chain(job: SmallJob, tmp_path: Path) -> DeltaChain:
    return DeltaChain(job, tmp_path)


def bytes_of(chain: DeltaChain, *numbers: int) -> int:
    """The bytes of the deltas to these saves."""
    return sum(file.size for n in numbers for file in chain.deltas[n - 2].record.files)


def size(chain: DeltaChain) -> int:
    return chain.whole[0].manifest.size


def follow(chain: DeltaChain, staging: Staging) -> LeasedVersion:
    return staging.follow(chain.lead(), chain.hold)


def check_third(chain: DeltaChain, staging: Staging) -> None:
    chain.check(staging.stage(chain.version(3)), 3)


@pytest.fixture
def staging(memory: Path) -> Staging:
    return Staging(memory)


@pytest.fixture
def held(chain: DeltaChain, staging: Staging) -> Iterator[LeasedVersion]:
    base = staging.stage(chain.version(1))
    yield base
    base.release()


beside_the_first = pytest.mark.usefixtures("held")


def test_the_next_save_is_made_from_a_copy_and_deltas_alone(
    chain: DeltaChain, memory: Path
) -> None:
    staging = Staging(memory, storage=RuledStorage())
    base = staging.stage(chain.version(1))
    before = state(base.folder), state(chain.job.layout.root)
    chain.storage.calls.clear()
    copy = chain.follow(staging)
    assert copy.source == chain.job.version(3)
    assert staging.fetched.full_bytes == 0
    assert staging.fetched.delta_bytes == bytes_of(chain, 2, 3)
    assert staging.fetched.fetch is not None
    assert staging.fetched.rebuild is not None
    assert chain.storage.count("open_read", chain.job.layout.published) == 0
    assert chain.holds == 0
    assert before == (state(base.folder), state(chain.job.layout.root))
    chain.add_delta()
    later = chain.follow(staging)  # from the nearer copy
    assert staging.fetched.delta_bytes == bytes_of(chain, 4)
    for one in (base, copy, later):
        one.release()
    staging.tidy()
    assert copies(memory) == []


def test_engines_of_one_host_read_a_delta_once(chain: DeltaChain, memory: Path) -> None:
    ours, theirs = Staging(memory), Staging(memory)
    held = [ours.stage(chain.version(1)), chain.follow(ours)]
    chain.storage.calls.clear()
    again = chain.follow(theirs)
    assert again.folder == held[1].folder
    assert (theirs.fetched.full_bytes, theirs.fetched.delta_bytes) == (0, None)
    assert chain.storage.count("open_read", chain.job.layout.deltas) == 0
    assert ours.hold_again(again).folder == again.folder


@beside_the_first
def test_a_fold_costs_no_second_copy(chain: DeltaChain, staging: Staging) -> None:
    copy = chain.follow(staging)
    chain.publish(3)
    chain.storage.calls.clear()
    assert staging.stage(chain.version(3)).folder == copy.folder
    assert not chain.storage.calls


@beside_the_first
def test_a_version_behind_which_a_host_is_comes_by_deltas_too(
    chain: DeltaChain, staging: Staging
) -> None:
    chain.publish(3)
    check_third(chain, staging)
    assert staging.fetched.full_bytes == 0
    assert staging.fetched.delta_bytes == bytes_of(chain, 2, 3)


@beside_the_first
def test_deltas_from_a_copy_here_are_read_rather_than_a_version(
    chain: DeltaChain, staging: Staging
) -> None:
    tip = chain.latest.tip
    chain.publish(2)
    chain.put(tip=tip)
    chain.follow(staging)
    assert (chain.holds, staging.fetched.full_bytes) == (0, 0)
    assert staging.fetched.delta_bytes == bytes_of(chain, 2, 3)


@beside_the_first
def test_a_delta_of_no_use_that_cannot_be_read_is_passed_over(
    chain: DeltaChain, staging: Staging
) -> None:
    folder, delta = chain.deltas[1]
    shutil.move(folder, chain.job.delta(4))
    folder.mkdir()
    (folder / DELTA).touch()
    chain.storage.refuse("open_read", errno.EIO, where=f"{folder.name}/{DELTA}")
    chain.put(tip=Tip(sequence=4, step=3, save_id=delta.target))
    assert follow(chain, staging).sequence == 4


@beside_the_first
def test_what_is_rolled_back_meanwhile_is_not_served(
    chain: DeltaChain, memory: Path, staging: Staging
) -> None:

    def roll_back() -> None:
        chain.put(tip=None, sequence=4, folder="v000004", no_deltas="v1 is served again")

    with pytest.raises(NotStagedError, match="served again"):
        staging.follow(chain.lead(), chain.hold, cancel=roll_back)
    staging.tidy()
    assert copies(memory) == ["v000001"]


def test_a_host_without_a_copy_reads_the_version_and_the_deltas(
    chain: DeltaChain, memory: Path, staging: Staging
) -> None:
    copy = chain.follow(staging)
    assert chain.holds == 1
    assert staging.fetched.full_bytes == size(chain)
    assert staging.fetched.delta_bytes == bytes_of(chain, 2, 3)
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
    chain: DeltaChain,
    staging: Staging,
    held: LeasedVersion,
    damage: Callable[[Path], None],
    name: str,
) -> None:
    damage(held.folder / name)
    chain.follow(staging)
    assert chain.holds == 1
    assert staging.fetched.full_bytes == size(chain)


def places(folder: Path) -> Iterator[tuple[str, int]]:
    """A byte of a small file, of each header, and at both ends of each tensor."""
    yield "tokenizer/vocab.json", 0
    for path in folder.glob("*.safetensors"):
        yield path.name, 9
        with SafetensorsFile.open(STORAGE, path) as file:
            for entry in file.entries:
                yield from ((path.name, entry.begin), (path.name, entry.end - 1))


def test_no_flipped_bit_of_a_base_gets_into_the_next_copy(chain: DeltaChain) -> None:
    flips = list(places(chain.whole[0].folder))
    assert len(flips) == 1 + 2 + 2 * len(chain.tensors[0])
    for number, (name, at) in enumerate(flips, 1):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as stage:
            staging = Staging(stage)
            base = staging.stage(chain.version(1))
            flip(base.folder / name, at)
            chain.follow(staging).release()
            assert chain.holds == number, "it read LATEST's version instead of the base"
            base.release()


def test_a_base_with_another_flipped_byte_is_replaced_for_a_published_version_too(
    chain: DeltaChain, memory: Path, staging: Staging, held: LeasedVersion
) -> None:
    flip(held.folder / "model-00001-of-00002.safetensors")
    chain.publish(3)
    check_third(chain, staging)
    assert staging.fetched.delta_bytes is None
    assert "no deltas lead" in (staging.fetched.no_delta or "")
    assert copies(memory) == ["v000003"]


def gone(chain: DeltaChain) -> None:
    shutil.rmtree(chain.deltas[0].folder)


def torn_record(chain: DeltaChain) -> None:
    os.truncate(chain.deltas[0].folder / DELTA, 30)


def torn_file(chain: DeltaChain) -> None:
    path = chain.deltas[1].folder / "rank-1"
    os.truncate(path, path.stat().st_size - 1)


def flipped_block(chain: DeltaChain) -> None:
    flip(chain.deltas[1].folder / "rank-0", 0)


def flipped_index(chain: DeltaChain) -> None:
    flip(chain.deltas[1].folder / "rank-0")


def huge(chain: DeltaChain) -> None:
    """Its record says so, and the file is as long."""
    folder, delta = chain.deltas[1]
    file = delta.files[0].model_copy(update={"size": 2**40})
    os.truncate(folder / file.name, 2**40)
    (folder / DELTA).write_bytes(
        encode(delta.model_copy(update={"files": (file, *delta.files[1:])}))
    )


def other_base(chain: DeltaChain) -> None:
    """A delta in a circle."""
    folder, delta = chain.deltas[1]
    (folder / DELTA).write_bytes(encode(delta.model_copy(update={"base": delta.target})))


@pytest.mark.parametrize(
    "damage", [gone, torn_record, torn_file, flipped_block, flipped_index, huge, other_base]
)
def test_a_delta_that_cannot_be_used_costs_no_version(
    chain: DeltaChain,
    memory: Path,
    staging: Staging,
    held: LeasedVersion,
    damage: Callable[[DeltaChain], None],
) -> None:
    before = state(held.folder)
    damage(chain)
    with pytest.raises(NotStagedError, match="a version only" if damage is huge else None):
        follow(chain, staging)
    assert chain.holds == 0
    assert state(held.folder) == before
    assert copies(memory) == ["v000001"]
    chain.publish(3)
    check_third(chain, staging)
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
    chain: DeltaChain, staging: Staging, error: Exception
) -> None:
    def rule(name: str, given: tuple[Any, ...]) -> None:
        if name == "open_read" and "rank-0" in str(given[0]):
            raise error

    chain.storage.rules.append(rule)
    with pytest.raises(NotStagedError, match=str(error).split("]")[-1].strip()):
        follow(chain, staging)
    chain.storage.rules.clear()
    chain.follow(staging)


@beside_the_first
def test_a_cancellation_ends_it(chain: DeltaChain, memory: Path, staging: Staging) -> None:
    left = 3

    def cancel() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise CancelledError("enough")

    with pytest.raises(CancelledError):
        staging.follow(chain.lead(), chain.hold, cancel=cancel)
    assert copies(memory) == ["v000001"]
    chain.publish(3)
    left = 3
    with pytest.raises(CancelledError):
        staging.stage(chain.version(3), cancel=cancel)


def test_without_numpy_versions_are_copied_and_one_line_says_so_without_a_warning(
    chain: DeltaChain,
    memory: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    for module in ("folding", "encoding", "delta_file"):
        monkeypatch.delitem(sys.modules, f"syncd.deltas.{module}", raising=False)
    monkeypatch.setitem(sys.modules, "numpy", None)
    staging = Staging(memory)
    assert not staging.follows(chain.job.root)
    held = staging.stage(chain.version(1))
    chain.publish(3)
    check_third(chain, staging)
    assert "pip install" in (staging.fetched.no_delta or "")
    assert "pip install 'syncd[deltas]'" in caplog.text
    assert {record.levelname for record in caplog.records} == {"INFO"}
    held.release()


@pytest.mark.parametrize("room_for", [1, 2, 3])
def test_without_room_for_both_a_version_takes_the_place_of_its_base(
    chain: DeltaChain, memory: Path, room_for: int
) -> None:
    first = Staging(memory, keep_last=True)
    copy = first.stage(chain.version(1))
    first.serves(copy.folder)
    copy.release()
    staging = Staging(memory, room_for * (size(chain) + 6000))
    if room_for == 1:
        with pytest.raises(NotStagedError, match="do not fit"):
            follow(chain, staging)
        chain.publish(3)
        check_third(chain, staging)
        assert copies(memory) == ["v000003"]
        assert "do not fit" in (staging.fetched.no_delta or "")
    else:
        chain.follow(staging)


def test_a_copy_whose_manifest_is_damaged_is_no_copy(
    chain: DeltaChain, staging: Staging, held: LeasedVersion
) -> None:
    cut(held.folder / MANIFEST)
    with pytest.raises(NotStagedError, match=MANIFEST):
        staging.stage(chain.version(1))
    with pytest.raises(NotStagedError):
        follow(chain, staging)
    held.release()
    staging.tidy()
    chain.follow(staging)


def test_copies_that_nobody_holds_make_room(chain: DeltaChain, memory: Path) -> None:
    staging = Staging(memory, int(2.7 * size(chain)))
    staging.stage(chain.version(1)).release()
    held = chain.follow(staging)
    chain.add_delta()
    chain.follow(staging)
    assert copies(memory) == ["v000003", "v000004"]
    held.release()


@beside_the_first
def test_more_bytes_of_deltas_than_of_a_version_are_not_read(
    chain: DeltaChain, staging: Staging
) -> None:
    for _ in range(64):
        chain.add_delta()
    chain.storage.calls.clear()
    with pytest.raises(NotStagedError, match="no deltas lead"):
        follow(chain, staging)
    assert not [given for name, given in chain.storage.calls if "rank-" in str(given[0])]


def test_copies_of_other_jobs_are_no_base(
    chain: DeltaChain, memory: Path, staging: Staging, tmp_path: Path
) -> None:
    other = DeltaChain(SmallJob(tmp_path / "other"), tmp_path / "other")
    held = Staging(memory).stage(other.version(1))
    chain.follow(staging)
    assert chain.holds == 1
    held.release()


def test_on_the_jobs_own_filesystem_nobody_follows(chain: DeltaChain, tmp_path: Path) -> None:
    staging = Staging(tmp_path / "near")
    assert not staging.follows(chain.job.root)
    held = staging.stage(chain.version(1))
    chain.publish(3)
    copy = staging.stage(chain.version(3))
    name = "model-00001-of-00002.safetensors"
    assert (copy.folder / name).samefile(chain.whole[2].folder / name)
    assert "on the job's filesystem" in (staging.fetched.no_delta or "")
    held.release()


@beside_the_first
def test_what_is_read_is_the_record_and_each_file_once(chain: DeltaChain, staging: Staging) -> None:
    chain.storage.calls.clear()
    chain.follow(staging)
    read = [given[0] for name, given in chain.storage.calls if name == "open_read"]
    files = [delta.folder / name for delta in chain.deltas for name in (DELTA, "rank-0", "rank-1")]
    assert sorted(read) == sorted([chain.job.layout.latest, *files])


def test_a_folder_that_cannot_be_looked_into_is_no_refusal(
    chain: DeltaChain, staging: Staging, held: LeasedVersion
) -> None:
    chain.storage.refuse("utime", errno.EROFS)
    chain.follow(staging)
    assert SMALL["config.json"] == held.read_file("config.json")


@beside_the_first
def test_a_record_with_a_foreign_name_is_not_followed_out_of_the_folder(
    chain: DeltaChain, staging: Staging, tmp_path: Path
) -> None:
    folder, delta = chain.deltas[1]
    (folder / "rank-0").rename(tmp_path / "away")
    (folder / "rank-0").symlink_to(tmp_path / "away")
    assert isinstance(delta, DeltaRecord)
    with pytest.raises(NotStagedError):
        follow(chain, staging)
