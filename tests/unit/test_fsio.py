import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from syncd.storage.fsio import Draft, Storage
from tests.storages import (
    STORAGE,
    FastStorage,
    OneByOne,
    RuledStorage,
    fails,
    once,
    open_files,
    os_error,
    refuse,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file"


def test_a_draft_is_invisible_until_it_is_committed(tmp_path: Path, path: Path) -> None:
    with Draft(STORAGE, path) as draft:
        draft.write(b"one ")
        draft.write(memoryview(b"two"))
        assert not path.exists()
        draft.commit()
    assert path.read_bytes() == b"one two"
    assert draft.size == 7
    assert os.listdir(tmp_path) == ["file"]


def test_a_draft_without_a_commit_leaves_the_old_file_and_no_garbage(
    tmp_path: Path, path: Path
) -> None:
    path.write_bytes(b"old")
    with Draft(STORAGE, path) as draft:
        draft.write(b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("method", ["create", "write", "fsync", "close", "rename"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_refused_step_leaves_the_old_file_and_no_garbage(
    tmp_path: Path, path: Path, method: str, code: int
) -> None:
    path.write_bytes(b"old")
    with fails(code):
        RuledStorage(refuse(method, code)).replace(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_file_is_durable_before_its_rename_and_its_name_after(tmp_path: Path) -> None:
    storage = RuledStorage()
    storage.replace(tmp_path / "file", b"new")
    methods = [method for method, _ in storage.calls]
    assert methods == ["create", "write", "fsync", "close", "rename", "sync_folder"]


def test_a_draft_is_made_in_the_room_that_it_is_given(tmp_path: Path) -> None:
    (tmp_path / "room").mkdir()
    storage = RuledStorage()
    storage.replace(tmp_path / "file", b"new", room=tmp_path / "room")
    assert storage.count("create", tmp_path / "room") == 1
    assert not os.listdir(tmp_path / "room")


def test_short_writes_go_on_where_they_ended(path: Path) -> None:
    storage = OneByOne()
    storage.write_new(path, b"all of it")
    assert path.read_bytes() == b"all of it"
    with path.open("r+b") as file:
        storage.pwrite_all(file.fileno(), b"OF IT!", 4)
    assert path.read_bytes() == b"all OF IT!"


class _Stuck(FastStorage):
    def write(self, fd: int, data: bytes | memoryview) -> int:  # noqa: ARG002
        return 0

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> int:  # noqa: ARG002
        return 0


def test_a_write_of_nothing_is_an_error_and_no_endless_loop(path: Path) -> None:
    path.write_bytes(b"old")
    with STORAGE.closing(STORAGE.open_append(path, 0)) as fd:
        for write in (_Stuck().write_all, partial(_Stuck().pwrite_all, offset=1)):
            with pytest.raises(OSError, match="wrote nothing"):
                write(fd, b"new")


def test_a_new_file_replaces_nothing(path: Path) -> None:
    path.write_bytes(b"old")
    with pytest.raises(FileExistsError):
        STORAGE.write_new(path, b"new")


def test_missing_folders_are_made_and_those_there_are_kept(tmp_path: Path) -> None:
    STORAGE.make_folder(tmp_path / "a" / "b" / "c", below=tmp_path)
    (tmp_path / "a" / "b" / "file").touch()
    STORAGE.make_folder(tmp_path / "a" / "b", below=tmp_path)
    assert (tmp_path / "a" / "b" / "file").exists()


def test_a_folder_under_a_dangling_link_is_an_error_and_no_endless_recursion(
    tmp_path: Path,
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "unmounted")
    with pytest.raises(FileNotFoundError):
        STORAGE.make_folder(tmp_path / "link" / "a" / "b", below=tmp_path)


def test_a_tree_is_removed_without_following_a_link(tmp_path: Path) -> None:
    outside, tree = tmp_path / "outside", tmp_path / "tree"
    (outside / "deep").mkdir(parents=True)
    (outside / "file").touch()
    (tree / "in").mkdir(parents=True)
    (tree / "in" / "file").touch()
    (tree / "to-folder").symlink_to(outside)
    (tree / "to-file").symlink_to(outside / "file")
    (tree / "dangling").symlink_to("nowhere")
    STORAGE.remove_tree(tree)
    STORAGE.remove_tree(tree)  # which is not there any more
    assert not tree.exists()
    assert sorted(os.listdir(outside)) == ["deep", "file"]
    STORAGE.remove_tree(outside / "file")
    assert os.listdir(outside) == ["deep"]


def test_a_file_that_comes_while_its_tree_is_removed_is_left_for_the_next_sweep(
    tmp_path: Path,
) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    storage = RuledStorage(once("rmdir", lambda path: (path / ".nfs0001").touch()))
    storage.remove_tree(tree)
    assert os.listdir(tree) == [".nfs0001"]
    storage.remove_tree(tree)
    assert not tree.exists()


def test_a_link_is_never_read(tmp_path: Path, path: Path) -> None:
    path.write_bytes(b"secret")
    (tmp_path / "link").symlink_to(path)
    with fails(errno.ELOOP):
        STORAGE.read(tmp_path / "link")


def test_a_pipe_a_folder_and_a_device_are_refused_at_once_and_leave_no_descriptor_open(
    tmp_path: Path,
) -> None:
    os.mkfifo(tmp_path / "pipe")
    before = open_files()
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(OSError, match="not a regular file"):
            STORAGE.read(path)
    assert open_files() == before


@pytest.mark.parametrize("how", ["open_read", "open_append"])
def test_a_file_that_is_replaced_while_it_is_opened_leaves_no_descriptor_open(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """As NFS says it: the first look at what was opened finds that the server has forgotten it."""
    path.touch()
    before = os.listdir("/proc/self/fd")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", lambda _: os.stat(tmp_path / "gone"))
        for _ in range(10):
            with pytest.raises(FileNotFoundError):
                getattr(STORAGE, how)(path)
    assert open_files() == len(before)


def test_reading_ends_at_the_limit(path: Path) -> None:
    path.write_bytes(b"12345")
    assert STORAGE.read(path, 5) == b"12345"
    with pytest.raises(OSError, match="longer than 4 bytes"):
        STORAGE.read(path, 4)


@pytest.mark.parametrize("method", ["open_read", "fstat", "read_part"])
def test_a_file_that_the_server_forgets_while_it_is_read_is_opened_anew(
    path: Path, method: str
) -> None:
    path.write_bytes(b"old")

    def replaced(*_: object) -> None:
        STORAGE.replace(path, b"new")
        raise os_error(errno.ESTALE)

    storage = RuledStorage(once(method, replaced))
    before = open_files()
    assert storage.read(path) == b"new"
    assert open_files() == before
    with fails(errno.ESTALE):
        RuledStorage(refuse(method, errno.ESTALE)).read(path)


def test_a_signature_changes_with_a_replacement_of_the_same_bytes(path: Path) -> None:
    STORAGE.replace(path, b"same")
    _, before = STORAGE.read_with_signature(path)
    assert STORAGE.read_with_signature(path) == (b"same", before)
    STORAGE.replace(path, b"same")
    assert STORAGE.read_with_signature(path)[1] != before


def test_a_missing_folder_has_no_names_and_a_forbidden_one_is_an_error(
    tmp_path: Path, path: Path
) -> None:
    assert STORAGE.names(tmp_path / "missing") == []
    assert STORAGE.status(tmp_path / "missing" / "file") is None
    path.touch()
    assert STORAGE.names(path) == []
    assert not STORAGE.exists(tmp_path / "file" / "below")


@pytest.mark.parametrize("code", ["EXDEV", "EPERM", "EOPNOTSUPP", "ENOSYS", "EMLINK"])
def test_a_link_that_storage_cannot_make_is_no_error_and_one_that_failed_is(
    tmp_path: Path, code: str
) -> None:
    (tmp_path / "a").write_bytes(b"1")
    storage = RuledStorage(refuse("link", getattr(errno, code), where="refused"))
    assert not storage.link_if_possible(tmp_path / "a", tmp_path / "refused")
    assert storage.link_if_possible(tmp_path / "a", tmp_path / "c")
    assert (tmp_path / "c").samefile(tmp_path / "a")
    with pytest.raises(FileExistsError):
        storage.link_if_possible(tmp_path / "a", tmp_path / "c")


# -- copying ---------------------------------------------------------------------------------------

WAYS = ["copy_file_range", "sendfile", "pwrite"]
REFUSED = ["EXDEV", "EINVAL", "ENOSYS", "EOPNOTSUPP", "EPERM", "ETXTBSY"]
CONTENT = bytes(range(256)) * 64


def refusing(count: int, code: int) -> RuledStorage:
    """A storage that refuses the first ways of copying."""
    return RuledStorage(*(refuse(way, code) for way in WAYS[:count]))


def copied(storage: Storage, tmp_path: Path, *, at: int, to: int, count: int) -> bytes:
    """What lands in a new file."""
    (tmp_path / "source").write_bytes(CONTENT)
    with (tmp_path / "source").open("rb") as source, (tmp_path / "target").open("wb") as target:
        done = 0
        while done < count:
            moved = storage.copy_range(
                source.fileno(), target.fileno(), count - done, at + done, to + done
            )
            assert moved > 0
            done += moved
    return (tmp_path / "target").read_bytes()


each_refused = pytest.mark.parametrize("refused", range(3))


@each_refused
@pytest.mark.parametrize("name", REFUSED)
def test_each_refused_way_falls_back_to_the_next_with_the_same_bytes(
    tmp_path: Path, refused: int, name: str
) -> None:
    storage = refusing(refused, getattr(errno, name))
    assert copied(storage, tmp_path, at=100, to=7, count=5000) == b"\0" * 7 + CONTENT[100:5100]
    assert [method for method, _ in storage.calls if method in WAYS] == WAYS[: refused + 1]


@pytest.mark.parametrize("name", ["ENOSPC", "EIO", "EDQUOT", "EBADF", "ESTALE"])
@each_refused
def test_any_other_error_of_a_copy_is_raised(tmp_path: Path, name: str, refused: int) -> None:
    storage = refusing(refused, errno.EXDEV)
    storage.refuse(WAYS[refused], getattr(errno, name))
    with fails(getattr(errno, name)):
        copied(storage, tmp_path, at=0, to=0, count=10)


@each_refused
def test_a_copy_at_the_end_of_the_source_is_0_bytes(tmp_path: Path, refused: int) -> None:
    (tmp_path / "source").write_bytes(b"123")
    storage = refusing(refused, errno.EXDEV)
    with (tmp_path / "source").open("rb") as source, (tmp_path / "target").open("wb") as target:
        assert storage.copy_range(source.fileno(), target.fileno(), 9, 3, 0) == 0


def linked_job(tmp_path: Path) -> tuple[Path, Path]:
    """A job with a link to a folder of someone else's, which has a file."""
    root, outside = tmp_path / "job", tmp_path / "outside"
    root.mkdir()
    (outside / "in").mkdir(parents=True)
    (outside / "file").write_bytes(b"theirs")
    (root / "link").symlink_to(outside)
    return root, outside


@pytest.mark.parametrize(
    "change",
    [
        lambda s, p: s.mkdir(p / "new"),
        lambda s, p: s.rmdir(p / "in"),
        lambda s, p: s.unlink(p / "file"),
        lambda s, p: s.create(p / "new"),
        lambda s, p: s.open_append(p / "file"),
        lambda s, p: s.rename(p / "file", p.parent / "taken"),
        lambda s, p: s.rename(p.parent / "mine", p / "file"),
        lambda s, p: s.link(p / "file", p.parent / "taken"),
        lambda s, p: s.open_read(p / "file"),
        lambda s, p: s.names(p),
        lambda s, p: s.sync_folder(p),
    ],
)
def test_below_the_root_no_call_goes_through_a_link(
    tmp_path: Path, change: Callable[[Storage, Path], object]
) -> None:
    root, outside = linked_job(tmp_path)
    (root / "mine").touch()
    with pytest.raises(OSError, match="links are not followed") as caught:
        change(Storage(root), root / "link")
    assert caught.value.errno == errno.ELOOP
    assert sorted(os.listdir(outside)) == ["file", "in"]
    assert (outside / "file").read_bytes() == b"theirs"
    assert sorted(os.listdir(root)) == ["link", "mine"]


@pytest.mark.parametrize("storage", [FastStorage(), Storage()])
def test_removing_a_link_leaves_what_it_led_to(tmp_path: Path, storage: Storage) -> None:
    root, outside = linked_job(tmp_path)
    storage.remove_tree(root / "link")
    assert os.listdir(root) == []
    assert sorted(os.listdir(outside)) == ["file", "in"]


def test_the_root_itself_may_be_reached_by_a_link_or_a_relative_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, _ = linked_job(tmp_path)
    (tmp_path / "alias").symlink_to(root)
    monkeypatch.chdir(tmp_path)
    for alias in (tmp_path / "alias", Path("alias"), Path("job")):
        storage = Storage(alias)
        assert storage.names(alias) == ["link"]
        storage.replace(alias / "file", b"one")
        assert storage.read(root / "file") == b"one"
        storage.unlink(alias / "file")
        with pytest.raises(OSError, match="links are not followed"):
            storage.names(alias / "link")


def test_an_error_names_the_whole_path(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    folder, path = tmp_path / "a", tmp_path / "a" / "b"
    folder.mkdir()
    with pytest.raises(FileNotFoundError) as caught:
        storage.open_read(path)
    assert caught.value.filename == str(path)
    with pytest.raises(FileNotFoundError) as caught:
        storage.rename(path, tmp_path / "b")
    assert caught.value.filename == str(path)
    assert caught.value.filename2 == str(tmp_path / "b")


def test_a_draft_that_was_collected_is_written_again(tmp_path: Path) -> None:
    def collect(source: Path, _: Path) -> None:
        source.unlink()

    storage = RuledStorage(once("rename", collect))
    storage.replace(tmp_path / "file", b"one")
    assert os.listdir(tmp_path) == ["file"]
    with pytest.raises(FileNotFoundError):
        storage.replace(tmp_path / "no folder" / "file", b"one")
