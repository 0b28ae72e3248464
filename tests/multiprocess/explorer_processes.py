"""Explorers as processes of their own: ``syncd follow``, and one that only stages."""

import argparse
import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from explorer_hooks.reader import Reader
from explorer_hooks.staging import Staging
from syncd.protocol.layout import JobLayout
from tests.multiprocess.processes import ENVIRONMENT, explorer_report
from tests.storages import FastStorage


@contextmanager
def ended(process: subprocess.Popen[Any]) -> Iterator[subprocess.Popen[Any]]:
    """A process that has ended with the block."""
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def serves(job: Path, name: str, sequence: int) -> bool:
    path = JobLayout(job).explorer(name)
    return path.exists() and explorer_report(job, name).sequence == sequence


def following(job: Path, name: str, *options: object) -> subprocess.Popen[bytes]:
    """``syncd follow``, also where syncd is not installed."""
    program = "from explorer_hooks.follow import command; command(prog_name='syncd follow')"
    arguments = [str(job), "--name", name, *map(str, options)]
    return subprocess.Popen([sys.executable, "-c", program, *arguments], env=ENVIRONMENT)


def staging(job: Path, name: str, stage: Path, *options: str) -> subprocess.Popen[str]:
    """An explorer that says what it does to the newest version's copy, as JSON lines."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.multiprocess.explorer_processes",
         str(job), name, str(stage), *options],
        env=ENVIRONMENT, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True,
    )  # fmt: skip


class _Telling(FastStorage):
    """On another filesystem than the job; says when it copies, and may stop in the middle."""

    def __init__(self, *, hangs: bool) -> None:
        super().__init__()
        self._hangs = hangs
        self.copied = 0

    def link(self, source: Path, target: Path) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(source), None, str(target))

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        if not self.copied:
            _say(event="copies")
        self.copied += memoryview(data).nbytes
        if self._hangs and offset:
            time.sleep(600)
        return super().pwrite(fd, data, offset)


def _say(**told: object) -> None:
    print(json.dumps(told), flush=True)


def main() -> None:
    """Stage the newest version, hold it, and let it go when stdin ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("job", type=Path)
    parser.add_argument("name")
    parser.add_argument("stage", type=Path)
    parser.add_argument("--hangs", action="store_true")
    given = parser.parse_args()
    storage = _Telling(hangs=given.hangs)
    place = Staging(given.stage, storage=storage)
    with Reader(given.job, given.name) as reader:
        version = reader.next_version(0, 60)
        _say(event="found")
        copy = place.stage(version)
        _say(event="holds", copied=storage.copied, folder=str(copy.folder))
        version.release()
        sys.stdin.read()
        copy.verify()
        copy.release()
        place.tidy()


if __name__ == "__main__":
    main()
