"""One job as two hosts have it: on two mounts of a share, or on two paths of the local disk.

``SYNCD_TEST_MOUNTS=A:B`` names two mounts of one shared filesystem, each a client of its own.
Then, optionally, ``SYNCD_TEST_EXPORT`` is the same folder as the server has it, where nothing lags,
and ``SYNCD_TEST_LINKS=A:B`` the network interfaces whose absence cuts these clients off.
``docs/reliability.md`` says what was run.
"""

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from syncd.protocol.layout import JobLayout
from syncd.storage.job import Job

_MOUNTS = os.environ.get("SYNCD_TEST_MOUNTS", "")
IS_NETWORK = bool(_MOUNTS)


@dataclass(frozen=True)
class Host:
    """A host, as far as a process can tell.

    Attributes:
        job: where it has the job.
        name: another than this machine's, on a network: else a dead process's locks would be known
            by its pid, and not by their silence. None on the local disk.
        link: the network interface that it is connected by, if that is ours to take away.
    """

    job: Path
    name: str | None = None
    link: str | None = None

    @property
    def runs(self) -> list[str]:
        """What a command follows to be run there; the pid stays that of the process started."""
        if self.name is None:
            return []
        return ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.name]

    @contextmanager
    def cut_off(self) -> Iterator[None]:
        """No word from it reaches the server in the block, nor the other way round."""
        assert self.link is not None
        subprocess.run(["ip", "link", "set", self.link, "down"], check=True)
        try:
            yield
        finally:
            subprocess.run(["ip", "link", "set", self.link, "up"], check=True)


@dataclass(frozen=True)
class SharedJob:
    """A job, and who has it.

    Attributes:
        a: the host of the first daemon.
        b: the host of trainers and explorers, and of the second daemon.
        seen: the job as the test looks at it: where nothing lags, if there is such a place.
    """

    a: Host
    b: Host
    seen: JobLayout

    @classmethod
    def made_in(cls, folder: Path, *, lease_time: float) -> Self:
        """A new job below the two mounts; else in ``folder``, which has a second path too."""
        if not IS_NETWORK:
            (folder / "share").mkdir()
            (folder / "other").symlink_to("share")
            a, b = Host(folder / "share" / "job"), Host(folder / "other" / "job")
            seen = b.job
        else:
            name = f"job-{secrets.token_hex(4)}"
            links = (os.environ.get("SYNCD_TEST_LINKS") or ":").split(":")
            a, b = (
                Host(Path(mount) / name, f"client{number}", link or None)
                for number, (mount, link) in enumerate(
                    zip(_MOUNTS.split(":"), links, strict=True), 1
                )
            )
            seen = Path(os.environ.get("SYNCD_TEST_EXPORT", b.job.parent)) / name
        b.job.mkdir()
        Job.at(b.job).open(lease_time=lease_time)
        return cls(a, b, JobLayout(seen))

    def remove(self) -> None:
        """Give the share its room back."""
        shutil.rmtree(self.seen.root, ignore_errors=True)
