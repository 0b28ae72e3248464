"""A helper process of ``syncd doctor``: ``python -m syncd.doctor JOB ROOM NUMBER PARENT``."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from syncd.doctor.channel import Channel, serve
from syncd.doctor.facts import facts_of
from syncd.doctor.party import Here
from syncd.protocol.errors import SyncdError
from syncd.protocol.names import printable
from syncd.storage.fsio import Storage

#: Seconds without a call after which the parent process counts as gone.
_IDLE = 600.0


def main() -> None:
    """Serve one run of ``syncd doctor``."""
    job, room, number = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    parent = int(sys.argv[4])  # an argument, because the parent may already have ended
    # Ignore Ctrl-C: the parent gets it too, and ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    storage = Storage(job)
    try:
        serve(
            Channel(storage, room, number, 0),
            Here(storage, room, lambda: facts_of(job)),
            idle=_IDLE,
            given_up=lambda: os.getppid() != parent,
        )
    except (SyncdError, OSError) as error:
        print(f"syncd: {printable(error)}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
