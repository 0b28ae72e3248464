"""The child process that folds deltas; :class:`~.fold_process.FoldChild` starts it."""

from __future__ import annotations

import errno
import json
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from syncd.checkpoint.merging.options import Work
from syncd.deltas.limits import DeltaError
from syncd.protocol.errors import SyncdError
from syncd.protocol.records import Latest, parse
from syncd.storage.fsio import named
from syncd.storage.job import Job

#: Seconds between two signs of life.
_SIGN: Final = 0.5


def run() -> None:
    """Fold as standard input and the arguments say, and tell the progress."""
    root, folder, told = json.loads(sys.stdin.readline())
    job, latest = Job.at(root), parse(Latest, told, "LATEST")
    chain = list(map(int, sys.argv[2:]))
    said, size = 0.0, 0

    def progress(done: int, total: int) -> None:
        nonlocal said, size
        size = total
        if done < total and time.monotonic() - said >= _SIGN:
            said = time.monotonic()
            _tell(0, done, total)

    with suppress(BrokenPipeError):  # the parent has ended
        try:
            from syncd.deltas.folding import fold_version  # noqa: PLC0415 - NumPy may be missing

            with named(folder):
                fold_version(job, latest, chain, Path(folder), Work(lambda: None, progress))
            _tell(0, size, size)
        except BrokenPipeError:
            raise
        except (DeltaError, SyncdError) as error:
            _tell(0, why=str(error))
        except (OSError, ImportError, MemoryError) as error:
            code = error.errno if isinstance(error, OSError) else None
            why = str(error).removeprefix(f"[Errno {code}] ") or type(error).__name__
            _tell(code or errno.ENOMEM, why=why)


def _tell(code: int, done: int = 0, total: int = 0, why: str = "") -> None:
    print(json.dumps([code, done, total, why]), flush=True)
