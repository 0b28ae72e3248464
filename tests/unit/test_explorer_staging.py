import errno
import fcntl
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from explorer_hooks.reader import LeasedVersion
from explorer_hooks.staging import NotStagedError, Staging
from syncd.protocol.errors import CancelledError
from tests.deltas import contents
from tests.explorers import held, publish
from tests.jobs import SmallJob, flip
from tests.refusals import invalid
from tests.staged_deltas import copies
from tests.storages import FastStorage, RuledStorage, once, refuse

HOLDER = """
import fcntl, os, sys
fd = os.open(sys.argv[1] + "/manifest.json", os.O_RDONLY)
fcntl.flock(fd, fcntl.LOCK_SH)
print("holds", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def stage(tmp_path: Path) -> Path:
    return tmp_path / "stage"


@pytest.fixture
def version(job: SmallJob) -> Iterator[LeasedVersion]:
    publish(job, 1)
    with held(job) as version:
        yield version


def take(job: SmallJob, staging: Staging) -> LeasedVersion:
    """A copy of the newest version."""
    with held(job) as version:
        return staging.stage(version)


def no_links() -> RuledStorage:
    return RuledStorage(refuse("link", errno.EXDEV))


def test_a_version_is_copied_whole_and_read_once(job: SmallJob, stage: Path) -> None:
    publish(job, 3)
    source = job.explorers = RuledStorage()
    staging = Staging(stage, storage=no_links())
    with held(job) as version:
        source.calls.clear()
        copy = staging.stage(version)
        opened = [str(given[0]) for name, given in source.calls if name == "open_read"]
        assert len(opened) == len(set(opened)) == len(version.manifest.files)
    assert copy.folder.parent.parent == stage
    assert copy.source == job.version(1) != copy.folder
    assert (copy.sequence, copy.step, copy.kind) == (1, 3, "full")
    assert contents(copy.folder) == contents(copy.source)
    copy.verify()
    assert [file.path.parent for file in copy.open_weights()] == [copy.folder]
    copy.release()
    copy.release()


def test_where_both_share_a_filesystem_the_files_get_a_second_name(
    job: SmallJob, version: LeasedVersion, stage: Path
) -> None:
    copy = Staging(stage).stage(version)
    name = "model.safetensors"
    assert (copy.folder / name).samefile(version.folder / name)
    shutil.rmtree(job.version(1))
    copy.verify()


def test_what_another_has_copied_is_held_and_not_copied_again(
    job: SmallJob, version: LeasedVersion, stage: Path
) -> None:
    storage = no_links()
    first = Staging(stage, storage=no_links()).stage(version)
    assert first.folder == Staging(stage, storage=storage).stage(version).folder
    assert storage.count("create", stage) == 0
    assert storage.count("open_read", job.layout.published) == 0


def test_those_who_come_at_once_wait_for_the_one_who_copies(
    version: LeasedVersion, stage: Path
) -> None:
    storages = [no_links() for _ in range(4)]
    folders: list[Path] = []
    begin = threading.Barrier(len(storages))

    def stage_it(storage: RuledStorage) -> None:
        staging = Staging(stage, storage=storage)
        begin.wait()
        folders.append(staging.stage(version).folder)

    threads = [threading.Thread(target=stage_it, args=[one]) for one in storages]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(folders) == 4
    assert len(set(folders)) == 1
    assert sum(bool(one.count("create", stage)) for one in storages) == 1


def test_an_old_copy_goes_when_nobody_on_this_host_holds_it(job: SmallJob, stage: Path) -> None:
    staging = Staging(stage)
    publish(job, 1)
    first, other = take(job, staging), take(job, Staging(stage))
    publish(job, 2)
    second = take(job, staging)
    first.release()
    staging.tidy()
    assert copies(stage) == ["v000001", "v000002"]
    other.release()
    staging.tidy()
    assert copies(stage) == ["v000002"]
    second.release()
    staging.tidy()
    assert copies(stage) == []


def test_a_copy_that_a_process_holds_stays_until_it_dies(job: SmallJob, stage: Path) -> None:
    staging = Staging(stage)
    publish(job, 1)
    copy = take(job, staging)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(copy.folder)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"holds\n"
        copy.release()
        staging.tidy()
        assert copies(stage) == ["v000001"]
    finally:
        holder.kill()
        holder.communicate()
    staging.tidy()
    assert copies(stage) == []


def test_the_copy_that_was_served_last_stays_where_that_is_asked_for(
    job: SmallJob, stage: Path
) -> None:
    staging = Staging(stage, keep_last=True)
    publish(job, 1)
    copy = take(job, staging)
    staging.serves(copy.folder)
    copy.release()
    staging.tidy()
    assert copies(stage) == ["v000001"]
    later = Staging(stage, keep_last=True)
    later.serves(copy.folder)
    publish(job, 2)
    newer = take(job, later)
    assert copies(stage) == ["v000001", "v000002"]
    later.serves(newer.folder)
    later.tidy()
    assert copies(stage) == ["v000002"]


def test_a_budget_is_kept_and_what_is_not_held_makes_room(job: SmallJob, stage: Path) -> None:
    publish(job, 1)
    with held(job) as version:
        size = version.manifest.size
        with pytest.raises(NotStagedError, match="do not fit into the stage folder's budget of 10"):
            Staging(stage, 10).stage(version)
        assert copies(stage) == []
        staging = Staging(stage, size + (version.folder / "manifest.json").stat().st_size + 20)
        first = staging.stage(version)
    publish(job, 2)
    with held(job) as version:
        with pytest.raises(NotStagedError, match="because other copies take"):
            staging.stage(version)
        first.release()
        staging.stage(version)
    assert copies(stage) == ["v000002"]


def test_a_full_disk_is_no_fault_of_the_version(version: LeasedVersion, stage: Path) -> None:
    storage = no_links()
    staging = Staging(stage, storage=storage)
    storage.refuse("pwrite", errno.ENOSPC)
    with pytest.raises(NotStagedError, match="No space left"):
        staging.stage(version)
    assert copies(stage) == []
    storage.rules.pop()
    staging.stage(version).verify()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
@pytest.mark.parametrize("links", [True, False])
def test_a_damaged_version_is_never_staged(
    job: SmallJob, stage: Path, name: str, links: bool
) -> None:
    publish(job, 1)
    flip(job.version(1) / name)
    with pytest.raises(NotStagedError, match="is not what the manifest"):
        take(job, Staging(stage, storage=FastStorage() if links else no_links()))
    assert copies(stage) == []


def test_jobs_of_one_host_do_not_take_each_others_versions(tmp_path: Path, stage: Path) -> None:
    staging = Staging(stage)
    found = []
    for name in ("one", "two"):
        job = SmallJob(tmp_path / name)
        job.save(1, 1.0 if name == "one" else 2.0)
        job.run()
        found.append(take(job, staging))
    assert copies(stage) == ["v000001", "v000001"]
    weights = [(copy.folder / "model.safetensors").read_bytes() for copy in found]
    assert weights[0] != weights[1]
    # A job that is deleted, and made anew under the same path.
    shutil.rmtree(tmp_path / "two")
    job = SmallJob(tmp_path / "two")
    job.save(1, 3.0, counter=1)
    job.run()
    found.append(take(job, staging))
    assert (found[2].folder / "model.safetensors").read_bytes() not in weights
    found[2].verify()


def test_a_copy_of_a_job_that_was_made_anew_counts_only_if_its_bytes_are_the_versions(
    job: SmallJob, memory: Path
) -> None:
    """Also if the save has the same id: it may have been published again by other settings."""
    publish(job, 1)
    before = take(job, Staging(memory))
    shutil.rmtree(job.root)
    anew = SmallJob(job.root)
    assert anew.save(1, 4.0) == before.manifest.save_id
    anew.run()
    copy = take(anew, Staging(memory))
    assert contents(copy.folder) == contents(anew.version(1))
    assert copies(memory) == ["v000001"]


def test_copies_of_an_earlier_start_of_the_host_go_and_are_never_used(
    job: SmallJob, stage: Path
) -> None:
    publish(job, 1)
    earlier = stage / f"syncd-{os.geteuid()}-0123456789abcdef"
    (earlier / "v000001-key").mkdir(parents=True)
    another = stage / "syncd-99999-0123456789abcdef"
    another.mkdir()
    take(job, Staging(stage)).verify()
    assert not earlier.exists()
    assert another.exists()


def test_copies_that_another_host_holds_stay_where_the_folder_is_shared_by_mistake(
    job: SmallJob, stage: Path
) -> None:
    publish(job, 1)
    elsewhere = stage / f"syncd-{os.geteuid()}-0123456789abcdef" / "v000001-key"
    elsewhere.mkdir(parents=True)
    (elsewhere / "manifest.json").touch()
    staging = Staging(stage)
    fd = os.open(elsewhere / "manifest.json", os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_SH)
    take(job, staging).release()
    assert elsewhere.exists()
    os.close(fd)
    staging.tidy()
    assert not elsewhere.parent.exists()


def test_what_a_copier_left_that_was_killed_goes(job: SmallJob, stage: Path) -> None:
    publish(job, 1)
    staging = Staging(stage)
    (room,) = stage.iterdir()
    (room / ".tmp-v000001-key-half").mkdir()
    (room / ".tmp-v000001-key-half" / "model.safetensors").write_bytes(b"half")
    take(job, staging).release()
    staging.tidy()
    assert [path.name for path in room.iterdir()] == [".copier"]


def test_a_copier_that_takes_too_long_is_not_waited_for(
    version: LeasedVersion, stage: Path
) -> None:
    begun, free = threading.Event(), threading.Event()

    def hang(*_: object) -> None:
        begun.set()
        free.wait()

    slow = no_links()
    slow.once("pwrite", hang)
    copier = threading.Thread(target=Staging(stage, storage=slow).stage, args=[version])
    copier.start()
    begun.wait()
    try:
        with pytest.raises(NotStagedError, match=r"for longer than 0\.01 s"):
            Staging(stage, patience=0.01).stage(version)
        Staging(stage).tidy()  # leaves what is being made alone
    finally:
        free.set()
        copier.join()
    Staging(stage, storage=(late := no_links())).stage(version).verify()
    assert late.count("create", stage) == 0


def test_a_copy_is_cancelled_and_leaves_nothing(version: LeasedVersion, stage: Path) -> None:
    asked = []

    def cancel() -> None:
        asked.append(True)
        if len(asked) > 1:
            raise CancelledError("stopped")

    with pytest.raises(CancelledError):
        Staging(stage, storage=no_links()).stage(version, cancel=cancel)
    assert copies(stage) == []


def test_a_copy_that_is_removed_as_it_is_to_be_held_is_made_again(
    version: LeasedVersion, stage: Path
) -> None:
    Staging(stage).stage(version).release()
    sweeper = Staging(stage)
    storage = RuledStorage(once("fstat", lambda *_: sweeper.tidy(), where=""))
    Staging(stage, storage=storage).stage(version).verify()


@pytest.mark.parametrize(
    ("budget", "patience"), [(0, 1.0), (-1, 1.0), ("1GB", 1.0), (None, 0.0), (None, "5")]
)
def test_what_is_no_number_above_0_is_refused(stage: Path, budget: Any, patience: Any) -> None:
    with invalid(r"it must be a number of \w+, more than 0$"):
        Staging(stage, budget, patience=patience)


def test_a_folder_with_a_tilde_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with invalid(r"'~/copies', but only a shell expands '~'"):
        Staging("~/copies")
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with invalid("cannot be the stage folder"):
        Staging(tmp_path / "file")
    room = Staging(tmp_path / "stage")._copies.room
    room.rmdir()
    room.symlink_to(tmp_path)
    with invalid("choose another stage folder"):
        Staging(tmp_path / "stage")
