"""The settings of a merge, and the callbacks of its caller."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Literal, NamedTuple

from syncd.checkpoint.tensor_rules import Cast
from syncd.protocol.records import Names

#: The evidence that a save's bytes are those that its trainer wrote: its receipts, the CRC-32 of
#: its records, or only that its files did not change.
Checked = Literal["receipt", "crc32", "stillness"]
#: Called with the number of bytes of tensors that are done, and with the total number.
Progress = Callable[[int, int], None]


def unheard(done: int, total: int) -> None:
    """Ignore the progress."""


def may_copy_remotely(fd: int) -> bool:
    """True if the kernel can ask a file server to copy into this file (NFS 4.2, SMB).

    False if the file's ``st_dev`` is a block device, because the kernel then copies page by page.
    """
    return os.major(os.fstat(fd).st_dev) == 0


class MergeOptions(NamedTuple):
    """The settings of a merge.

    Attributes:
        max_file_size: the largest number of bytes of tensors in one file.
        cast: the dtype to cast floating-point tensors to; None to keep their dtypes.
        prefix: the beginning of the model's tensor names in a save of
            ``torch.distributed.checkpoint``; None to find it.
        names: ``hub`` for the tensors' names on the hub, ``trainer`` for the saved names.
        may_keep: True to keep the trainer's names if the hub's names are unknown; False to raise.
        keeps_config: True to leave a ``config.json`` as it is that has another dtype.
        threads: the most that copy at a time, at most the number of processors; each writes a file,
            or a share of a large one. More than four would take processors from a trainer on this
            host, and seldom make storage faster.
        in_kernel: returns True if the kernel should copy into this open file when nothing is
            computed from the bytes.
    """

    max_file_size: int = sys.maxsize
    digests: bool = True
    cast: Cast | None = None
    prefix: str | None = None
    names: Names = "trainer"
    may_keep: bool = False
    keeps_config: bool = False
    threads: int = 4
    in_kernel: Callable[[int], bool] = may_copy_remotely


class Work(NamedTuple):
    """The callbacks of a merge's caller.

    Attributes:
        cancel: called between chunks; it raises an error to stop.
        progress: called in the thread that began the merge.
    """

    cancel: Callable[[], None]
    progress: Progress = unheard
    clock: Callable[[], float] = time.monotonic
