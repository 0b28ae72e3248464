"""Stale caches of network filesystem clients: the measurements in docs/protocol.md.

Repeat with ``python -m benchmarks.nfs MOUNT MOUNT`` (some seconds). MOUNT and MOUNT are one share,
mounted by two clients (two hosts, or two network namespaces). Each line is a question, and how
often each answer occurred. A folder on a local disk, given twice, gives the right answers.
"""

import argparse
import errno
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from benchmarks.machine import Report, existing_folder
from syncd.storage.fsio import Storage

#: Asks something about a folder. The arguments are its paths at the first and second client.
Question = Callable[[Path, Path], object]


def _remembered(look: Callable[[Path], object], *, refresh: bool) -> Question:
    """Ask the first client about a name that it has looked for before the second client made it."""

    def ask(first: Path, second: Path) -> object:
        for _ in range(2):
            (first / "name").exists()
        (second / "name").mkdir()
        (second / "name" / "lease").touch()
        if refresh:
            Storage(durable=False).refresh(first)
        return look(first / "name")

    return ask


def _rmdir(path: Path) -> str:
    try:
        path.rmdir()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "removed"


def _replaced(first: Path, second: Path) -> None:
    """Replace, at the second client, a file that the first client has read."""
    (second / "file").write_text("old")
    for _ in range(2):
        (first / "file").read_text()
    (second / "draft").write_text("new")
    (second / "draft").rename(second / "file")


def _looks_until_new(first: Path, second: Path) -> str:
    _replaced(first, second)
    looks = 0
    while (first / "file").read_text() == "old":
        looks += 1
        time.sleep(0.01)  # a usual polling interval
    return f"{looks} old"


def _read_after_refresh(first: Path, second: Path) -> str:
    _replaced(first, second)
    Storage(durable=False).refresh(first)
    return (first / "file").read_text()


def _rename_out(*, moved: bool) -> Question:
    """Ask if the first client can rename out of a folder that the second moved or emptied."""

    def ask(first: Path, second: Path) -> str:
        building = second / "room" / "building"
        (building / "version").mkdir(parents=True)
        (second / "doomed").mkdir()
        os.listdir(first / "room" / "building")
        (first / "room" / "building" / "version").exists()
        if moved:
            building.rename(second / "doomed" / "building")
        else:
            (building / "version").rename(second / "doomed" / "version")
            building.rmdir()
        try:
            (first / "room" / "building" / "version").rename(first / "published")
        except OSError as error:
            return errno.errorcode[error.errno or 0]
        return "renamed"

    return ask


QUESTIONS: dict[str, Question] = {
    "a name that was missed is found": _remembered(Path.exists, refresh=False),
    "the same, after a refresh": _remembered(Path.exists, refresh=True),
    "rmdir of a full folder that was missed": _remembered(_rmdir, refresh=False),
    "the same, after a refresh (of a full folder)": _remembered(_rmdir, refresh=True),
    "reads, 10 ms apart, of a replaced file": _looks_until_new,
    "a replaced file, after a refresh": _read_after_refresh,
    "rename out of a folder that was moved": _rename_out(moved=True),
    "rename out of a folder that was emptied": _rename_out(moved=False),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="the caches of network filesystem clients")
    parser.add_argument("first", type=existing_folder, help="the share, as one client mounts it")
    parser.add_argument(
        "second", type=existing_folder, help="the share, as another client mounts it"
    )
    parser.add_argument("--tries", type=int, default=15)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="syncd-nfs-", dir=given.second) as made:
        report = Report(given.first)
        table = report.table(
            f"{given.tries} tries", ("question", "answers"), [(what,) for what in QUESTIONS]
        )
        base = Path(made).name
        for number, (what, ask) in enumerate(QUESTIONS.items()):
            answers: Counter[object] = Counter()
            for attempt in range(given.tries):
                name = f"{number}-{attempt}"
                (given.second / base / name).mkdir()
                first = given.first / base / name
                os.listdir(first)
                answers[ask(first, given.second / base / name)] += 1
            told = ", ".join(f"{answer}: {count}" for answer, count in answers.most_common())
            table.row(what, told)


if __name__ == "__main__":
    main()
