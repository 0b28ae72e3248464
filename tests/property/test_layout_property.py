"""Names, pointers and records as anyone may write them: ours or not ours, and never a crash."""

import os
import re
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from syncd.protocol import journal_lines, layout, names, records, reports
from syncd.protocol.errors import InvalidSettingsError, RecordError

QUICK = settings(max_examples=40)
#: Bytes that a file name on Linux may have.
NAMES = st.lists(st.integers(1, 255).filter(lambda byte: byte != ord("/")), max_size=255).map(bytes)
#: Names that participants may have.
OURS = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}", fullmatch=True)
#: A terminal or a reader of lines does something at these: C0, DEL, C1, bidi, other line ends.
OBEYED = re.compile("[\0-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
DIGITS = st.integers(0, 10**300).map(str) | st.sampled_from(
    ["", "00", "01", "-1", "+1", "1_0", " 1", "1\n", "\u0663", "\uff11", "1.0", "1e3", "9" * 5000]
)
NEARLY = st.one_of(
    DIGITS.map("global_step_{}".format),
    DIGITS.map("v{}".format),
    DIGITS.map("v00000{}".format),
    st.builds("model_world_size_{}_rank_{}.pt".format, DIGITS, DIGITS),
    st.builds("run-{}-{}".format, DIGITS, DIGITS),
    st.builds("{}.{}".format, DIGITS, DIGITS),
    st.text(max_size=30),
    NAMES.map(os.fsdecode),
)
MODELS = [
    model
    for module in (journal_lines, records, reports)
    for model in vars(module).values()
    if isinstance(model, type)
    and issubclass(model, records.Record)
    and model.__module__ == module.__name__
]
NUMBERS = st.integers() | st.integers(0, 10**400) | st.floats() | DIGITS
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(st.characters(), max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


def as_json(value: object) -> str:
    """JSON as nobody should write it: NaN, numbers of any length, half surrogates."""
    match value:
        case dict():
            return "{" + ",".join(f"{as_json(str(k))}:{as_json(v)}" for k, v in value.items()) + "}"
        case list():
            return "[" + ",".join(map(as_json, value)) + "]"
        case str():
            return '"' + "".join(f"\\u{ord(c) & 0xFFFF:04x}" for c in value) + '"'
        case bool() | None:
            return str(value).lower().replace("none", "null")
        case _:
            return str(value)


@QUICK
@given(NEARLY)
def test_a_name_is_one_of_ours_exactly_as_we_write_it_or_none(name: str) -> None:
    step, version = names.parse_step_folder(name), names.parse_version_folder(name)
    assert step is None or names.step_folder(step) == name
    assert version is None or names.version_folder(version) == name
    shard, marker = names.parse_shard_name(name), names.parse_lease_marker(name)
    assert shard is None or names.shard_name(*shard) == name
    assert marker is None or names.lease_marker(*marker) == name
    save_id = records.SaveId.parse(name)
    assert save_id is None or str(save_id) == name
    assert names.is_resumable_state(f"optim_{name}")


@QUICK
@given(NEARLY)
def test_what_is_ours_of_a_name_is_one_component_below_the_job(name: str) -> None:
    job = layout.JobLayout(Path("/job"))
    found = [
        job.step(step) if (step := names.parse_step_folder(name)) is not None else None,
        job.version(number) if (number := names.parse_version_folder(name)) else None,
        job.lease_folder(1) / name if names.parse_lease_marker(name) else None,
    ]
    for path in found:
        assert path is None or os.path.normpath(path) == str(path)


@QUICK
@given(st.integers(0, 10**18 - 1), st.integers(0, 10**18 - 1))
@example(999_999, 1_000_000)
@example(1_000_000, 999_999)
def test_what_we_name_is_read_back(number: int, other: int) -> None:
    assert names.parse_step_folder(names.step_folder(number)) == number
    assert names.parse_version_folder(names.version_folder(number)) == number
    assert names.parse_delta_folder(names.delta_folder(number)) == number
    save_id = records.SaveId("run", number, other)
    assert records.SaveId.parse(str(save_id)) == save_id


@QUICK
@given(DIGITS.map(str.encode) | st.binary(max_size=60) | st.text(max_size=20).map(str.encode))
def test_a_pointer_is_a_step_or_nothing_yet(content: bytes) -> None:
    step = names.parse_pointer(content)
    assert step is None or (step == int(content) and abs(step) < 10**18)


@QUICK
@given(st.integers(-(10**18) + 1, 10**18 - 1), st.sampled_from([b"", b"\n", b"\r\n", b" \n"]))
def test_a_pointer_reads_back_as_it_was_written(step: int, end: bytes) -> None:
    assert names.parse_pointer(str(step).encode() + end) == step


@QUICK
@given(OURS, OURS)
def test_a_lease_marker_gives_back_name_and_session(name: str, session: str) -> None:
    assert names.parse_lease_marker(names.lease_marker(name, session)) == (name, session)


@QUICK
@given(st.text(max_size=80))
def test_any_text_is_a_name_that_stays_one_path_component_or_is_refused(text: str) -> None:
    try:
        name = names.checked_name(text, "it")
    except InvalidSettingsError:
        return
    assert name == text
    assert "/" not in name
    assert not name.startswith((".", "-"))
    assert 1 <= len(name.encode()) <= 64


@QUICK
@given(NEARLY)
def test_a_name_is_shown_on_one_line_that_any_terminal_can_take(name: str) -> None:
    shown = names.printable(name)
    assert not OBEYED.search(shown)
    shown.encode()  # it can be written
    assert not name.isprintable() or shown == name


each_model = pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)


@each_model
@settings(max_examples=25)
@given(data=st.data())
def test_any_values_in_the_fields_of_a_record_are_a_record_or_a_record_error(
    model: type[records.Record], data: st.DataObject
) -> None:
    keys = st.sampled_from(sorted(model.model_fields)) | st.text(max_size=5)
    fields = data.draw(st.lists(st.tuples(keys, VALUES), max_size=8))  # keys may come twice
    content = "{" + ",".join(f"{as_json(key)}:{as_json(value)}" for key, value in fields) + "}"
    try:
        record = records.parse(model, content.encode(), "it")
    except RecordError as error:
        said = str(error)
    else:
        said = ""
        assert records.parse(model, records.encode(record), "it") == record
    assert not OBEYED.search(said)
    assert len(said) < 1000


@each_model
@pytest.mark.parametrize(
    "content",
    [b"[" * 10_000 + b"]" * 10_000, b'{"protocol":' * 10_000,
     b'{"x":' * 10_000 + b"1" + b"}" * 10_000,
     b'{"protocol":1' + b"0" * 30 + b"}", b'{"protocol":1' + b"0" * 4000 + b"}",
     b'{"protocol":1' + b"0" * 9000 + b"}", b"\0" * 10_000],
    ids=["nested", "torn", "deep", "10**30", "10**4000", "10**9000", "holes"],
)  # fmt: skip
def test_a_record_that_is_made_to_break_its_reader_is_a_record_error(
    model: type[records.Record], content: bytes
) -> None:
    with pytest.raises(RecordError) as raised:
        records.parse(model, content, "it")
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize("mistake", [b"1", b"{}"])
@pytest.mark.parametrize(
    ("model", "rest"),
    [(records.Receipt, b'"save_id":"x","step":1,"rank":0,"world_size":1'),
     (records.Manifest, b'"sequence":1,"step":1,"save_id":"x","checked":"crc32","digests":"off",'
                        b'"tensors":[]')],
)  # fmt: skip
def test_a_record_of_nothing_but_mistakes_costs_no_memory_for_each(
    model: type[records.Record], rest: bytes, mistake: bytes
) -> None:
    content = b'{"files":[' + b",".join([mistake] * 100_000) + b"]," + rest + b"}"
    tracemalloc.start()
    try:
        with pytest.raises(RecordError, match=r"files\.0"):
            records.parse(model, content, "it")
        assert tracemalloc.get_traced_memory()[1] < 4 * 1024**2
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("step", ["-1", "1" + "0" * 300])
def test_a_step_that_no_folder_can_be_named_after_is_not_on_record(step: str) -> None:
    outcome = '{"identity":"x","outcome":"published"}'
    with pytest.raises(RecordError):
        records.parse(
            records.SaveOutcomes, f'{{"steps":{{"{step}":{outcome}}}}}'.encode(), "saves.json"
        )
