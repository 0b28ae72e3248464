"""One participant's leases: their files are there while something holds them, and not longer."""

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from syncd.coordination.leased_version import Holds, LeasedVersion
from syncd.protocol.errors import VersionGoneError
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import MANIFEST, lease_marker
from syncd.protocol.records import Manifest, encode
from syncd.storage.job import Job
from tests.refusals import invalid
from tests.storages import RuledStorage, once, os_error

NAME, SESSION = "explorer", "session"


def published(layout: JobLayout, sequence: int) -> None:
    """A version of no files, as far as its holder can tell."""
    layout.lease_folder(sequence).mkdir(parents=True)
    layout.version(sequence).mkdir(parents=True)
    manifest = Manifest(
        sequence=sequence,
        step=sequence,
        save_id="save",
        checked="receipt",
        digests="off",
        files=(),
        tensors=(),
    )
    (layout.version(sequence) / MANIFEST).write_bytes(encode(manifest))


def is_leased(layout: JobLayout, sequence: int) -> bool:
    return (layout.lease_folder(sequence) / lease_marker(NAME, SESSION)).exists()


@pytest.mark.slow
@dataclass
class Disk:
    """Answers, or refuses what it is told to refuse."""

    refused: set[str] = field(default_factory=set)

    def __call__(self, method: str, given: tuple[Any, ...]) -> None:
        if method in self.refused:
            raise os_error(errno.EIO, given[0])


class LeasesFollowTheirHolds(RuleBasedStateMachine):
    """Whatever fails, held versions are leased, and no others after a look."""

    make: Callable[[], Path]

    def __init__(self) -> None:
        super().__init__()
        self.layout = JobLayout(self.make())
        for sequence in (1, 2):
            published(self.layout, sequence)
        self.disk = Disk()
        self.holds = Holds(Job(RuledStorage(self.disk), self.layout), NAME, SESSION)
        self.held: list[LeasedVersion] = []

    @rule(sequence=st.integers(1, 2))
    def hold(self, sequence: int) -> None:
        try:
            self.held.append(self.holds.hold(sequence))
        except OSError:
            assert self.disk.refused

    @precondition(lambda self: self.held)
    @rule(data=st.data(), again=st.booleans())
    def release(self, data: st.DataObject, again: bool) -> None:
        version = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        version.release()
        if again:
            version.release()

    @precondition(lambda self: self.held)
    @rule()
    def hold_again(self) -> None:
        self.held.append(self.holds.hold_again(self.held[0]))

    @rule(what=st.sets(st.sampled_from(["create", "open_read", "unlink"])))
    def fail(self, what: set[str]) -> None:
        self.disk.refused = what

    @rule()
    def look(self) -> None:
        self.holds.settle()
        if "unlink" not in self.disk.refused:
            leased = {sequence for sequence in (1, 2) if is_leased(self.layout, sequence)}
            assert leased == {version.sequence for version in self.held}

    @invariant()
    def what_is_held_is_leased(self) -> None:
        assert all(is_leased(self.layout, version.sequence) for version in self.held)


def test_leases_follow_their_holds(tmp_path_factory: pytest.TempPathFactory) -> None:
    class Here(LeasesFollowTheirHolds):
        make = staticmethod(lambda: tmp_path_factory.mktemp("job"))

    Here.TestCase().runTest()


def test_a_lease_that_a_lost_answer_hid_is_released(tmp_path: Path) -> None:
    """The server made the file, and its answer was an error."""
    layout = JobLayout(tmp_path)
    published(layout, 1)

    def make_it_all_the_same(path: Path) -> None:
        path.touch()
        raise os_error(errno.EIO, path)

    storage = RuledStorage(once("create", make_it_all_the_same))
    with pytest.raises(OSError, match="Input/output error"):
        Holds(Job(storage, layout), NAME, SESSION).hold(1)
    assert not is_leased(layout, 1)


def test_a_version_that_went_away_while_it_was_leased_is_released_once_the_job_is_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The job is unmounted between the lease and the read of the manifest."""
    layout = JobLayout(tmp_path / "job")
    published(layout, 1)
    away = tmp_path / "away"

    def unmount(_: Path) -> None:
        layout.root.rename(away)
        layout.root.mkdir()

    holds = Holds(Job(RuledStorage(once("open_read", unmount)), layout), NAME, SESSION)
    with pytest.raises(VersionGoneError, match="not there, or not visible yet"):
        holds.hold(1)
    holds.settle()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    layout.root.rmdir()
    away.rename(layout.root)
    assert is_leased(layout, 1)
    holds.settle()
    assert not is_leased(layout, 1)


def test_a_fork_can_take_and_release_nothing(tmp_path: Path) -> None:
    """Its leases would be the same files as its parent's."""
    layout = JobLayout(tmp_path)
    published(layout, 1)
    holds = Holds(Job(RuledStorage(), layout), NAME, SESSION)
    version = holds.hold(1)
    child = os.fork()
    if not child:
        try:
            version.release()
            with invalid("this process is a fork of that"):
                holds.hold(1)
        except BaseException:  # noqa: BLE001 - the parent reports it
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert is_leased(layout, 1)
