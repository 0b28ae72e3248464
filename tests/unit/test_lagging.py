"""The double itself: it is late, no later than it says, and never about its own changes."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from syncd.storage.calls import FileKind
from tests.lagging import LAG, AnswerLostLagging, LagClock, LaggingStorage, RuledLagging
from tests.storages import FastStorage, fails, refuse

SERVER = FastStorage()


@pytest.fixture
def clock() -> LagClock:
    return LagClock()


@pytest.fixture
def client(tmp_path: Path, clock: LagClock) -> LaggingStorage:
    return LaggingStorage(tmp_path, clock)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "folder"
    made.mkdir()
    return made


def replace(path: Path, content: bytes) -> None:
    """What another client does: the name is of another file from now on."""
    SERVER.replace(path, content)


def test_a_listing_is_as_it_was_fetched_for_the_lag_and_not_longer(
    client: LaggingStorage, folder: Path, clock: LagClock
) -> None:
    assert client.names(folder) == []
    (folder / "file").touch()
    clock.advance(LAG - 1)
    assert client.names(folder) == []
    assert client.kinds(folder) == {}
    clock.advance(1)
    assert client.names(folder) == ["file"]
    assert client.kinds(folder) == {"file": FileKind.FILE}


def test_a_status_and_a_name_that_was_not_there_are_remembered_for_the_lag(
    client: LaggingStorage, folder: Path, clock: LagClock
) -> None:
    (folder / "there").write_bytes(b"1")
    assert client.status(folder / "there").st_size == 1  # type: ignore[union-attr]
    assert not client.exists(folder / "new")
    (folder / "there").write_bytes(b"longer")
    (folder / "new").touch()
    clock.advance(LAG - 1)
    assert client.status(folder / "there").st_size == 1  # type: ignore[union-attr]
    assert not client.exists(folder / "new")
    with pytest.raises(FileNotFoundError):
        client.open_read(folder / "new")
    clock.advance(1)
    assert client.status(folder / "there").st_size == 6  # type: ignore[union-attr]
    assert client.exists(folder / "new")


def test_a_name_that_another_removed_is_there_for_the_lag(
    client: LaggingStorage, folder: Path, clock: LagClock
) -> None:
    (folder / "file").touch()
    assert client.exists(folder / "file")
    (folder / "file").unlink()
    assert client.exists(folder / "file")
    clock.advance(LAG)
    assert not client.exists(folder / "file")


def test_an_open_by_name_is_late_by_one_look(client: LaggingStorage, folder: Path) -> None:
    path = folder / "file"
    replace(path, b"one")
    assert client.read(path) == b"one"
    replace(path, b"two")
    assert [client.read(path) for _ in range(3)] == [b"one", b"two", b"two"]
    path.unlink()
    assert client.read(path) == b"two"
    with pytest.raises(FileNotFoundError):
        client.read(path)


def test_an_open_sees_what_was_written_in_place(client: LaggingStorage, folder: Path) -> None:
    (folder / "file").write_bytes(b"one")
    assert client.read(folder / "file") == b"one"
    (folder / "file").write_bytes(b"other")
    assert client.read(folder / "file") == b"other"


def test_an_open_is_not_late_after_the_lag(
    client: LaggingStorage, folder: Path, clock: LagClock
) -> None:
    replace(folder / "file", b"one")
    client.read(folder / "file")
    replace(folder / "file", b"two")
    clock.advance(LAG)
    assert client.read(folder / "file") == b"two"


CHANGES: dict[str, Callable[[LaggingStorage, Path], Any]] = {
    "mkdir": lambda client, folder: client.mkdir(folder / "mine"),
    "create": lambda client, folder: client.close(client.create(folder / "mine")),
    "append": lambda client, folder: client.close(client.open_append(folder / "mine")),
    "rename in": lambda client, folder: client.rename(folder.parent / "beside", folder / "mine"),
    "rename out": lambda client, folder: client.rename(folder / "old", folder.parent / "mine"),
    "link": lambda client, folder: client.link(folder / "old", folder / "mine"),
    "unlink": lambda client, folder: client.unlink(folder / "old"),
    "rmdir": lambda client, folder: client.rmdir(folder / "empty"),
    "refresh": lambda client, folder: client.refresh(folder),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_its_own_lets_it_forget_the_listing_and_what_was_not_there(
    client: LaggingStorage, folder: Path, change: str
) -> None:
    (folder.parent / "beside").touch()
    (folder / "old").touch()
    (folder / "empty").mkdir()
    client.names(folder)
    assert not client.exists(folder / "mine")
    assert not client.exists(folder / "another's")
    (folder / "another's").touch()
    assert not client.exists(folder / "another's")
    CHANGES[change](client, folder)
    assert client.names(folder) == sorted(os.listdir(folder))
    for name in ("mine", "another's", "old", "empty"):
        assert client.exists(folder / name) == (folder / name).exists()


def test_what_it_wrote_itself_has_the_size_that_it_wrote(
    client: LaggingStorage, folder: Path
) -> None:
    fd = client.create(folder / "file")
    assert client.status(folder / "file").st_size == 0  # type: ignore[union-attr]
    client.write_all(fd, b"content")
    client.close(fd)
    assert client.status(folder / "file").st_size == 7  # type: ignore[union-attr]


def test_a_name_that_is_taken_on_the_server_is_taken(client: LaggingStorage, folder: Path) -> None:
    for name in ("file", "folder"):
        assert not client.exists(folder / name)
    (folder / "file").touch()
    (folder / "folder").mkdir()
    (folder / "other").touch()
    with pytest.raises(FileExistsError):
        client.create(folder / "file")
    with pytest.raises(FileExistsError):
        client.mkdir(folder / "folder")
    assert client.exists(folder / "file")
    with pytest.raises(FileExistsError):
        client.link(folder / "other", folder / "file")


def test_rmdir_of_what_is_full_on_the_server_is_refused_whatever_the_listing_says(
    client: LaggingStorage, folder: Path
) -> None:
    assert client.names(folder) == []
    (folder / "file").touch()
    with fails(errno.ENOTEMPTY):
        client.rmdir(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda client, path: client.rmdir(path),
        lambda client, path: client.unlink(path),
        lambda client, path: client.rename(path, path.with_name("elsewhere")),
        lambda client, path: client.link(path, path.with_name("elsewhere")),
    ],
)
def test_what_it_remembers_as_not_there_it_does_not_ask_for(
    client: LaggingStorage, folder: Path, change: Callable[[LaggingStorage, Path], None]
) -> None:
    assert not client.exists(folder / "name")
    (folder / "name").mkdir()
    with pytest.raises(FileNotFoundError):
        change(client, folder / "name")
    assert (folder / "name").exists()


def test_a_rename_works_on_the_folder_wherever_it_was_moved_and_not_once_it_is_removed(
    client: LaggingStorage, folder: Path, clock: LagClock
) -> None:
    (folder / "room").mkdir()
    (folder / "file").touch()
    assert client.names(folder / "room") == []
    (folder / "room").rename(folder / "moved")
    client.rename(folder / "file", folder / "room" / "file")
    assert os.listdir(folder / "moved") == ["file"]
    client.rename(folder / "room" / "file", folder / "file")
    (folder / "moved").rmdir()
    with pytest.raises(FileNotFoundError):
        client.rename(folder / "file", folder / "room" / "file")
    assert not client.exists(folder / "room")
    clock.advance(LAG)
    assert (folder / "file").exists()


def test_a_handle_is_looked_up_again_after_the_lag(
    client: LaggingStorage, folder: Path, clock: LagClock
) -> None:
    (folder / "room").mkdir()
    client.names(folder / "room")
    (folder / "room").rename(folder / "moved")
    (folder / "room").mkdir()
    client.mkdir(folder / "room" / "early")
    clock.advance(LAG)
    client.mkdir(folder / "room" / "late")
    assert (os.listdir(folder / "moved"), os.listdir(folder / "room")) == (["early"], ["late"])


def test_what_is_remembered_of_a_folder_moves_with_it(client: LaggingStorage, folder: Path) -> None:
    (folder / "room").mkdir()
    client.names(folder / "room")
    (folder / "room" / "file").touch()
    client.rename(folder / "room", folder / "moved")
    assert client.names(folder / "moved") == []
    client.refresh(folder / "moved")
    assert client.names(folder / "moved") == ["file"]


def test_each_client_believes_for_itself(
    client: LaggingStorage, folder: Path, tmp_path: Path, clock: LagClock
) -> None:
    other = LaggingStorage(tmp_path, clock)
    assert client.names(folder) == []
    other.mkdir(folder / "new")
    assert (client.names(folder), other.names(folder)) == ([], ["new"])
    client.forget()
    assert client.names(folder) == ["new"]


def seen(tmp_path: Path, seed: int) -> list[object]:
    """What a client sees of a file that another replaces and removes all the time."""
    clock = LagClock()
    client = LaggingStorage(tmp_path, clock, seed=seed)
    found: list[object] = []
    for number in range(60):
        if number % 3 == 2:
            (tmp_path / "file").unlink()
        else:
            replace(tmp_path / "file", b"%d" % number)
        try:  # as Storage.read does once: it begins anew what a server has forgotten
            fd = client.open_read(tmp_path / "file")
            try:
                found.append(client.read_part(fd, 100))
            finally:
                client.release(fd)
        except OSError as error:
            found.append(error.errno)
        found.append(client.exists(tmp_path / "file"))
        clock.advance(4)
    return found


def test_with_a_seed_it_chooses_and_always_the_same(tmp_path: Path) -> None:
    assert seen(tmp_path, 1) == seen(tmp_path, 1)
    assert seen(tmp_path, 1) != seen(tmp_path, 2)
    assert {errno.ENOENT, errno.ESTALE} <= set(seen(tmp_path, 1))


def test_rules_are_asked_before_the_client_is(
    tmp_path: Path, folder: Path, clock: LagClock
) -> None:
    storage = RuledLagging(tmp_path, clock, refuse("mkdir", errno.EIO))
    assert storage.names(folder) == []
    (folder / "file").touch()
    assert storage.names(folder) == []
    with fails(errno.EIO):
        storage.mkdir(folder / "new")
    assert storage.count("names", folder) == 2


def test_a_lost_answer_leaves_the_client_believing_that_nothing_was_done(
    tmp_path: Path, clock: LagClock
) -> None:
    storage = AnswerLostLagging(tmp_path, clock)
    (tmp_path / "old").touch()
    with pytest.raises(FileNotFoundError):
        storage.rename(tmp_path / "old", tmp_path / "new")
    assert (tmp_path / "new").exists()
    assert not storage.exists(tmp_path / "new")
    storage.refresh(tmp_path)
    assert storage.exists(tmp_path / "new")
