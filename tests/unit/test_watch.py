from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

from watchdog.observers.api import EventEmitter

from syncd.storage.watch import Watcher

#: A guard: a wait that ends by an event takes a few milliseconds.
LONG = 30.0


def watcher(folder: Path, *names: str) -> Watcher:
    return Watcher({folder: frozenset(names)})


def test_a_wake_ends_the_wait(tmp_path: Path) -> None:
    with watcher(tmp_path, "LATEST") as watching:
        watching.wake()
        assert watching.wait(LONG)
        assert not watching.wait(0)


def test_a_wake_from_another_thread_ends_the_wait(tmp_path: Path) -> None:
    with watcher(tmp_path, "LATEST") as watching:
        thread = threading.Thread(target=watching.wake)
        thread.start()
        assert watching.wait(LONG)
        thread.join()


def test_many_wakes_end_one_wait(tmp_path: Path) -> None:
    with watcher(tmp_path, "LATEST") as watching:
        for _ in range(5):
            watching.wake()
        assert watching.wait(LONG)
        assert not watching.wait(0)


def test_the_deadline_ends_the_wait(tmp_path: Path) -> None:
    with watcher(tmp_path, "LATEST") as watching:
        assert not watching.wait(0.01)
        assert not watching.wait(-1)


def test_a_name_that_is_replaced_by_a_rename_ends_the_wait(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    with watcher(tmp_path / "state", "LATEST") as watching:
        (tmp_path / "draft").write_bytes(b"new")
        (tmp_path / "draft").rename(tmp_path / "state" / "LATEST")
        assert watching.wait(LONG)


def test_a_name_that_is_written_in_place_ends_the_wait(tmp_path: Path) -> None:
    with watcher(tmp_path, "pointer.txt") as watching:
        (tmp_path / "pointer.txt").write_bytes(b"5")
        assert watching.wait(LONG)


def test_a_change_of_another_name_ends_no_wait(tmp_path: Path) -> None:
    with watcher(tmp_path, "LATEST") as watching:
        (tmp_path / "daemon.json").write_bytes(b"{}")
        (tmp_path / "LATEST.tmp").write_bytes(b"{}")
        assert not watching.wait(0.3)


def test_reading_a_name_is_no_change(tmp_path: Path) -> None:
    (tmp_path / "LATEST").write_bytes(b"{}")
    with watcher(tmp_path, "LATEST") as watching:
        (tmp_path / "LATEST").read_bytes()
        assert not watching.wait(0.3)


def test_without_events_it_waits_until_the_deadline(tmp_path: Path) -> None:
    with watcher(tmp_path / "not there", "LATEST") as watching:
        assert not watching.wait(0.01)
        watching.wake()
        assert watching.wait(LONG)


def test_where_one_folder_cannot_be_watched_no_thread_is_left_behind(tmp_path: Path) -> None:
    folders = [tmp_path, *(tmp_path / name for name in "abcdefgh")]
    for folder in folders[1:-1]:
        folder.mkdir()
    before = set(threading.enumerate())
    with Watcher({folder: frozenset({"LATEST"}) for folder in folders}) as watching:
        new = set(threading.enumerate()) - before
        assert not [one for one in new if isinstance(one, EventEmitter)]
        assert not watching.wait(0.01)


def test_closing_twice_and_waking_afterwards_are_fine(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    watching = watcher(tmp_path, "LATEST")
    watching.close()
    watching.close()
    watching.wake()
    del watching  # the eventfd stays for wakes that come late
    assert len(os.listdir("/proc/self/fd")) == before


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
    done = subprocess.run(
        [sys.executable, "-c", _FULL], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "waiting by polling alone" in done.stderr
