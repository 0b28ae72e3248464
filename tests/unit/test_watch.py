from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver

from syncd.storage import watch
from syncd.storage.watch import Watcher
from tests.programs import completed
from tests.storages import open_files

if TYPE_CHECKING:
    import pytest
    from watchdog.events import FileSystemEventHandler
    from watchdog.observers.api import ObservedWatch

#: A guard: a wait that ends by an event takes a few milliseconds.
LONG = 60.0


def watcher(folder: Path, name: str = "LATEST") -> Watcher:
    return Watcher({folder: frozenset({name})})


def test_a_wake_from_another_thread_ends_the_wait(tmp_path: Path) -> None:
    with watcher(tmp_path) as watching:
        thread = threading.Thread(target=watching.wake)
        thread.start()
        assert watching.wait(LONG)
        thread.join()


def test_many_wakes_end_one_wait(tmp_path: Path) -> None:
    with watcher(tmp_path) as watching:
        for _ in range(5):
            watching.wake()
        assert watching.wait(LONG)
        assert not watching.wait(0)


def test_the_deadline_ends_the_wait(tmp_path: Path) -> None:
    with watcher(tmp_path) as watching:
        assert not watching.wait(0.01)
        assert not watching.wait(-1)


def test_a_name_that_is_replaced_by_a_rename_ends_the_wait(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    with watcher(tmp_path / "state") as watching:
        (tmp_path / "draft").write_bytes(b"new")
        (tmp_path / "draft").rename(tmp_path / "state" / "LATEST")
        assert watching.wait(LONG)


def test_a_name_that_is_written_in_place_ends_the_wait(tmp_path: Path) -> None:
    with watcher(tmp_path, "pointer.txt") as watching:
        (tmp_path / "pointer.txt").write_bytes(b"5")
        assert watching.wait(LONG)


def test_a_change_of_another_name_ends_no_wait(tmp_path: Path) -> None:
    with watcher(tmp_path) as watching:
        (tmp_path / "daemon.json").write_bytes(b"{}")
        (tmp_path / "LATEST.tmp").write_bytes(b"{}")
        assert not watching.wait(0.3)


def test_reading_a_name_is_no_change(tmp_path: Path) -> None:
    (tmp_path / "LATEST").write_bytes(b"{}")
    with watcher(tmp_path) as watching:
        (tmp_path / "LATEST").read_bytes()
        assert not watching.wait(0.3)


def test_a_folder_behind_a_link_is_watched(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "link").symlink_to("job")
    with watcher(tmp_path / "link") as watching:
        (tmp_path / "job" / "LATEST").touch()
        assert watching.wait(LONG)


def test_without_events_it_waits_until_the_deadline(tmp_path: Path) -> None:
    with watcher(tmp_path / "not there") as watching:
        assert not watching.wait(0.01)
        watching.wake()
        assert watching.wait(LONG)


def test_where_one_folder_cannot_be_watched_no_thread_is_left_behind(tmp_path: Path) -> None:
    folders = [tmp_path, *(tmp_path / name for name in "abcdefgh")]
    for folder in folders[1:-1]:
        folder.mkdir()
    before = set(threading.enumerate())
    with Watcher({folder: frozenset({"LATEST"}) for folder in folders}) as watching:
        assert set(threading.enumerate()) == before
        assert not watching.wait(0.01)


def inotify_instances() -> int:
    found = 0
    for fd in Path("/proc/self/fd").iterdir():
        try:
            found += fd.readlink().name == "anon_inode:inotify"
        except FileNotFoundError:
            pass  # of the listing itself
    return found


def test_however_much_is_watched_it_is_one_instance_and_a_thread_for_each_folder(
    tmp_path: Path,
) -> None:
    before = set(threading.enumerate())
    folders = [tmp_path / f"job-{number}" for number in range(200)]
    with ExitStack() as stack:
        watching = []
        for folder in folders:
            folder.mkdir()
            watching += [stack.enter_context(watcher(folder)) for _ in range(2)]
        assert inotify_instances() == 1
        assert len(set(threading.enumerate()) - before) == len(folders) + 2
        (folders[7] / "LATEST").touch()
        assert watching[14].wait(LONG)
        assert watching[15].wait(LONG)
        assert not any(one.wait(0) for one in (*watching[:14], *watching[16:]))
    assert inotify_instances() == 0
    assert set(threading.enumerate()) == before


def test_a_watch_that_ends_just_after_something_was_moved_away_ends_without_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # The library holds what was moved away back, in case that it comes back by another name.
    folders = [tmp_path / name for name in "abc"]
    with ExitStack() as stack:
        for folder in folders:
            folder.mkdir()
            (folder / "LATEST").touch()
            stack.enter_context(watcher(folder))
        last = stack.enter_context(watcher(tmp_path, "moved"))
        for folder in folders:
            (folder / "LATEST").rename(tmp_path / f"of {folder.name}")
        (tmp_path / "moved").touch()
        assert last.wait(LONG)
    assert not caplog.records


def test_where_nothing_is_watched_there_is_no_instance() -> None:
    with Watcher({}) as watching:
        assert inotify_instances() == 0
        watching.wake()
        assert watching.wait(LONG)


def test_of_two_that_watch_a_folder_one_goes_on_when_the_other_ends(tmp_path: Path) -> None:
    with watcher(tmp_path) as first:
        with watcher(tmp_path):
            pass
        (tmp_path / "LATEST").touch()
        assert first.wait(LONG)


def test_a_folder_that_was_replaced_is_watched_anew(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    with watcher(folder):
        folder.rename(tmp_path / "old")
        folder.mkdir()
    with watcher(folder) as watching:
        (folder / "LATEST").touch()
        assert watching.wait(LONG)


def test_a_folder_that_was_deleted_is_watched_anew(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    with watcher(tmp_path, "other"):
        with watcher(folder):
            folder.rmdir()
            folder.mkdir()
        with watcher(folder) as watching:
            (folder / "LATEST").touch()
            assert watching.wait(LONG)


@contextmanager
def stuck(
    sick: list[Watcher], folder: Path, asked: threading.Event, answers: threading.Event
) -> Iterator[None]:
    """A thread that makes a watcher hangs in this context."""
    thread = threading.Thread(target=lambda: sick.append(watcher(folder)))
    thread.start()
    try:
        assert asked.wait(LONG)
        yield
    finally:
        answers.set()
        thread.join(LONG)


def test_a_folder_that_is_looked_up_for_ever_holds_up_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, asked = threading.Event(), threading.Event()
    scandir = os.scandir

    def hangs(folder: Path) -> object:
        if folder.name == "sick":
            asked.set()
            assert answers.wait(LONG)
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", hangs)
    (tmp_path / "sick").mkdir()
    sick: list[Watcher] = []
    with stuck(sick, tmp_path / "sick", asked, answers), watcher(tmp_path) as watching:
        (tmp_path / "LATEST").touch()
        assert watching.wait(LONG)
    (tmp_path / "sick" / "LATEST").touch()
    assert sick[0].wait(LONG)
    sick[0].close()


def test_where_storage_hangs_in_the_library_the_others_wait_by_polling_and_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers, asked = threading.Event(), threading.Event()
    schedule = BaseObserver.schedule

    def hangs(
        observer: BaseObserver, handler: FileSystemEventHandler, path: str, **given: Any
    ) -> ObservedWatch:
        if path.endswith("sick"):
            asked.set()
            assert answers.wait(LONG)
        return schedule(observer, handler, path, **given)

    monkeypatch.setattr(Observer, "schedule", hangs)
    monkeypatch.setattr(watch, "_PATIENCE", 0.05)
    for name in ("sick", "a", "b"):
        (tmp_path / name).mkdir()
    before = watcher(tmp_path / "a")
    sick: list[Watcher] = []
    with stuck(sick, tmp_path / "sick", asked, answers):
        with watcher(tmp_path / "b") as watching:
            assert "waits by polling" in caplog.text
            assert not watching.wait(0.01)
            watching.wake()
            assert watching.wait(LONG)
        before.close()
    monkeypatch.undo()
    before.close()
    (tmp_path / "sick" / "LATEST").touch()
    assert sick[0].wait(LONG)
    sick[0].close()
    assert inotify_instances() == 0
    with watcher(tmp_path / "b") as watching:
        (tmp_path / "b" / "LATEST").touch()
        assert watching.wait(LONG)


def test_a_fork_watches_by_itself_and_ends_nothing_of_its_parent_s(tmp_path: Path) -> None:
    with watcher(tmp_path) as ours:
        child = os.fork()
        if not child:
            heard = False
            try:
                ours.close()
                with watcher(tmp_path) as its:
                    (tmp_path / "LATEST").touch()
                    heard = its.wait(LONG)
            finally:
                os._exit(0 if heard else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert ours.wait(LONG)
        (tmp_path / "LATEST").write_bytes(b"7")
        assert ours.wait(LONG)


def test_closing_twice_and_waking_afterwards_are_fine(tmp_path: Path) -> None:
    before = open_files()
    watching = watcher(tmp_path)
    watching.close()
    watching.close()
    watching.wake()
    del watching  # the eventfd stays for wakes that come late
    assert open_files() == before


_FULL = """
import os, resource
from pathlib import Path
from syncd.storage.watch import Watcher

free = os.dup(0)
os.close(free)
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, hard))
with Watcher({Path("."): frozenset({"LATEST"})}) as watching:
    assert not watching.wait(0)
    watching.wake()
    assert watching.wait(0)
"""


def test_a_host_out_of_inotify_instances_waits_by_polling_alone() -> None:
    done = completed([sys.executable, "-c", _FULL], timeout=60)
    assert done.returncode == 0, done.stderr
    assert "waits by polling" in done.stderr
