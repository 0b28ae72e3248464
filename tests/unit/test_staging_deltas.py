"""Copies on a host that are made of an older copy and deltas: the version, or a full read."""

from __future__ import annotations

import errno
import mmap
import os
import re
import shutil
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from explorer_hooks import delta_base
from explorer_hooks.staging import NotStagedError, Staging
from syncd.coordination.leased_version import LeasedVersion
from syncd.deltas.applying import Link
from syncd.deltas.whole_version import WholeVersion
from syncd.protocol.names import MANIFEST, delta_folder, version_folder
from syncd.protocol.records import Latest, Record, encode
from syncd.protocol.reports import DeltaProgress
from tests.deltas import changed, make_delta, random_tensors, same_files, state, write_version
from tests.jobs import SmallJob
from tests.lagging import LagClock, LaggingStorage
from tests.storages import CHANGES, Clock, RuledStorage, refuse

SHAPES: dict[str, tuple[str, tuple[int, ...]]] = {
    "embed": ("BF16", (300, 1000)),
    "norm": ("F32", (64,)),
    "head": ("BF16", (1000, 40)),
}
SMALL = {"config.json": b"{}", "tokenizer/vocab.json": b"[]"}


class Unheld:
    """A test's versions stay by themselves."""

    def release(self) -> None:
        """Do nothing."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[WholeVersion], list[Link]]:
    """Versions 1, 4 and 9, and a delta from each to the next."""
    folder = tmp_path_factory.mktemp("made")
    tensors = random_tensors(1, **SHAPES)
    whole = [write_version(folder, 1, tensors, small=SMALL)]
    links = []
    for sequence, density in ((4, 0.02), (9, 0.03)):
        tensors = changed(tensors, density, sequence)
        files = [["head", "norm"], ["embed"]] if sequence == 9 else None
        given: Any = {"files": files, "small": SMALL, "metadata": {"of": "it"}}
        whole.append(write_version(folder, sequence, tensors, **given))
        links.append(make_delta(whole[-2], whole[-1], folder / delta_folder(sequence)))
    return whole, links


def _copied(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to))


class Versions:
    """The versions and the deltas in a job."""

    def __init__(self, job: SmallJob, whole: list[WholeVersion], links: list[Link]) -> None:
        self.job = job
        self.storage = RuledStorage()
        self.whole = [
            WholeVersion(
                _copied(one.folder, job.layout.version(one.manifest.sequence)), one.manifest
            )
            for one in whole
        ]
        self.links = [
            Link(_copied(one.folder, job.layout.delta(one.delta.target.sequence)), one.delta)
            for one in links
        ]

    def __getitem__(self, number: int) -> LeasedVersion:
        one = self.whole[number]
        return LeasedVersion(self.storage, one.folder, one.manifest, Unheld())


@pytest.fixture
def versions(job: SmallJob, made: tuple[list[WholeVersion], list[Link]]) -> Versions:
    return Versions(job, *made)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Path]:
    """A folder on another filesystem than the job's."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        if os.stat(folder).st_dev == os.stat(tmp_path).st_dev:
            pytest.skip("there is no second filesystem")
        yield Path(folder)


def is_copy(copy: LeasedVersion, version: WholeVersion) -> bool:
    """All but the manifests are the same files."""
    folder = copy.folder
    (folder / MANIFEST).rename(folder.parent / "manifest")
    try:
        return same_files(folder, version)
    finally:
        (folder.parent / "manifest").rename(folder / MANIFEST)


def check(staging: Staging, versions: Versions, number: int = 1) -> None:
    """Stage a version: the copy is whole."""
    assert is_copy(staging.stage(versions[number]), versions.whole[number])


def copies(stage: Path) -> list[str]:
    (room,) = stage.iterdir()
    return sorted(path.name.partition("-")[0] for path in room.iterdir() if path.is_dir())


@pytest.mark.parametrize("number", [1, 2])
def test_a_version_is_made_of_an_older_copy_and_deltas(
    versions: Versions, stage: Path, number: int
) -> None:
    staging = Staging(stage, storage=RuledStorage())
    base = staging.stage(versions[0])
    assert staging.fetched.full_bytes == sum(file.size for file in base.manifest.files)
    assert (staging.fetched.delta_bytes, staging.fetched.no_delta) == (
        None, "this host has no copy of an older version",
    )  # fmt: skip
    before = state(base.folder), state(versions.job.layout.published)
    copy = staging.stage(versions[number])
    assert is_copy(copy, versions.whole[number])
    chain = versions.links[:number]
    assert staging.fetched.delta_bytes == sum(link.delta.bytes for link in chain)
    assert staging.fetched.full_bytes == sum(map(len, SMALL.values()))
    assert staging.fetched.no_delta is None
    assert (state(base.folder), state(versions.job.layout.published)) == before
    base.release()
    copy.release()


def test_what_another_process_has_made_costs_nothing_more(versions: Versions, stage: Path) -> None:
    ours, theirs = Staging(stage), Staging(stage)
    held = [ours.stage(versions[0]), ours.stage(versions[1])]
    again = theirs.stage(versions[1])
    assert again.folder == held[1].folder
    assert (theirs.fetched.full_bytes, theirs.fetched.delta_bytes) == (0, None)


def test_a_rollback_costs_no_bytes_of_weights_if_the_host_has_the_old_version(
    versions: Versions, stage: Path
) -> None:
    staging = Staging(stage)
    held = [staging.stage(versions[0]), staging.stage(versions[1])]
    old = versions.whole[0]
    folder = versions.job.layout.version(10)
    shutil.copytree(old.folder, folder)
    manifest = old.manifest.model_copy(update={"sequence": 10})
    (folder / MANIFEST).write_bytes(encode(manifest))
    back = LeasedVersion(versions.storage, folder, manifest, Unheld())
    assert is_copy(staging.stage(back), WholeVersion(folder, manifest))
    assert staging.fetched.delta_bytes == 0
    for one in held:
        one.release()


def gone(versions: Versions, _: Path) -> None:
    shutil.rmtree(versions.links[0].folder)


def torn_record(versions: Versions, _: Path) -> None:
    os.truncate(versions.links[0].folder / "delta.json", 30)


def torn_blocks(versions: Versions, _: Path) -> None:
    path = versions.links[0].folder / "blocks"
    path.write_bytes(path.read_bytes()[:-9] + bytes(9))


def base_flipped(_: Versions, copy: Path) -> None:
    path = copy / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1  # of a tensor in which the delta changes other elements
    path.write_bytes(content)


def base_cut(_: Versions, copy: Path) -> None:
    os.truncate(copy / "model.safetensors", 1000)


@pytest.mark.parametrize("damage", [gone, torn_record, torn_blocks, base_flipped, base_cut])
def test_whatever_is_damaged_the_full_version_is_read(
    versions: Versions, stage: Path, damage: Callable[[Versions, Path], None]
) -> None:
    staging = Staging(stage)
    base = staging.stage(versions[0])
    damage(versions, base.folder)
    copy = staging.stage(versions[1])
    assert is_copy(copy, versions.whole[1])
    assert staging.fetched.delta_bytes is None
    assert staging.fetched.no_delta is not None
    assert copies(stage) == ["v000001", "v000004"]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EIO, os.strerror(errno.EIO)),
        OSError(errno.ESTALE, os.strerror(errno.ESTALE)),
        ImportError("libzstd.so.1: cannot open shared object file"),
        MemoryError("no 8 MiB"),
        IndexError("a bug"),
    ],
)
def test_a_delta_that_cannot_be_applied_is_left_for_the_full_version(
    versions: Versions, stage: Path, error: Exception
) -> None:
    staging = Staging(stage)
    held = staging.stage(versions[0])
    blocks = (versions.links[0].folder / "blocks").stat().st_ino

    def rule(name: str, given: tuple[Any, ...]) -> None:
        if name.startswith("pread") and os.fstat(given[0]).st_ino == blocks:
            raise error

    versions.storage.rules.append(rule)
    check(staging, versions)
    assert str(error) in (staging.fetched.no_delta or "")
    held.release()


def test_deltas_whose_code_cannot_be_imported_are_left_for_the_full_version(
    versions: Versions, stage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging = Staging(stage)
    held = staging.stage(versions[0])
    monkeypatch.setitem(sys.modules, "syncd.deltas.applying", None)
    check(staging, versions)
    assert "syncd.deltas.applying" in (staging.fetched.no_delta or "")
    held.release()


@pytest.mark.parametrize("record", ["deltas/d000004/delta.json", ".syncd/delta_progress.json"])
def test_if_a_record_of_deltas_cannot_be_read_the_full_version_is(
    versions: Versions, slow: Staging, record: str
) -> None:
    if record.startswith(".syncd"):
        Daemon(versions).says("making")
    versions.storage.rules.append(refuse("open_read", errno.EIO, where=record))
    check(slow, versions)
    assert os.strerror(errno.EIO) in (slow.fetched.no_delta or "")


def test_if_storage_fails_once_the_copy_is_held_nothing_stays_held(
    versions: Versions, stage: Path
) -> None:
    ours, theirs = Staging(stage), Staging(stage)
    made = ours.stage(versions[0])
    versions.storage.rules.append(refuse("status", errno.EIO, where="v000001"))
    theirs.stage(versions[0]).release()
    made.release()
    theirs.tidy()
    assert copies(stage) == []


def test_a_base_is_reported_for_as_long_as_it_is_there(versions: Versions, stage: Path) -> None:
    staging = Staging(stage)
    copy = staging.stage(versions[0])
    assert staging.base == 1
    copy.release()
    assert staging.base == 1
    staging.tidy()
    assert staging.base is None


def test_a_step_that_was_evaluated_hides_no_base(versions: Versions, stage: Path) -> None:
    """Its copy has the bytes of version 1, and comes before it by name."""
    staging = Staging(stage)
    held = [staging.stage(versions[0])]
    old = versions.whole[0]
    folder = versions.job.layout.root / ".syncd" / "bench" / "S" / "ID"
    shutil.copytree(old.folder, folder)
    manifest = old.manifest.model_copy(update={"sequence": 0})
    (folder / MANIFEST).write_bytes(encode(manifest))
    held.append(staging.stage(LeasedVersion(versions.storage, folder, manifest, Unheld())))
    check(staging, versions)
    assert staging.fetched.delta_bytes == versions.links[0].delta.bytes
    for one in held:
        one.release()


def test_a_version_that_is_damaged_is_not_made_of_deltas_either(
    versions: Versions, stage: Path
) -> None:
    staging = Staging(stage)
    held = staging.stage(versions[0])
    (versions.whole[1].folder / "config.json").write_bytes(b"[]")
    with pytest.raises(NotStagedError, match="is not what the manifest says"):
        staging.stage(versions[1])
    assert copies(stage) == ["v000001"]
    held.release()


def test_a_copy_that_nobody_holds_is_a_base_and_then_goes(versions: Versions, stage: Path) -> None:
    staging = Staging(stage, keep_last=True)
    first = staging.stage(versions[0])
    staging.serves(first.folder)
    first.release()
    later = Staging(stage)
    copy = later.stage(versions[1])
    assert later.fetched.delta_bytes
    later.tidy()
    assert copies(stage) == ["v000004"]
    copy.release()


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("room_for", [1, 2, 3])
def test_if_both_do_not_fit_the_base_makes_room_for_a_full_copy(
    versions: Versions, stage: Path, room_for: int
) -> None:
    budget = room_for * size_of(versions.whole[1].folder) + 2000
    first = Staging(stage, keep_last=True)
    copy = first.stage(versions[0])
    first.serves(copy.folder)
    copy.release()
    staging = Staging(stage, budget)
    check(staging, versions)
    assert (staging.fetched.delta_bytes is not None) == (room_for > 1)
    if room_for == 1:
        assert copies(stage) == ["v000004"]
        assert "do not fit" in (staging.fetched.no_delta or "")


def test_two_explorers_behind_by_different_versions_share_one_new_copy(
    versions: Versions, stage: Path
) -> None:
    ours, theirs = Staging(stage), Staging(stage)
    held = [ours.stage(versions[0]), theirs.stage(versions[1])]
    new = ours.stage(versions[2])
    # From the nearer one: the fewest bytes of deltas.
    assert ours.fetched.delta_bytes == versions.links[1].delta.bytes
    assert theirs.stage(versions[2]).folder == new.folder
    assert is_copy(new, versions.whole[2])
    for one in held:
        one.release()


def test_a_map_of_a_copy_keeps_its_bytes_whatever_is_made_of_it(
    versions: Versions, stage: Path
) -> None:
    staging = Staging(stage)
    copy = staging.stage(versions[0])
    with open(copy.folder / "model.safetensors", "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    before = bytes(mapped)
    for number in (1, 2):
        copy.release()
        copy = staging.stage(versions[number])
        staging.tidy()
    assert copies(stage) == ["v000009"]
    assert bytes(mapped) == before
    mapped.close()


def test_on_the_jobs_own_filesystem_nothing_is_made_of_deltas(
    versions: Versions, tmp_path: Path
) -> None:
    staging = Staging(tmp_path / "near", storage=RuledStorage())
    held = staging.stage(versions[0])
    copy = staging.stage(versions[1])
    weights = "model.safetensors"
    assert (copy.folder / weights).samefile(versions.whole[1].folder / weights)
    assert (staging.fetched.delta_bytes, staging.fetched.no_delta) == (None, None)
    held.release()


#: The calls that write into a file → which of what they are given is its descriptor.
TARGETS = {"write": 0, "pwrite": 0, "copy_file_range": 1, "sendfile": 1, "clone_range": 1}


@pytest.mark.parametrize("near", [True, False])
def test_no_file_with_a_second_name_is_ever_written_to(
    versions: Versions, tmp_path: Path, stage: Path, near: bool
) -> None:
    """It may be a published version's."""

    def rule(name: str, given: tuple[Any, ...]) -> None:
        if name in TARGETS:
            status = os.fstat(given[TARGETS[name]])
            assert not stat.S_ISREG(status.st_mode) or status.st_nlink <= 1

    storage = RuledStorage(rule)
    staging = Staging(tmp_path / "near" if near else stage, storage=storage)
    held = [staging.stage(versions[number]) for number in range(3)]
    for copy, whole in zip(held, versions.whole, strict=True):
        assert is_copy(copy, whole)
    assert storage.count("create", tmp_path if near else stage)


# -- the wait for a delta that is being made ---------------------------------------------------


class Daemon:
    """The hints of a daemon that makes the delta to version 4."""

    def __init__(self, versions: Versions) -> None:
        self._versions = versions
        self._layout = versions.job.layout
        self._delta = self._layout.delta(4)
        self._away = self._layout.root / "not-yet"
        self._delta.rename(self._away)
        self._put(
            self._layout.latest,
            Latest(sequence=4, step=4, folder=version_folder(4), kind="full", delta_from=1),
        )

    def says(self, state: Any, **more: Any) -> None:
        usual = {"sequence": 4, "base": 1, "seconds": 1.0, "time": 0.0}
        progress = DeltaProgress.model_validate({**usual, "state": state, **more})
        self._put(self._layout.delta_progress, progress)

    def commits(self) -> None:
        self._away.rename(self._delta)

    def makes_it(self) -> None:
        self.commits()
        self.says("made")

    def _put(self, path: Path, record: Record) -> None:
        self._versions.job.put(path, encode(record))


def a_slow_one(stage: Path, budget_bytes: int | None = None) -> Staging:
    clock = Clock()

    def rule(name: str, _: tuple[Any, ...]) -> None:
        if name == "sync_folder":
            clock.advance(1000.0)

    return Staging(stage, budget_bytes, storage=RuledStorage(rule), clock=clock)


@pytest.fixture
def slow(versions: Versions, stage: Path) -> Staging:
    """A stage whose first full copy has taken 1,000 seconds, by its clock."""
    staging = a_slow_one(stage)
    staging.stage(versions[0])
    return staging


def after_looks(versions: Versions, count: int, act: Callable[[], None]) -> None:
    """Do something after so many looks at the progress of a delta."""
    looks = 0

    def rule(name: str, given: tuple[Any, ...]) -> None:
        nonlocal looks
        if name == "open_read" and given[0] == versions.job.layout.delta_progress:
            looks += 1
            if looks == count:
                act()

    versions.storage.rules.append(rule)


def test_a_delta_that_is_being_made_is_waited_for(versions: Versions, slow: Staging) -> None:
    daemon = Daemon(versions)
    daemon.says("making", done=5)
    after_looks(versions, 3, daemon.makes_it)
    check(slow, versions)
    assert slow.fetched.delta_bytes == versions.links[0].delta.bytes


@pytest.mark.parametrize(
    ("says", "why"),
    [
        ({"state": "none", "why": "too many elements differ"}, "too many elements differ"),
        ({"state": "making", "sequence": 9}, "the delta to version 9"),
    ],
)
def test_a_delta_that_will_never_be_made_is_not_waited_for(
    versions: Versions, slow: Staging, says: dict[str, Any], why: str
) -> None:
    daemon = Daemon(versions)
    daemon.says("making")
    after_looks(versions, 2, lambda: daemon.says(**says))
    check(slow, versions)
    assert why in (slow.fetched.no_delta or "")


def goes_on_once_it_is_made(daemon: Daemon) -> None:
    daemon.makes_it()
    daemon.says("making", sequence=9)


@pytest.mark.parametrize("ends", [Daemon.commits, goes_on_once_it_is_made])
def test_a_delta_that_was_made_is_used_however_the_wait_ends(
    versions: Versions,
    slow: Staging,
    ends: Callable[[Daemon], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its daemon is killed before it says so, or makes the next one before the reader's look."""
    monkeypatch.setattr(delta_base, "_SILENCE", 0.5)
    daemon = Daemon(versions)
    daemon.says("making")
    after_looks(versions, 2, lambda: ends(daemon))
    check(slow, versions)
    assert slow.fetched.delta_bytes == versions.links[0].delta.bytes


def test_latest_alone_makes_nobody_wait(versions: Versions, slow: Staging) -> None:
    """After a take-over LATEST still has ``delta_from``, and there is no progress."""
    Daemon(versions)
    versions.storage.calls.clear()
    check(slow, versions)
    assert "is not being made" in (slow.fetched.no_delta or "")
    layout = versions.job.layout
    assert versions.storage.count("open_read", layout.delta_progress) == 2
    assert ("utime", (layout.state,)) in versions.storage.calls


@pytest.mark.parametrize("seconds", [None, 1e6])
def test_a_delta_that_will_not_be_there_sooner_than_a_copy_is_not_waited_for(
    versions: Versions, slow: Staging, seconds: float | None
) -> None:
    Daemon(versions).says("making", seconds=seconds)
    check(slow, versions)
    assert "a copy is sooner there" in (slow.fetched.no_delta or "")
    assert versions.storage.count("open_read", versions.job.layout.delta_progress) == 1


def test_the_speed_of_copies_is_known_to_all_processes_of_the_host(
    versions: Versions, slow: Staging
) -> None:
    daemon = Daemon(versions)
    daemon.says("making")
    after_looks(versions, 3, daemon.makes_it)
    other = Staging(slow.folder)  # which has copied nothing yet
    check(other, versions)
    assert other.fetched.delta_bytes == versions.links[0].delta.bytes


def test_a_damaged_speed_makes_nobody_wait(versions: Versions, slow: Staging) -> None:
    (room,) = slow.folder.iterdir()
    (room / ".speed").write_bytes(b"quick")
    Daemon(versions).says("making")
    check(slow, versions)
    assert "a copy is sooner there" in (slow.fetched.no_delta or "")


def test_for_a_base_that_must_make_room_nobody_waits(versions: Versions, stage: Path) -> None:
    staging = a_slow_one(stage, budget_bytes=size_of(versions.whole[1].folder) + 2000)
    staging.stage(versions[0]).release()
    Daemon(versions).says("making")
    check(staging, versions)
    assert "must be removed to free space" in (staging.fetched.no_delta or "")
    assert not versions.storage.count("open_read", versions.job.layout.delta_progress)


def test_for_a_base_that_only_another_job_has_nobody_waits(
    versions: Versions, slow: Staging, tmp_path: Path
) -> None:
    """Both jobs have a version 4, and share the stage folder."""
    (tmp_path / "b").mkdir()
    other = write_version(tmp_path / "b", 4, random_tensors(9, x=("BF16", (4,))))
    theirs = Staging(slow.folder)
    kept = theirs.stage(LeasedVersion(versions.storage, other.folder, other.manifest, Unheld()))
    for link in versions.links:
        shutil.rmtree(link.folder)
    layout, put = versions.job.layout, versions.job.put
    latest = Latest(sequence=9, step=9, folder=version_folder(9), kind="full", delta_from=4)
    put(layout.latest, encode(latest))
    progress = DeltaProgress(sequence=9, base=4, state="making", time=0.0)
    put(layout.delta_progress, encode(progress))
    check(slow, versions, 2)
    assert "not on this host" in (slow.fetched.no_delta or "")
    kept.release()


class Client:
    """An explorer's host that mounts the job from a network, with caches that lag."""

    def __init__(self, versions: Versions) -> None:
        self.clock = LagClock()
        self.storage = LaggingStorage(versions.job.layout.root, self.clock)
        self._versions = versions

    def __getitem__(self, number: int) -> LeasedVersion:
        one = self._versions.whole[number]
        return LeasedVersion(self.storage, one.folder, one.manifest, Unheld())


def test_on_a_network_a_delta_that_was_waited_for_is_found(
    versions: Versions, slow: Staging
) -> None:
    client, daemon, looks = Client(versions), Daemon(versions), 0
    daemon.says("making")
    shutil.rmtree(versions.links[1].folder)

    def a_second_passes() -> None:
        nonlocal looks
        looks += 1
        client.clock.advance(1.0)
        if looks == 5:
            daemon.makes_it()

    assert is_copy(slow.stage(client[1], cancel=a_second_passes), versions.whole[1])
    assert slow.fetched.delta_bytes == versions.links[0].delta.bytes


def test_on_a_network_the_first_delta_of_all_is_found(versions: Versions, stage: Path) -> None:
    client, staging, layout = Client(versions), Staging(stage), versions.job.layout
    held = staging.stage(client[0])
    away = layout.root / "away"
    layout.deltas.rename(away)
    assert client.storage.names(layout.deltas) == []
    away.rename(layout.deltas)
    client.clock.advance(5.0)
    assert is_copy(staging.stage(client[1]), versions.whole[1])
    assert staging.fetched.delta_bytes == versions.links[0].delta.bytes
    held.release()


def test_without_a_sign_of_life_the_full_version_is_read(
    versions: Versions, slow: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_base, "_SILENCE", 0.5)
    Daemon(versions).says("making")
    check(slow, versions)
    assert "reported no progress" in (slow.fetched.no_delta or "")


def test_the_wait_is_shorter_than_a_full_copy(versions: Versions, stage: Path) -> None:
    staging = Staging(stage)  # its full copy takes milliseconds
    held = staging.stage(versions[0])
    Daemon(versions).says("making", seconds=0.0)
    check(staging, versions)
    assert re.search(r"was not made within .* ms$", staging.fetched.no_delta or "")
    held.release()


def test_a_wait_can_be_cancelled(versions: Versions, slow: Staging) -> None:
    Daemon(versions).says("making")
    cancelled = threading.Event()
    after_looks(versions, 2, cancelled.set)

    def cancel() -> None:
        if cancelled.is_set():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        slow.stage(versions[1], cancel=cancel)
    check(slow, versions, 0)


# -- cut off anywhere --------------------------------------------------------------------------


class CutError(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("how", ["killed", "refused"])
def test_cut_off_anywhere_the_next_process_has_the_version(
    versions: Versions, stage: Path, how: str
) -> None:
    """At each change of the stage folder while a copy is made of a base and a delta."""
    first = Staging(stage, keep_last=True)
    base = first.stage(versions[0])
    first.serves(base.folder)
    published = state(versions.job.layout.published)
    kept = state(base.folder)
    cuts = 0
    while True:
        seen = 0

        def rule(name: str, _: tuple[Any, ...], at: int = cuts) -> None:
            nonlocal seen
            if name in CHANGES:
                seen += 1
                if seen > at if how == "killed" else seen == at + 1:
                    if how == "killed":
                        raise CutError
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        ruled = RuledStorage()
        staging = Staging(stage, storage=ruled)
        ruled.rules.append(rule)
        ended = False
        with suppress(CutError, NotStagedError):
            staging.stage(versions[1]).release()
            ended = True
        ruled.rules.clear()
        assert state(versions.job.layout.published) == published
        assert state(base.folder) == kept
        copy = Staging(stage).stage(versions[1])
        assert is_copy(copy, versions.whole[1])
        copy.release()
        Staging(stage).tidy()
        assert copies(stage) == ["v000001"]
        if ended and seen <= cuts:
            break
        cuts += 1
    assert cuts > 8
    base.release()
