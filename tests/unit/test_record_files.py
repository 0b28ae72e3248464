"""Records that may be missing, torn, foreign or of a newer syncd: the policy decides on each."""

import logging
from pathlib import Path

import pytest

from syncd.protocol.errors import ProtocolMismatchError
from syncd.protocol.records import encode
from syncd.protocol.requests import Pause
from syncd.storage.errnos import is_unreadable
from syncd.storage.job import (
    EXPECTED,
    IF_ANY,
    OF_OTHERS,
    SILENT,
    Job,
    ReadPolicy,
    readable_lines,
)

PAUSE = Pause(id="a", by="someone", time=1.0)
TORN = encode(PAUSE)[:-4]
NEWER = b'{"protocol": 99}'


def _read(path: Path, policy: ReadPolicy) -> Pause | None:
    return Job.at(path.parent).read(Pause, path, policy)


@pytest.mark.parametrize("policy", [EXPECTED, SILENT, OF_OTHERS, IF_ANY])
def test_every_policy_reads_a_whole_record_and_passes_over_lost_ones(
    tmp_path: Path, policy: ReadPolicy
) -> None:
    path = tmp_path / "pause.json"
    assert _read(path, policy) is None
    for content, expected in ((TORN, None), (NEWER, None), (encode(PAUSE), PAUSE)):
        path.write_bytes(content)
        assert _read(path, policy) == expected


@pytest.mark.parametrize(
    ("policy", "level"),
    [(EXPECTED, logging.WARNING), (OF_OTHERS, logging.DEBUG), (SILENT, None), (IF_ANY, None)],
)
def test_a_torn_record_is_logged_as_the_policy_says(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, policy: ReadPolicy, level: int | None
) -> None:
    caplog.set_level(logging.DEBUG, "syncd")
    path = tmp_path / "pause.json"
    path.write_bytes(TORN)
    _read(path, policy)
    assert [record.levelno for record in caplog.records] == ([level] if level else [])
    assert all(str(path) in record.getMessage() for record in caplog.records)


def test_a_link_is_an_error_unless_the_record_is_of_others(tmp_path: Path) -> None:
    path = tmp_path / "pause.json"
    path.symlink_to(tmp_path / "elsewhere")
    for policy in (EXPECTED, SILENT):
        with pytest.raises(OSError, match=r"pause\.json"):
            _read(path, policy)
    for policy in (OF_OTHERS, IF_ANY):
        assert _read(path, policy) is None


def test_a_damaged_file_is_told_apart_from_none(tmp_path: Path) -> None:
    path = tmp_path / "pause.json"
    said: list[Path] = []
    policy = ReadPolicy(damaged=is_unreadable, say=lambda path, _: said.append(path))

    def read() -> Pause | None:
        return Job.at(tmp_path).read(Pause, path, policy, unreadable=PAUSE)

    assert read() is None
    assert not said
    path.write_bytes(TORN)
    assert read() == PAUSE
    path.unlink()
    path.mkdir()
    assert read() == PAUSE
    assert said == [path, path]


def test_a_newer_record_is_an_error_if_the_policy_says_so(tmp_path: Path) -> None:
    path = tmp_path / "pause.json"
    path.write_bytes(NEWER)
    with pytest.raises(ProtocolMismatchError):
        _read(path, ReadPolicy(newer=False))


def test_lines_that_cannot_be_read_are_left_out() -> None:
    lines = [encode(PAUSE), b"", TORN, NEWER, encode(PAUSE)]
    assert list(readable_lines(Pause, lines, Path("pauses.jsonl"))) == [PAUSE, PAUSE]
