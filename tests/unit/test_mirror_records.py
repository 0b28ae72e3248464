"""The pure rules of a mirror: what is newest, what may go, and what a delta may weigh."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from syncd.mirror.object_store import Rate, _one_line
from syncd.protocol.errors import RecordError
from syncd.protocol.mirrored import (
    LONGEST,
    MirroredFile,
    MirroredSave,
    MirroredVersion,
    expired,
    sequence_of,
    unneeded,
    version_key,
)
from syncd.protocol.records import encode, parse
from tests.jobs import nothing
from tests.storages import Clock

NOW = datetime(2026, 1, 1, tzinfo=UTC)
AGE = timedelta(hours=2)
#: When something was made: minutes before NOW.
MINUTES = st.integers(0, 1000).map(lambda minutes: NOW - timedelta(minutes=minutes))


def file(number: int, size: int = 100) -> MirroredFile:
    return MirroredFile(name=f"{number}.safetensors", size=size, digest=f"{number:032x}")


def version(*sizes: int, first: int = 1, **changes: Any) -> MirroredVersion:
    """A whole version and deltas, of these sizes, with a file each."""
    files = [file(number, size) for number, size in enumerate(sizes, first)]
    saves = tuple(
        MirroredSave(sequence=number, step=number, save_id=f"r-{number}-1", files=(one,))
        for number, one in enumerate(files, first)
    )
    return MirroredVersion(**{"job": "job", "kind": "full", "saves": saves} | changes)


@given(st.integers(0, 10**18 - 1), st.integers(0, 10**18 - 1))
def test_names_of_versions_sort_as_their_numbers(one: int, other: int) -> None:
    assert sequence_of(version_key(one)) == one
    assert (version_key(one) < version_key(other)) == (one < other)


@pytest.mark.parametrize(
    "key", ["versions/17", "versions/x.json", "versions/-1.json", "objects/1.json", "1.json", ""]
)
def test_other_names_are_no_versions(key: str) -> None:
    assert sequence_of(key) is None


@given(st.dictionaries(st.integers(1, 50), MINUTES), st.integers(1, 5))
def test_expired_versions_are_neither_newest_nor_lately_superseded(
    versions: dict[int, datetime], keep: int
) -> None:
    old = expired(versions, keep=keep, min_age=AGE, now=NOW)
    newest = sorted(versions)[-keep:]
    assert not set(old) & set(newest)
    for sequence in versions.keys() - set(newest):
        after = min(other for other in versions if other > sequence)
        assert (sequence in old) == (versions[after] < NOW - AGE)


@given(st.lists(st.tuples(MINUTES, st.booleans()), max_size=20))
def test_unneeded_objects_are_old_and_of_no_version(made: list[tuple[datetime, bool]]) -> None:
    objects = {file(number).key: at for number, (at, _) in enumerate(made, 1)}
    kept = [
        version(100, first=number, small=(file(99),))
        for number, (_, is_needed) in enumerate(made, 1)
        if is_needed
    ]
    gone = unneeded({**objects, file(99).key: NOW - 2 * AGE}, kept, min_age=AGE, now=NOW)
    expected = [
        file(number).key
        for number, (at, is_needed) in enumerate(made, 1)
        if not is_needed and at < NOW - AGE
    ]
    assert gone == expected + [file(99).key] * (not kept)


@pytest.mark.parametrize(
    ("sizes", "changes", "room"),
    [
        ((1000,), {}, 500),
        ((1000, 200, 100), {}, 200),
        ((1000, 300, 300), {}, 0),
        ((1000, *[1] * (LONGEST - 1)), {}, 500 - LONGEST + 1),
        ((1000, *[1] * LONGEST), {}, 0),
        ((1000,), {"kind": "adapter"}, 0),
    ],
)
def test_deltas_have_room_until_they_are_many_or_long(
    sizes: tuple[int, ...], changes: dict[str, Any], room: int
) -> None:
    assert version(*sizes, **changes).room() == room


def test_a_version_has_a_save() -> None:
    with pytest.raises(ValidationError):
        version(saves=())


def test_a_record_reads_as_it_was_written_and_damage_shows() -> None:
    made = version(1000, 10, small=(file(9),))
    assert parse(MirroredVersion, encode(made), "it") == made
    assert [one.name for one in made.files()] == [f"{n}.safetensors" for n in (9, 1, 2)]
    for damaged in (encode(made)[:-9], encode(made).replace(b'"step":2', b'"step":3')):
        with pytest.raises(RecordError):
            parse(MirroredVersion, damaged, "it")


@given(st.lists(st.integers(1, 5000), min_size=1), st.integers(1, 1000))
def test_bytes_pass_no_faster_than_the_rate(parts: list[int], limit: int) -> None:
    clock = Clock()
    begun, rate = clock(), Rate(limit, clock=clock, sleep=clock.advance)
    for number, part in enumerate(parts):
        rate.take(part, nothing)
        # All before this one have had their time, and no more.
        assert clock() - begun == pytest.approx(sum(parts[:number]) / limit)


def test_an_idle_rate_saves_nothing_up_and_none_is_no_limit() -> None:
    clock = Clock()
    rate = Rate(10, clock=clock, sleep=clock.advance)
    clock.advance(1000)
    for _ in range(3):
        rate.take(10, nothing)
    assert clock() == 1000 + 1000 + 2
    free = Rate(None, clock=clock, sleep=clock.advance)
    for _ in range(3):
        free.take(10**12, nothing)
    assert clock() == 1000 + 1000 + 2


def test_errors_show_no_signature_and_one_line() -> None:
    error = ValueError(
        "PUT https://s3/b/k?X-Amz-Signature=abc&X=d failed\n  (http://h/x?sig=e)\nretried"
        "\n\nDebug source:\nSigned { secret }"
    )
    said = _one_line(error)
    assert said == "PUT https://s3/b/k failed (http://h/x) retried"
    assert len(_one_line(ValueError("x" * 9999))) == 400
