import json
import math
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import JsonValue

from syncd.protocol import records, reports
from syncd.protocol.errors import RecordError

TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
NAMES = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}", fullmatch=True)
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
#: What the validators of some fields take.
VALIDATED = {records._stays_inside: PATHS, records._names_a_heartbeat: NAMES}


def branches(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3)


#: What a JSON record can hold and give back as it was.
FINITE_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(0, 2**63 - 1) | FINITE | TEXT, branches, max_leaves=8
)


def drawn(kind: Any) -> st.SearchStrategy[Any]:
    """Values that a field of this type may have, by its limits."""
    whole, *about = get_args(kind) if get_origin(kind) is Annotated else (kind,)
    limits = [limit for field in about for limit in getattr(field, "metadata", ())]
    for field in (*about, *limits):
        if (validator := getattr(field, "func", None)) in VALIDATED:
            return VALIDATED[validator]
        if pattern := getattr(field, "pattern", None):
            return st.from_regex(pattern.rstrip("$"), fullmatch=True)
    inner = get_args(whole)
    composed = {
        Literal: lambda: st.sampled_from(inner),
        Union: lambda: st.one_of(map(drawn, inner)),
        UnionType: lambda: st.one_of(map(drawn, inner)),
        dict: lambda: st.dictionaries(*map(drawn, inner), max_size=3),
        tuple: lambda: _tuples(*inner, min_size=len(limits)),
    }
    if make := composed.get(get_origin(whole)):
        return make()
    if getattr(whole, "__module__", "").startswith("syncd."):
        return made(whole, whole)
    simple = Annotated[whole, *limits] if limits else whole
    values = FINITE_JSON if whole is JsonValue else st.from_type(simple)
    return values.filter(math.isfinite) if whole is float else values


def _tuples(first: Any, second: Any, *, min_size: int) -> st.SearchStrategy[Any]:
    """Of two values, or of any number of values of one type."""
    if second is not ...:
        return st.tuples(drawn(first), drawn(second))
    return st.lists(drawn(first), min_size=min_size, max_size=3).map(tuple)


def made(model: Any, build: Any, **instead: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """What is built of all fields of a model."""
    hints = get_type_hints(model, include_extras=True)
    fields = {
        name: drawn(hints[name])
        for name in getattr(model, "model_fields", hints)
        if name != "protocol"
    }
    return st.builds(build, **fields | instead)


def rendezvous(members: list[tuple[str, str, int]]) -> dict[str, Any]:
    """The members of a weight group, by name, session and workers, and how many ranks it has."""
    told, rank = [], 1
    for name, session, workers in members:
        told.append(
            reports.GroupMember(name=name, session=session, rank_offset=rank, workers=workers)
        )
        rank += workers
    return {"members": tuple(told), "world_size": rank}


def manifest(
    files: tuple[records.VersionFile, ...], tensors: tuple[records.TensorEntry, ...], **rest: Any
) -> records.Manifest:
    """A manifest that also lists the files of its tensors."""
    named = (records.VersionFile(name=tensor.file, size=0) for tensor in tensors)
    return records.Manifest(files=(*files, *named), tensors=tensors, **rest)


#: Others than the protocol's are messages, which are on disk for seconds.
RECORDS: dict[type[records.Record], st.SearchStrategy[Any]] = {
    model: made(model, model)
    for model in records.Record.__subclasses__()
    if "protocol" in model.__module__
}
RECORDS[records.Manifest] = made(
    records.Manifest, manifest, kind=st.sampled_from(["full", "adapter"]), remote=st.none()
)
RECORDS[reports.Rendezvous] = made(
    reports.Rendezvous,
    lambda members, **rest: reports.Rendezvous(**rest | rendezvous(members)),
    members=st.lists(st.tuples(TEXT, TEXT, st.integers(1, 8)), max_size=3),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT, branches, max_leaves=8
)


each_model = pytest.mark.parametrize("model", RECORDS, ids=lambda model: model.__name__)


@each_model
@given(data=st.data())
@settings(max_examples=20)
def test_a_record_reads_back_as_it_was_written(
    model: type[records.Record], data: st.DataObject
) -> None:
    record = data.draw(RECORDS[model])
    assert records.parse(model, records.encode(record), "it") == record


@each_model
@given(content=st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
@settings(max_examples=20)
def test_any_bytes_are_a_record_or_a_record_error(
    model: type[records.Record], content: bytes
) -> None:
    try:
        record = records.parse(model, content, "it")
    except RecordError:
        return
    assert isinstance(record, model)


@given(data=st.data(), cut=st.integers(0, 400), flip=st.integers(0, 255))
def test_a_damaged_record_is_an_error_or_reads_as_it_was_written(
    data: st.DataObject, cut: int, flip: int
) -> None:
    model = data.draw(st.sampled_from(sorted(RECORDS, key=lambda model: model.__name__)))
    record = data.draw(RECORDS[model])
    content = bytearray(records.encode(record))
    at = cut % len(content)
    content[at] ^= flip
    for damaged in (bytes(content), bytes(content[:at])):
        try:
            assert records.parse(model, damaged, "it") == record
        except RecordError:
            pass
