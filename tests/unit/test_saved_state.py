from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from syncd.coordination import participant
from syncd.coordination.participant import StateFile
from syncd.protocol.errors import InvalidSettingsError, ProtocolMismatchError, RecordError
from syncd.storage.job import Job
from tests.jobs import SmallJob
from tests.refusals import invalid
from tests.storages import CHANGES, RuledStorage, fail, once


def state_file(job: SmallJob, storage: RuledStorage | None = None) -> StateFile:
    path = job.layout.saved_state("explorer", "e")
    return StateFile(Job(storage or job.storage, job.layout), path)


def iteration(file: StateFile) -> int | None:
    found = file.load()
    return found.iteration if found else None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=9)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=8,
)  # fmt: skip


@given(state=st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=9), JSON, max_size=3))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_json_is_read_back_as_it_was(job: SmallJob, state: dict[str, Any]) -> None:
    file = state_file(job)
    try:
        file.save(3, state)
    except InvalidSettingsError:
        assert any("\ud800" <= c <= "\udfff" for c in str(state))
        return
    found = file.load()
    assert found is not None
    assert found.state == state


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


ODD = [float("nan"), float("inf"), {1: 2}, object(), {3}, b"x"]
LARGE = [nested(250), nested(100_000), "x" * 2000]


@pytest.mark.parametrize("value", [*ODD, *LARGE])
def test_a_state_that_could_not_be_read_again_is_refused_and_changes_nothing(
    job: SmallJob, monkeypatch: pytest.MonkeyPatch, value: object
) -> None:
    monkeypatch.setattr(participant, "LONG_RECORD_LIMIT", 1000)
    file = state_file(job)
    file.save(1, {"key": nested(100)})
    match = "is not plain JSON" if value in ODD else "cannot be read back"
    with invalid(match):
        file.save(2, {"key": value})
    assert iteration(file) == 1


@pytest.mark.parametrize("cut", [0, 1, 20])
def test_a_torn_one_falls_back_to_the_one_before(job: SmallJob, cut: int) -> None:
    file = state_file(job)
    path = job.layout.saved_state("explorer", "e")
    for number in (1, 2):
        file.save(number, {"n": number})
    path.write_bytes(path.read_bytes()[:cut])
    assert iteration(file) == 1
    file.save(3, {})
    assert iteration(file) == 3
    path.unlink()
    assert iteration(file) == 1


def test_when_both_are_torn_it_is_said_and_not_begun_anew(job: SmallJob) -> None:
    file = state_file(job)
    path = job.layout.saved_state("explorer", "e")
    file.save(1, {})
    path.write_bytes(b"")
    with pytest.raises(RecordError, match="Remove both files to begin without a saved state"):
        file.load()
    path.write_bytes(b'{"protocol": 2, "iteration": 1}')
    with pytest.raises(ProtocolMismatchError):
        file.load()


@pytest.mark.parametrize("method", [name for name in CHANGES if name not in {"open_append"}])
def test_a_save_that_fails_anywhere_leaves_this_state_or_the_one_before(
    job: SmallJob, method: str
) -> None:
    state_file(job).save(1, {})
    for nth in range(6):
        try:
            state_file(job, RuledStorage(once(method, fail, nth=nth))).save(2, {})
        except OSError:
            assert iteration(state_file(job)) in {1, 2}
        else:
            assert iteration(state_file(job)) == 2
        state_file(job).save(1, {})
