from pathlib import Path
from typing import Any

import pytest

from explorer_hooks.engines import conformance
from explorer_hooks.engines.conformance import CHECKS, Check, ConformanceError, Subject, name_of
from explorer_hooks.engines.fake import FakeEngine, content_of
from explorer_hooks.engines.fitting import TensorSpec
from explorer_hooks.hook import ExplorerHook
from explorer_hooks.reader import LeasedVersion
from explorer_hooks.staging import Staging
from syncd.protocol.policy import Version
from tests.engines.subjects import SUBJECTS
from tests.jobs import SmallJob
from tests.staged_links import LinkedJob


@pytest.fixture(scope="module", params=SUBJECTS.values(), ids=SUBJECTS.keys())
def subject(request: pytest.FixtureRequest) -> Subject:
    return request.param()


@pytest.mark.parametrize("check", CHECKS, ids=name_of)
def test_every_engine_does_what_the_protocol_promises(
    check: Check, subject: Subject, tmp_path: Path
) -> None:
    check(subject, tmp_path)


@pytest.mark.parametrize("name", ["module", "module, direct", "transformers"])
def test_an_engine_has_the_bits_of_what_is_ahead(
    job: SmallJob, tmp_path: Path, memory: Path, name: str
) -> None:
    subject = SUBJECTS[name]()
    linked = LinkedJob(job, tmp_path, shapes=subject.tensors, small=subject.files)
    engine = subject.make()
    with ExplorerHook(job.root, "explorer", engine, staging=Staging(memory)) as hook:
        for number in (3, 4):
            assert hook.pull(0) == Version(number, number)
            assert job.latest.sequence == 1
            with hook._pipeline.hold_again() as copy:
                linked.check(copy, number)
                assert subject.served(engine) == subject.expected(copy)
            linked.link()


class TakesAnything(FakeEngine):
    def check(self, version: LeasedVersion) -> None:
        pass


class LoadsByHalves(FakeEngine):
    def load(self, version: LeasedVersion) -> None:
        self.served = None
        super().load(version)


class KeepsWhatItHad(FakeEngine):
    def load(self, version: LeasedVersion) -> None:
        if self.served is None or version.sequence > self.served.sequence:
            super().load(version)


class LoadsAhead(FakeEngine):
    def prepare(self, version: LeasedVersion) -> None:
        super().load(version)


class HidesErrors(FakeEngine):
    def load(self, version: LeasedVersion) -> None:
        try:
            super().load(version)
        except Exception:  # noqa: BLE001 - that is what is wrong with it
            self.is_paused = False


class LoadsWhatIsPrepared(FakeEngine):
    """What was prepared first, whatever is loaded."""

    prepared: LeasedVersion | None = None

    def prepare(self, version: LeasedVersion) -> None:
        self.prepared = version

    def load(self, version: LeasedVersion) -> None:
        super().load(self.prepared or version)


@pytest.mark.parametrize(
    ("engine", "check"),
    [(TakesAnything, conformance.check_refuses_what_does_not_fit),
     (LoadsByHalves, conformance.a_read_error_at_any_tensor_changes_nothing),
     (LoadsByHalves, conformance.a_file_that_is_cut_short_changes_nothing),
     (HidesErrors, conformance.a_file_that_is_cut_short_changes_nothing),
     (KeepsWhatItHad, conformance.serves_the_bits_of_what_was_loaded),
     (LoadsAhead, conformance.follows_the_order_of_a_hook),
     (LoadsWhatIsPrepared, conformance.what_is_prepared_need_not_be_loaded)],
)  # fmt: skip
def test_a_wrong_engine_is_found_out(
    engine: type[FakeEngine], check: Check, tmp_path: Path
) -> None:
    def served(made: Any) -> object:
        return made.served.digest if made.served is not None else None

    tensors = {"a": TensorSpec("F32", (2, 3)), "b": TensorSpec("BF16", (4,))}
    subject = Subject(make=engine, served=served, tensors=tensors, expected=content_of)
    with pytest.raises((ConformanceError, OSError)):
        check(subject, tmp_path)
