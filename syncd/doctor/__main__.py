"""A helper process of ``syncd doctor``: ``python -m syncd.doctor JOB ROOM PARENT``."""

from __future__ import annotations

import os
import signal
import sys

from syncd.doctor.examination import Examination
from syncd.protocol.errors import SyncdError
from syncd.protocol.names import printable
from syncd.storage.job import Job


def main() -> None:
    """Visit one run of ``syncd doctor``."""
    job, room, parent = sys.argv[1:]  # the parent as an argument, because it may have ended
    # Ignore Ctrl-C: the parent gets it too, and ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    visit = Examination(
        Job.at(job), peer=1, rooms=room, has_ended=lambda: os.getppid() != int(parent)
    )
    try:
        visit.examine()
    except (SyncdError, OSError) as error:
        sys.exit(f"syncd: {printable(error)}")


if __name__ == "__main__":
    main()
