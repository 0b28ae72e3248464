"""A helper process of ``syncd doctor``: ``python -m syncd.doctor JOB ROOM PARENT``."""

from __future__ import annotations

import os
import signal
import sys

from syncd.doctor.examination import Deadlines, join
from syncd.protocol.errors import SyncdError
from syncd.protocol.names import printable
from syncd.storage.job import Job


def main() -> None:
    """Serve one run of ``syncd doctor``."""
    job, room = sys.argv[1:3]
    parent = int(sys.argv[3])  # an argument, because the parent may already have ended
    # Ignore Ctrl-C: the parent gets it too, and ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        join(Job.at(job), Deadlines(), room, lambda: os.getppid() != parent)
    except (SyncdError, OSError) as error:
        print(f"syncd: {printable(error)}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
