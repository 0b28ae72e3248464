"""Starts the child process that folds deltas, if this host can use them."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from syncd.checkpoint.sandbox.child_process import SAME_MODULES, ChildProcess, EndedError, described
from syncd.checkpoint.version import read_manifest
from syncd.closing import Closing
from syncd.deltas.limits import DeltaError
from syncd.protocol.records import Latest, Manifest
from syncd.storage.job import Job

#: Seconds to wait for one block; long, because the machine or the storage may be blocked.
_WALL_SECONDS: Final = 300.0


def missing_extra() -> str | None:
    """The reason, as a clause, why this host cannot use deltas; None if it can.

    Imports neither NumPy nor zstd.
    """
    missing = [] if find_spec("numpy") else ["numpy"]
    if sys.version_info >= (3, 14):
        if not find_spec("_zstd"):  # without it, compression.zstd exists, but cannot be imported
            return "this Python was built without zstd: install a Python with compression.zstd"
    elif not find_spec("zstandard"):
        missing.append("zstandard")
    if not missing:
        return None
    return f"{' and '.join(missing)} cannot be imported: pip install 'syncd[deltas]'"


class FoldChild(Closing):
    """A child process that does :func:`~.folding.fold_version`, because this one has no NumPy.

    Attributes:
        done, total: the bytes of tensors that are written, and of all tensors.
    """

    def __init__(self, job: Job, latest: Latest, chain: Sequence[int], folder: Path) -> None:
        self.done = self.total = 0
        self._storage, self._folder, self._line = job.storage, folder, b""
        self._child = ChildProcess(
            "deltas.fold_child", chain, str(folder), task="fold deltas for",
            flags=SAME_MODULES, cancel=lambda: None, wall_seconds=_WALL_SECONDS,
        )  # fmt: skip
        told = [str(job.layout.root), str(folder), latest.model_dump()]
        self._child.write(f"{json.dumps(told)}\n".encode())

    def poll(self) -> Manifest | None:
        """The new version, once it is there.

        Raises:
            DeltaError: a delta or the base is damaged.
            OSError: the storage failed, or the child has ended.
        """
        try:
            *lines, self._line = (self._line + self._child.read_some()).split(b"\n")
        except EndedError:
            why = f"the process that folds deltas ended with {described(self._child.end())}"
            raise OSError(errno.ECHILD, why) from None
        for line in lines:
            code, self.done, self.total, why = json.loads(line)
            if why:
                raise OSError(code, why) if code else DeltaError(why)
        whole = lines and self.done == self.total
        return read_manifest(self._storage, self._folder) if whole else None

    def close(self) -> None:
        """End the child. Safe to call twice."""
        self._child.close()
