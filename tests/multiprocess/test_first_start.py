"""The first write of each program on storage that takes none: it says where, and what to do."""

from contextlib import ExitStack
from pathlib import Path

import pytest
from torch import nn

from explorer_hooks.engines.fake import FakeEngine
from explorer_hooks.hook import ExplorerHook
from explorer_hooks.reader import Reader
from syncd.protocol.errors import JobUnavailableError, NoRoomError, SyncdError
from syncd.storage.job import Job
from tests.multiprocess.mounts import read_only, tmpfs
from tests.multiprocess.processes import syncd
from trainer_hooks import TrainerHook

FIRST = {
    "trainer": lambda job: TrainerHook(job, nn.Linear(2, 2)),
    "explorer": lambda job: ExplorerHook(job, "e", FakeEngine()),
    "reader": lambda job: Reader(job, "r"),
}
REMEDY = {
    NoRoomError: "No space left on device. Make room",
    JobUnavailableError: "Mount the storage rw",
}


def unwritable(stack: ExitStack, folder: Path, why: type[SyncdError], *, is_new: bool) -> Path:
    """A job, new or opened before, whose storage takes no writes."""
    if why is NoRoomError:
        disk = stack.enter_context(tmpfs(folder / "disk", megabytes=1))
    else:
        disk = folder / "disk"
        disk.mkdir()
    job = disk / "job"
    job.mkdir()
    if not is_new:
        Job.at(job).open()
    if why is NoRoomError:
        with pytest.raises(OSError, match="No space left"):
            (disk / "filler").write_bytes(bytes(1 << 21))
    else:
        stack.enter_context(read_only(disk))
    return job


@pytest.mark.parametrize("why", REMEDY)
@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize("first", FIRST)
def test_a_hook_says_where_and_what_to_do(
    stack: ExitStack, tmp_path: Path, first: str, why: type[SyncdError], is_new: bool
) -> None:
    job = unwritable(stack, tmp_path, why, is_new=is_new)
    begin = FIRST[first]
    with pytest.raises(why, match=rf"^{job}\S* cannot be written: .*{REMEDY[why]}"):
        begin(job)


@pytest.mark.parametrize(
    ("command", "is_new", "why"),
    [
        ("run", True, JobUnavailableError),
        ("run", True, NoRoomError),
        # Of a job that was served before a daemon waits for room: it has a reserve to give up.
        ("run", False, JobUnavailableError),
        ("pause", False, JobUnavailableError),
        ("pause", False, NoRoomError),
    ],
)
def test_a_command_ends_with_the_errors_code_and_one_line(
    stack: ExitStack, tmp_path: Path, command: str, is_new: bool, why: type[SyncdError]
) -> None:
    job = unwritable(stack, tmp_path, why, is_new=is_new)
    done = syncd(command, job)
    assert done.returncode == why.exit_code
    assert done.stderr.startswith(f"syncd: {job}")
    assert REMEDY[why] in done.stderr
    assert done.stderr.count("\n") == 1
