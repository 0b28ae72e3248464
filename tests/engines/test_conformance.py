from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from explorer_hooks.engines import conformance
from explorer_hooks.engines.conformance import CHECKS, Check, NoLease, Subject, name_of
from explorer_hooks.engines.fake import FakeEngine, content_of
from explorer_hooks.engines.fitting import TensorSpec, check_kind, compare_tensors, tensor_specs
from explorer_hooks.hook import ExplorerHook
from explorer_hooks.reader import LeasedVersion
from explorer_hooks.staging import Staging
from syncd.protocol.errors import CheckpointError
from syncd.protocol.policy import Version
from syncd.storage.fsio import Storage
from tests.engines.subjects import SUBJECTS
from tests.jobs import SmallJob
from tests.staged_deltas import DeltaChain


@pytest.fixture(scope="module", params=SUBJECTS.values(), ids=SUBJECTS.keys())
def subject(request: pytest.FixtureRequest) -> Subject:
    return request.param()


@pytest.mark.parametrize("check", CHECKS, ids=name_of)
def test_every_engine_does_what_the_protocol_promises(
    check: Check, subject: Subject, tmp_path: Path
) -> None:
    check(subject, tmp_path)


@pytest.mark.parametrize("name", ["module", "module, direct", "transformers"])
def test_an_engine_has_the_bits_of_the_tip(
    job: SmallJob, tmp_path: Path, memory: Path, name: str
) -> None:
    subject = SUBJECTS[name]()
    chain = DeltaChain(job, tmp_path, shapes=subject.tensors, small=subject.files)
    engine = subject.make()
    with ExplorerHook(job.root, "explorer", engine, staging=Staging(memory)) as hook:
        for number in (3, 4):
            assert hook.pull(0) == Version(number, number)
            assert job.latest.sequence == 1
            with hook._pipeline.hold_again() as copy:
                chain.check(copy, number)
                assert subject.served(engine) == subject.expected(copy)
            chain.add_delta()


TENSORS = {"a": TensorSpec("F32", (2, 3)), "b": TensorSpec("BF16", (4,))}


class KeepsWhatIsNewer(FakeEngine):
    """Where the older version was prepared."""

    prepared: LeasedVersion | None = None

    def prepare(self, version: LeasedVersion) -> None:
        self.prepared = version

    def load(self, version: LeasedVersion) -> None:
        if version is not self.prepared or not self.served or version.sequence > 1:
            super().load(version)


class LoadsOnResume(KeepsWhatIsNewer):
    def load(self, version: LeasedVersion) -> None:
        FakeEngine.load(self, version)

    def resume(self) -> None:
        if self.prepared:
            self.load(self.prepared)


class LoadsWhatIsPrepared(KeepsWhatIsNewer):
    def load(self, version: LeasedVersion) -> None:
        prepared, self.prepared = self.prepared, None
        FakeEngine.load(self, prepared or version)


class LoadsAhead(FakeEngine):
    def prepare(self, version: LeasedVersion) -> None:
        self.load(version)


class ResumesOncePaused(FakeEngine):
    def resume(self) -> None:
        assert self.is_paused
        super().resume()


class ClosesOnce(FakeEngine):
    def close(self) -> None:
        assert not self.asked("close")
        super().close()


class TakesAnything(FakeEngine):
    def check(self, version: LeasedVersion) -> None:
        pass


class TakesAnyKind(FakeEngine):
    def check(self, version: LeasedVersion) -> None:
        compare_tensors(version, tensor_specs(version.manifest), TENSORS, "it")


class LoadsWithoutATensor(FakeEngine):
    def check(self, version: LeasedVersion) -> None:
        check_kind(version, self.kinds)
        compare_tensors(version, {**TENSORS, **tensor_specs(version.manifest)}, TENSORS, "it")


class LoadsWhatItKnows(FakeEngine):
    def check(self, version: LeasedVersion) -> None:
        check_kind(version, self.kinds)
        specs = tensor_specs(version.manifest)
        known = {name: spec for name, spec in specs.items() if name in TENSORS}
        compare_tensors(version, known, TENSORS, "it")


class HidesReadErrors(FakeEngine):
    def load(self, version: LeasedVersion) -> None:
        with suppress(OSError):
            super().load(version)


class ReadsElsewhere(FakeEngine):
    def load(self, version: LeasedVersion) -> None:
        storage = Storage(durable=False)
        super().load(LeasedVersion(storage, version.folder, version.manifest, NoLease()))


class BreaksByAnError(FakeEngine):
    is_broken = False

    def load(self, version: LeasedVersion) -> None:
        assert not self.is_broken
        self.is_broken = True
        super().load(version)
        self.is_broken = False


class HidesBrokenFiles(FakeEngine):
    def load(self, version: LeasedVersion) -> None:
        with suppress(CheckpointError):
            super().load(version)


class LoadsByHalves(FakeEngine):
    def load(self, version: LeasedVersion) -> None:
        self.served = None
        super().load(version)


_READ = conformance.a_read_error_at_any_tensor_changes_nothing
_CUT = conformance.a_file_that_is_cut_short_changes_nothing
WRONG: Mapping[type[FakeEngine], set[Check]] = {
    KeepsWhatIsNewer: {conformance.serves_the_bits_of_what_was_loaded},
    LoadsOnResume: {conformance.follows_the_order_of_a_hook},
    LoadsAhead: {conformance.follows_the_order_of_a_hook, _READ},
    LoadsWhatIsPrepared: {conformance.what_is_prepared_need_not_be_loaded},
    ResumesOncePaused: {conformance.resume_and_close_can_be_called_at_any_time},
    ClosesOnce: {conformance.resume_and_close_can_be_called_at_any_time},
    TakesAnything: {conformance.check_refuses_what_does_not_fit},
    TakesAnyKind: {conformance.check_refuses_what_does_not_fit},
    LoadsWithoutATensor: {conformance.check_refuses_what_does_not_fit},
    LoadsWhatItKnows: {conformance.check_refuses_what_does_not_fit},
    HidesReadErrors: {_READ},
    ReadsElsewhere: {_READ},
    BreaksByAnError: {_READ},
    HidesBrokenFiles: {_CUT},
    LoadsByHalves: {_READ, _CUT},
}


@pytest.mark.parametrize("engine", WRONG)
def test_a_wrong_engine_fails_only_the_checks_of_its_fault(
    engine: type[FakeEngine], tmp_path: Path
) -> None:
    def served(made: Any) -> object:
        return made.served and made.served.digest

    subject = Subject(make=engine, served=served, tensors=TENSORS, expected=content_of)
    failed = set()
    for check in CHECKS:
        folder = tmp_path / name_of(check)
        folder.mkdir()
        try:
            check(subject, folder)
        except (AssertionError, OSError):
            failed.add(check)
    assert failed == WRONG[engine]


def test_each_check_alone_finds_an_engine() -> None:
    assert set(CHECKS) == {
        check for checks in WRONG.values() if len(checks) == 1 for check in checks
    }
