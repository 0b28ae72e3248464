"""A copy that nobody uses is the memory of the next one: the same files, with the new bytes."""

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from explorer_hooks.staging import NotStagedError, Staging
from syncd.coordination.leased_version import LeasedVersion
from syncd.storage.calls import Free
from tests.deltas import contents
from tests.jobs import SmallJob
from tests.staged_deltas import DeltaChain, copies
from tests.storages import STORAGE, RuledStorage

#: What a user of a file still sees of it.
Reads = Callable[[], bytes]
WEIGHTS = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
USER = """
import mmap, sys
with open(sys.argv[1], "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
print("uses", flush=True)
sys.stdin.read()
sys.stdout.buffer.write(mapped[:])
"""


@pytest.fixture
def chain(job: SmallJob, tmp_path: Path) -> DeltaChain:
    return DeltaChain(job, tmp_path)


def inodes(folder: Path) -> list[int]:
    return [(folder / name).stat().st_ino for name in WEIGHTS]


def next_copies(chain: DeltaChain, staging: Staging) -> tuple[LeasedVersion, LeasedVersion]:
    """The copies of versions 1 and 3, both held."""
    return staging.stage(chain.version(1)), chain.follow(staging)


def room(memory: Path) -> list[str]:
    (found,) = memory.iterdir()
    return sorted(os.listdir(found))


@pytest.mark.parametrize("by_delta", [True, False])
def test_the_next_copy_is_written_over_one_that_nobody_holds(
    chain: DeltaChain, memory: Path, by_delta: bool
) -> None:
    staging, other = Staging(memory), Staging(memory)
    first, second = next_copies(chain, staging)
    theirs, before = other.hold_again(first), inodes(first.folder)
    kept = contents(second.folder)
    first.release()
    staging.tidy()
    assert copies(memory) == ["v000001", "v000003"]  # another process still holds it
    theirs.release()
    staging.tidy()
    assert copies(memory) == ["v000003"]
    chain.add_delta()
    if by_delta:
        third = chain.follow(staging)
    else:
        for folder, _ in chain.deltas:
            shutil.rmtree(folder)
        chain.publish(4)
        third = staging.stage(chain.version(4))
        assert staging.fetched.full_bytes
    chain.check(third, 4)
    assert inodes(third.folder) == before
    assert contents(second.folder) == kept
    assert room(memory) == [".copier", second.folder.name, third.folder.name]
    second.release()
    third.release()
    staging.tidy()
    assert room(memory) == [".copier"]


@contextmanager
def another_process(path: Path) -> Iterator[Reads]:
    """Maps it, and has closed its descriptor."""
    program = [sys.executable, "-c", USER, str(path)]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"uses\n"
        yield lambda: process.communicate()[0]


@contextmanager
def opened(path: Path) -> Iterator[Reads]:
    with path.open("rb") as file:
        yield file.read


@contextmanager
def linked(path: Path) -> Iterator[Reads]:
    other = path.parents[1] / ".copier-other"
    os.link(path, other)
    yield other.read_bytes
    other.unlink()


@contextmanager
def a_link(path: Path) -> Iterator[Reads]:
    """The file is elsewhere, and a link in the copy leads to it."""
    other = path.parents[2] / "elsewhere"
    path.rename(other)
    path.symlink_to(other)
    yield other.read_bytes
    other.unlink()


@contextmanager
def owned(path: Path) -> Iterator[Reads]:
    """Another user has it; of this one there is a descriptor of the name alone."""
    if os.geteuid():
        pytest.skip("only root can give files away")
    os.chown(path, 65534, -1)
    name = os.open(path, os.O_PATH)
    yield lambda: Path(f"/proc/self/fd/{name}").read_bytes()
    os.close(name)


@pytest.mark.parametrize(
    "use",
    [
        another_process,
        opened,
        linked,
        a_link,
        owned,
    ],
)
def test_a_file_that_somebody_still_uses_is_never_written(
    chain: DeltaChain, memory: Path, use: Callable[[Path], AbstractContextManager[Reads]]
) -> None:
    staging = Staging(memory)
    first, second = next_copies(chain, staging)
    before, name = inodes(first.folder), WEIGHTS[0]
    content = (first.folder / name).read_bytes()
    with use(first.folder / name) as reads:
        first.release()
        staging.tidy()
        chain.add_delta()
        third = chain.follow(staging)  # compares it with the fold
        assert inodes(third.folder)[0] not in before
        assert inodes(third.folder)[1] == before[1], "it would be a new one in any case"
        assert reads() == content
    second.release()
    third.release()


def test_without_leases_each_copy_is_a_new_one(chain: DeltaChain, memory: Path) -> None:
    storage = RuledStorage()
    storage.refuse("open_alone", errno.EINVAL)
    staging = Staging(memory, storage=storage)
    first, second = next_copies(chain, staging)
    before = inodes(first.folder)
    first.release()
    staging.tidy()
    chain.add_delta()
    third = chain.follow(staging)
    assert not set(inodes(third.folder)) & set(before)
    assert room(memory) == [".copier", second.folder.name, third.folder.name]


class Full(RuledStorage):
    """Has so many bytes free."""

    bytes = 2**40

    def free(self, _: Path) -> Free:
        return Free(self.bytes, None)


def test_the_memory_that_is_there_counts_once(chain: DeltaChain, memory: Path) -> None:
    storage = Full()
    size = chain.whole[0].manifest.size
    staging = Staging(memory, int(2.9 * size), storage=storage)
    first, second = next_copies(chain, staging)
    first.release()
    staging.tidy()
    chain.add_delta()
    storage.bytes = 64 * 2**20 + size // 2  # and the spare copy's, for the next and its delta
    third = chain.follow(staging)
    second.release()
    staging.tidy()
    chain.add_delta()
    storage.bytes = 64 * 2**20
    with pytest.raises(NotStagedError, match="do not fit into the"):
        chain.follow(staging)
    third.release()


@pytest.mark.parametrize("size", [1, 5000, 90_000])
def test_a_file_that_is_written_over_has_the_new_size_and_bytes(tmp_path: Path, size: int) -> None:
    (tmp_path / "spare").mkdir()
    (tmp_path / "spare" / "file").write_bytes(b"old" * 10_000)
    storage = RuledStorage()
    storage.spare = tmp_path / "spare"
    before = (tmp_path / "spare" / "file").stat().st_ino
    with storage.creating(tmp_path / "file", size) as fd:
        storage.pwrite_all(fd, b"n" * size, 0)
    assert (tmp_path / "file").read_bytes() == b"n" * size
    assert (tmp_path / "file").stat().st_ino == before
    with pytest.raises(FileExistsError), storage.creating(tmp_path / "file", size):
        pass
    STORAGE.rmdir(storage.spare)
