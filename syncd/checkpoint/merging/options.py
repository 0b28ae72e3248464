"""The settings of a merge, and the caller that it answers to while it runs."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from syncd.checkpoint.tensor_rules import Cast
from syncd.protocol.records import Names

#: How the bytes of a save are known to be those that its trainer wrote: by its receipts, by the
#: CRC-32 of its records, or only because its files did not change.
Checked = Literal["receipt", "crc32", "stillness"]
#: Called with the bytes of tensors that are done, and those of all.
Progress = Callable[[int, int], None]


def unheard(done: int, total: int) -> None:
    """Nobody watches the progress."""


def may_copy_remotely(fd: int) -> bool:
    """True if a copy inside the kernel into this file may be handed on to a server (NFS 4.2, SMB).

    Not on a block device, where the kernel goes page by page.
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
        names: those that tensors get: ``hub``, as on the hub, or ``trainer``, as they were saved.
        may_keep: whether tensors keep the trainer's names if those of the hub cannot be told; else
            that is an error.
        threads: how many files are written at a time, and no more than there are processors: into
            one file several gain nothing, for they wait for its lock.
        in_kernel: whether the kernel copies into this open file, if nothing is computed of the
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
    """The caller of a merge, while it runs.

    Attributes:
        cancel: called between chunks; it raises to stop.
        progress: called with the bytes of tensors that are done, and those of all, in the thread
            that began the merge.
        clock: seconds, monotonic, for timings.
    """

    cancel: Callable[[], None]
    progress: Progress = unheard
    clock: Callable[[], float] = time.monotonic
