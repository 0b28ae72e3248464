"""The settings of a merge, and its caller's callbacks."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from syncd.checkpoint.tensor_rules import Cast
from syncd.protocol.records import Names

#: The evidence that a save's bytes are those that its trainer wrote: its receipts, the CRC-32 of
#: its records, or only that its files did not change.
Checked = Literal["receipt", "crc32", "stillness"]
#: Called with the bytes of tensors that are done, and those of all.
Progress = Callable[[int, int], None]


def unheard(done: int, total: int) -> None:
    """Ignore the progress: nobody watches it."""


def may_copy_remotely(fd: int) -> bool:
    """True if the kernel may hand a copy into this file on to a server (NFS 4.2, SMB).

    Not on a block device, because there the kernel copies page by page.
    """
    return os.major(os.fstat(fd).st_dev) == 0


@dataclass(frozen=True, slots=True)
class MergeOptions:
    """The settings of a merge.

    Attributes:
        max_file_size: the most bytes of tensors in one file.
        digests: whether to compute the digests that a manifest carries.
        cast: the dtype that floating tensors are cast to; None to keep theirs.
        prefix: the beginning of the model's names, in a save of ``torch.distributed.checkpoint``;
            None to find out.
        names: the tensors' names: ``hub``, as on the hub, or ``trainer``, as they were saved.
        may_keep: if the hub's names cannot be told: True keeps the trainer's, False is an error.
        threads: how many files are written at a time, and no more than there are processors. Each
            file has one thread, because several would wait for the file's lock.
        in_kernel: whether the kernel copies into this open file, if nothing is computed from the
            bytes.
    """

    max_file_size: int = sys.maxsize
    digests: bool = True
    cast: Cast | None = None
    prefix: str | None = None
    names: Names = "trainer"
    may_keep: bool = False
    threads: int = 1
    in_kernel: Callable[[int], bool] = may_copy_remotely


@dataclass(frozen=True, slots=True)
class Work:
    """The callbacks of a merge's caller.

    Attributes:
        cancel: called between chunks; it raises to stop.
        progress: called with the bytes of tensors that are done, and those of all, in the thread
            that began the merge.
        clock: seconds, monotonic, for timings.
    """

    cancel: Callable[[], None]
    progress: Progress = unheard
    clock: Callable[[], float] = time.monotonic
