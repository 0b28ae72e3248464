import errno
import os
from pathlib import Path

import pytest

from syncd.protocol.errors import SupersededError
from syncd.storage.epoch import Epoch
from syncd.storage.job import Job
from tests.jobs import SmallJob
from tests.lagging import Hosts
from tests.storages import FastStorage, fails, once, refuse

pytestmark = pytest.mark.lagging


def rooms(job: SmallJob) -> list[str]:
    return sorted(name.partition("-")[0] for name in os.listdir(job.layout.epochs))


def room_of(epoch: Epoch) -> Path:
    return epoch.building.parent


def built(epoch: Epoch, sequence: int) -> Path:
    folder = epoch.start_build(f"v{sequence:06}")
    (folder / "file").write_bytes(b"built")
    return folder


def test_a_take_over_empties_and_removes_every_lower_room(job: SmallJob) -> None:
    for room in ("3-00000000", "12-ffffffff", "12-00000000"):
        (job.layout.epochs / room / "building" / "v000009").mkdir(parents=True)
        (job.layout.epochs / room / "trash").mkdir()
        (job.layout.epochs / room / ".tmp-LATEST-abc").touch()
    epoch = job.take_over()
    assert epoch.number == 13
    assert rooms(job) == ["13"]
    assert sum(path.name.startswith("v000009") for path in epoch.condemned()) == 3
    epoch.sweep()
    assert epoch.condemned() == []


def test_what_lower_rooms_had_set_aside_is_handed_on_and_never_deleted(job: SmallJob) -> None:
    for step in (3, 4):
        job.step(step).mkdir()
        job.take_over().set_aside(job.step(step))
    epoch = job.take_over()
    epoch.sweep()
    names = [path.name.rsplit("-") for path in epoch.undecided()]
    assert sorted(name[0] for name in names) == ["global_step_3", "global_step_4"]


def test_a_number_is_never_used_again_after_a_daemon_left(job: SmallJob) -> None:
    numbers = []
    for _ in range(3):
        epoch = job.take_over()
        numbers.append(epoch.number)
        built(epoch, 1)
        epoch.sweep()
        assert os.listdir(epoch.building) == []
    assert numbers == [1, 2, 3]


def test_a_superseded_daemon_changes_nothing(job: SmallJob) -> None:
    old = job.take_over()
    built(old, 1)
    old.replace_file(job.layout.latest, b"old")
    old.open_leasing(1)
    assert os.listdir(job.lease_folder(1)) == []
    step = job.step(3)
    step.mkdir()
    job.take_over().replace_file(job.layout.latest, b"new")
    for change in (
        lambda: old.publish_version(1),
        lambda: old.replace_file(job.layout.latest, b"old again"),
        lambda: old.set_aside(step),
        lambda: old.condemn(step),
        lambda: old.start_build("v000001"),
        lambda: old.open_leasing(2),
    ):
        with pytest.raises(SupersededError, match="epoch 1 is gone"):
            change()
    assert not old.is_live()
    assert job.versions == []
    assert job.layout.latest.read_bytes() == b"new"
    assert step.exists()
    assert not job.lease_folder(2).exists()


def test_a_rename_in_flight_while_another_takes_over_is_refused(
    job: SmallJob, hosts: Hosts
) -> None:
    storage = hosts.ruled()
    old = job.take_over(storage)
    storage.once("rename", lambda *_: job.take_over(), where="LATEST")
    with pytest.raises(SupersededError):
        old.replace_file(job.layout.latest, b"old")
    assert not job.layout.latest.exists()


def test_what_a_superseded_daemon_makes_while_its_room_is_emptied_is_emptied_too(
    job: SmallJob, hosts: Hosts
) -> None:
    late = room_of(job.take_over()) / ".tmp-LATEST-late"
    epoch = job.take_over(hosts.ruled(once("rmdir", lambda _: late.touch(), where="epoch/1")))
    assert rooms(job) == ["2"]
    assert any("LATEST-late" in path.name for path in epoch.condemned())


def test_a_committed_version_is_whole_has_left_the_room_and_is_committed_once(
    job: SmallJob,
) -> None:
    epoch = job.take_over()
    built(epoch, 4)
    assert epoch.publish_version(4) == job.version(4)
    assert (job.version(4) / "file").read_bytes() == b"built"
    assert os.listdir(epoch.building) == []
    built(epoch, 4)
    with pytest.raises(SupersededError, match="v000004 exists"):
        epoch.publish_version(4)


def test_a_version_that_was_never_built_is_an_error_and_not_a_take_over(job: SmallJob) -> None:
    epoch = job.take_over()
    with pytest.raises(FileNotFoundError):
        epoch.publish_version(1)
    with pytest.raises(FileNotFoundError):
        epoch.set_aside(job.step(1))


def test_a_version_begins_empty_whatever_was_left_of_it(job: SmallJob) -> None:
    epoch = job.take_over()
    built(epoch, 1)
    assert os.listdir(epoch.start_build("v000001")) == []


def test_a_rename_that_was_done_counts_though_its_answer_was_lost(
    job: SmallJob, hosts: Hosts
) -> None:
    Epoch.take_over(Job(FastStorage(), job.layout))
    epoch = Epoch(Job(hosts.answer_lost(), job.layout), os.listdir(job.layout.epochs)[0])
    built(epoch, 1)
    assert epoch.publish_version(1).exists()
    epoch.replace_file(job.layout.latest, b"new")
    assert job.layout.latest.read_bytes() == b"new"
    job.step(3).mkdir()
    assert epoch.condemn(epoch.set_aside(job.step(3))).exists()
    assert not job.step(3).exists()


def test_a_take_over_goes_through_though_answers_are_lost(job: SmallJob, hosts: Hosts) -> None:
    built(job.take_over(), 1)
    epoch = job.take_over(hosts.answer_lost())
    assert rooms(job) == ["2"]
    assert sum(path.name.startswith("v000001") for path in epoch.condemned()) == 1


def test_an_error_of_a_live_room_is_raised_as_it_is(job: SmallJob, hosts: Hosts) -> None:
    epoch = job.take_over(hosts.ruled(refuse("rename", errno.EIO)))
    built(epoch, 1)
    with fails(errno.EIO):
        epoch.publish_version(1)
    with fails(errno.EIO):
        epoch.replace_file(job.layout.latest, b"new")


def test_a_job_that_went_away_is_no_take_over_by_another(job: SmallJob) -> None:
    epoch = job.take_over()
    job.layout.state.rename(job.root / "unmounted")
    job.hosts.settle()  # until then a client works on the folder where it is now, by its handle
    with pytest.raises(FileNotFoundError):
        epoch.replace_file(job.layout.latest, b"new")
    with pytest.raises(FileNotFoundError):
        epoch.start_build("v000001")


def test_no_two_rooms_ever_have_the_same_name(job: SmallJob) -> None:
    names = set()
    for _ in range(3):
        names.add(room_of(job.take_over()).name)
        for room in job.layout.epochs.iterdir():
            FastStorage().remove_tree(room)
    assert len(names) == 3
    assert {name.partition("-")[0] for name in names} == {"1"}


@pytest.mark.parametrize("removed", [False, True])
def test_of_two_at_once_the_one_that_finds_a_higher_room_or_none_of_its_own_gives_up(
    job: SmallJob, hosts: Hosts, removed: bool
) -> None:
    def two_others(_: Path) -> None:
        job.take_over()
        job.take_over()

    storage = hosts.ruled(once("mkdir", two_others, where="epoch/1-"))
    if removed:  # by the higher daemon first
        storage.once("rmdir", lambda room: room.rmdir(), where="epoch/1-")
    with pytest.raises(SupersededError, match="another daemon took over epoch"):
        job.take_over(storage)
    assert rooms(job) == ["2"]


def test_of_two_with_one_number_at_most_one_commits(job: SmallJob, hosts: Hosts) -> None:
    others: list[Epoch] = []
    storage = hosts.ruled(once("mkdir", lambda _: others.append(job.take_over()), where="/1-"))
    try:
        mine = job.take_over(storage)
    except SupersededError:
        others[0].replace_file(job.layout.latest, b"other")
        return
    mine.replace_file(job.layout.latest, b"mine")
    with pytest.raises(SupersededError):
        others[0].replace_file(job.layout.latest, b"other")


def test_storage_that_goes_away_in_a_take_over_is_an_error_of_the_system(
    job: SmallJob, hosts: Hosts
) -> None:
    looks: list[Path] = []

    def second_look(method: str, given: tuple[Path, ...]) -> None:
        if method == "names":
            looks.append(given[0])
            if len(looks) == 2:
                job.layout.state.rename(job.root / "unmounted")
                job.hosts.settle()

    with pytest.raises(FileNotFoundError):
        job.take_over(hosts.ruled(second_look))


def test_other_names_beside_the_rooms_are_let_be(job: SmallJob) -> None:
    (job.layout.epochs / ".snapshot").mkdir()
    (job.layout.epochs / "\u0663-00000000").mkdir()
    (job.layout.epochs / "7").mkdir()
    assert job.take_over().number == 1
    assert job.take_over().number == 2
    assert (job.layout.epochs / ".snapshot").exists()


def test_a_name_can_be_set_aside_again(job: SmallJob) -> None:
    epoch = job.take_over()
    for _ in range(2):
        job.step(3).mkdir()
        epoch.set_aside(job.step(3))
    assert len(epoch.undecided()) == 2


def test_leasing_that_is_open_already_keeps_its_leases(job: SmallJob) -> None:
    epoch = job.take_over()
    epoch.open_leasing(1)
    epoch.open_leasing(1)
    job.lease(1, "session")
    epoch.open_leasing(1)
    assert os.listdir(job.lease_folder(1)) == ["explorer.session"]
    assert os.listdir(epoch.building) == []


def test_leasing_can_be_opened_after_an_attempt_that_storage_refused(
    job: SmallJob, hosts: Hosts
) -> None:
    storage = hosts.ruled(refuse("rename", errno.EIO, where="leases-"))
    epoch = job.take_over(storage)
    with fails(errno.EIO):
        epoch.open_leasing(1)
    storage.rules.clear()
    epoch.open_leasing(1)
    assert job.lease_folder(1).exists()
