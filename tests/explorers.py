"""Versions for tests of the explorers' side: published at once, and held."""

from collections.abc import Iterator
from contextlib import contextmanager

from explorer_hooks.hook import ExplorerHook
from explorer_hooks.reader import LeasedVersion, Reader
from syncd.daemon.config import DaemonConfig
from syncd.protocol.policy import Version
from syncd.protocol.reports import ExplorerReport
from tests.jobs import SmallJob, read

LONG = 60.0


def publish(job: SmallJob, *steps: int, keep: int = 2) -> None:
    """Save steps, and let a daemon publish each."""
    with job.daemon(DaemonConfig(keep=keep)) as loop:
        loop.publish(*steps)
    job.hosts.settle()


def pulls(hook: ExplorerHook, sequence: int, step: int) -> None:
    """The newest version is this one."""
    assert hook.pull(0) == Version(sequence, step)


def report(job: SmallJob, name: str = "explorer") -> ExplorerReport:
    """What an explorer says about itself."""
    return read(ExplorerReport, job.explorer(name))


def leased(job: SmallJob) -> list[int]:
    """The versions that are leased."""
    folders = job.layout.leases.iterdir()
    return sorted(int(folder.name[1:]) for folder in folders if any(folder.iterdir()))


@contextmanager
def held(job: SmallJob, name: str = "holder") -> Iterator[LeasedVersion]:
    """The newest version, leased."""
    with Reader(job.root, name, storage=job.explorers) as reader:
        version = reader.next_version(0, LONG)
        try:
            yield version
        finally:
            version.release()
