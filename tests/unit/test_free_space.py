"""Free space as filesystems report it, and what of it means "no limit" or "unknown"."""

import errno
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from syncd.storage.calls import Free
from tests.jobs import SmallJob
from tests.storages import FastStorage

GiB = 2**30


def reported(
    blocks: int = 100,
    available: int = 50,
    files: int = 100,
    free_files: int = 50,
    *,
    fragment: int = 4096,
    block: int = 4096,
) -> os.statvfs_result:
    """The answer of statvfs(3), with Python's signed reading of the kernel's 64 bits."""
    inodes = files, free_files, free_files
    return os.statvfs_result((block, fragment, blocks, available, available, *inodes, 0, 255))


#: What a mount reports → the bytes and inodes that are free.
REPORTS = {
    "ext4": (reported(), (50 * 4096, 50)),
    "a full disk": (reported(available=0, free_files=0), (0, 0)),
    # Of ceph-fuse 16.2.15, with an empty share of 10 GiB.
    "CephFS": (reported(2560, 2560, 3, -1, fragment=4 << 20, block=4 << 20), (10 * GiB, None)),
    "btrfs, and gateways": (reported(files=0, free_files=0), (50 * 4096, None)),
    "FUSE of another user": (reported(0, 0, 0, 0, fragment=0), (None, None)),
    "a block only by its other name": (reported(fragment=0, block=512), (50 * 512, 50)),
    "no size of a block": (reported(fragment=0, block=0), (None, 50)),
    "no limit of bytes": (reported(-1, -1), (None, 50)),
    "a server whose users have overdrawn": (reported(available=-7), (None, 50)),
    "the largest number of bytes": (reported(2**51, 2**51), (None, 50)),
    "the largest numbers": (reported(*[2**63 - 1] * 4), (None, None)),
    "the largest number of files": (reported(free_files=2**63 - 1), (50 * 4096, None)),
    "an exabyte": (reported(2**48, 2**48), (2**60, 50)),
}


@pytest.mark.parametrize("name", REPORTS)
def test_an_amount_is_free_only_if_it_counts_something(name: str) -> None:
    status, free = REPORTS[name]
    assert Free.of(status) == free


@dataclass
class Mount(FastStorage):
    """A folder on a filesystem that reports this."""

    report: os.statvfs_result

    def __post_init__(self) -> None:
        super().__init__()

    def free(self, path: Path) -> Free:  # noqa: ARG002 - one filesystem
        return Free.of(self.report)


@pytest.mark.parametrize("name", ["CephFS", "FUSE of another user", "the largest numbers"])
def test_a_daemon_publishes_where_nothing_limits_it(tmp_path: Path, name: str) -> None:
    job = SmallJob(tmp_path / "job", Mount(REPORTS[name][0]))
    with job.daemon() as loop:
        loop.publish(1)
    assert job.latest.step == 1
    assert list(job.layout.reserve.iterdir())


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_filesystem_that_cannot_say_is_no_full_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int
) -> None:
    def refuse(_: object) -> os.statvfs_result:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "statvfs", refuse)  # the system's own answer
    assert FastStorage().free(tmp_path) == (None, None)
