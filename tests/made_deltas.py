"""Deltas without a child process: made at once, on the loop's own thread, of a few bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from syncd.checkpoint.merging.options import Progress
from syncd.daemon.delta_maker import DeltaWork
from syncd.deltas.delta_folder import BLOCKS, INDEX
from syncd.deltas.ends import NoDeltaError, delta_end, why_no_delta
from syncd.protocol.names import DELTA
from syncd.protocol.records import Delta, Manifest, VersionFile, encode
from syncd.storage.job import Job
from tests.saved_links import InThisProcess


def quick(
    job: Job,
    base: Manifest,
    target: Manifest,
    folder: Path,
    *,
    cancel: Callable[[], None],
    progress: Progress,
) -> Delta:
    """Write the files of a delta in the order of the real ones; its blocks are none."""
    if why := why_no_delta(base, target):
        raise NoDeltaError(why)
    content = {BLOCKS: f"{base.sequence}>{target.sequence}".encode(), INDEX: b"index"}
    for done, (name, data) in enumerate(content.items()):
        cancel()
        progress(done, len(content))
        job.storage.write_new(folder / name, data)
    ends = delta_end(base), delta_end(target)
    assert ends[0] is not None
    assert ends[1] is not None
    files = tuple(
        VersionFile(name=name, size=len(data), digest=xxhash.xxh3_128_hexdigest(data))
        for name, data in content.items()
    )
    delta = Delta(base=ends[0], target=ends[1], files=files, changed=1, elements=3)
    job.storage.write_new(folder / DELTA, encode(delta))
    return delta


class Done:
    """Work that has ended."""

    def is_alive(self) -> bool:
        return False

    def join(self, timeout: float | None = None) -> None:
        """Nothing is left to wait for."""


def at_once(work: Callable[[], None]) -> Done:
    """Do it now, on this thread."""
    work()
    return Done()


def work(
    make: Any = quick,
    start: Any = at_once,
    why_not_here: Any = lambda: None,
    fold: Any = InThisProcess,
) -> DeltaWork:
    """How a test's daemon makes deltas and folds."""
    return DeltaWork(make, start, why_not_here, fold)
