from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncd.protocol import journal_lines, participants, records, reports, requests, tensor_names
from syncd.protocol.errors import RecordError

NUMBERS = st.integers(min_value=0, max_value=2**63 - 1)
SEQUENCES = st.integers(min_value=1, max_value=2**63 - 1)
TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
NAMES = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}", fullmatch=True)
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
DIGESTS = st.from_regex(r"[0-9a-f]{32}", fullmatch=True)
TIMES = st.floats(allow_nan=False, allow_infinity=False)

VERSION_FILES = st.builds(records.VersionFile, name=PATHS, size=NUMBERS, digest=st.none() | DIGESTS)
TENSORS = st.builds(
    records.TensorEntry,
    name=TEXT,
    dtype=TEXT,
    shape=st.lists(NUMBERS, max_size=3).map(tuple),
    file=PATHS,
    digest=st.none() | DIGESTS,
)
NON_FINITE = st.none() | st.builds(
    records.NonFinite, count=NUMBERS, names=st.lists(TEXT, max_size=3).map(tuple)
)
RECEIPT_FILES = st.builds(
    records.ReceiptFile,
    name=PATHS,
    size=NUMBERS,
    digest=DIGESTS,
    over=st.sampled_from(["central-directory", "header", "content"]),
    nonfinite=NON_FINITE,
)
ROLLED_BACK = st.builds(
    records.RolledBack, sequence=SEQUENCES, instead_of=st.none() | TEXT, request=TEXT
)
ADAPTED_MODELS = st.builds(records.AdaptedModel, name=TEXT.filter(bool), revision=st.none() | TEXT)
MAPPED_TENSORS = st.builds(
    tensor_names.MappedTensor,
    shape=st.lists(NUMBERS, max_size=3).map(tuple),
    pieces=st.lists(
        st.builds(
            tensor_names.HubPiece,
            name=TEXT.filter(bool),
            first=st.none() | NUMBERS,
            rows=st.none() | st.tuples(NUMBERS, NUMBERS),
            transposed=st.booleans(),
            at=st.none() | NUMBERS,
        ),
        min_size=1,
        max_size=3,
    ).map(tuple),
)
DELTA_ENDS = st.builds(records.DeltaEnd, sequence=SEQUENCES, save_id=TEXT, content=DIGESTS)
OUTCOMES = st.builds(
    records.SaveOutcome,
    identity=TEXT,
    outcome=st.sampled_from(["published", "skipped", "quarantined"]),
    sequence=st.none() | SEQUENCES,
)
TERMS = st.builds(
    reports.SyncTerms,
    style=st.sampled_from(["fixed", "explorer_driven"]),
    trainer_interval=NUMBERS,
    explorer_interval=NUMBERS,
)
MEMBERS = st.builds(participants.OfferedMember, name=TEXT, session=TEXT, workers=st.integers(1, 8))


def rendezvous(members: list[tuple[str, str, int]]) -> dict[str, Any]:
    """The members of a weight group, by name, session and workers, and how many ranks it has."""
    told, rank = [], 1
    for name, session, workers in members:
        told.append(
            participants.GroupMember(name=name, session=session, rank_offset=rank, workers=workers)
        )
        rank += workers
    return {"members": tuple(told), "world_size": rank}


def manifest(
    files: tuple[records.VersionFile, ...], tensors: tuple[records.TensorEntry, ...], **rest: Any
) -> records.Manifest:
    """A manifest that also lists the files of its tensors."""
    named = (records.VersionFile(name=tensor.file, size=0) for tensor in tensors)
    return records.Manifest(files=(*files, *named), tensors=tensors, **rest)


def branches(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3)


#: What a JSON record can hold and give back as it was.
FINITE_JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TIMES | TEXT, branches, max_leaves=8
)
LOADS = st.builds(
    reports.Load,
    sequence=SEQUENCES,
    time=TIMES,
    pause=st.none() | st.floats(0, 1e6),
    delta_bytes=st.none() | NUMBERS,
)
DTYPES = st.sampled_from(["BF16", "F8_E4M3, BF16"])
RECORDS: dict[type[records.Record], st.SearchStrategy[Any]] = {
    records.Format: st.builds(records.Format, lease_time=st.floats(0.05, 3600)),
    records.Latest: st.builds(
        records.Latest,
        sequence=SEQUENCES,
        step=NUMBERS,
        folder=st.from_regex(r"v[0-9]{6,18}", fullmatch=True),
        delta_from=st.none() | SEQUENCES,
    ),
    records.Manifest: st.builds(
        manifest,
        sequence=NUMBERS,
        step=NUMBERS,
        save_id=TEXT,
        checked=st.sampled_from(["receipt", "crc32", "stillness"]),
        digests=st.sampled_from(["xxh3-128", "off"]),
        files=st.lists(VERSION_FILES, max_size=3).map(tuple),
        tensors=st.lists(TENSORS, max_size=3).map(tuple),
        base_model=st.none() | ADAPTED_MODELS,
        dtype=st.none() | DTYPES,
        rolled_back=st.none() | ROLLED_BACK,
        nonfinite=NON_FINITE,
        timings=st.dictionaries(TEXT, TIMES, max_size=2),
    ),
    records.Delta: st.builds(
        records.Delta,
        base=DELTA_ENDS,
        target=DELTA_ENDS,
        files=st.lists(VERSION_FILES, max_size=3).map(tuple),
        changed=NUMBERS,
        elements=NUMBERS,
    ),
    records.Receipt: st.builds(
        records.Receipt,
        save_id=st.text(st.characters(codec="utf-8"), min_size=1, max_size=200),
        step=NUMBERS,
        rank=NUMBERS,
        world_size=SEQUENCES,
        files=st.lists(RECEIPT_FILES, max_size=3).map(tuple),
        sync_dtype=st.sampled_from([None, "bf16", "fp16"]),
    ),
    tensor_names.NameMapRecord: st.builds(
        tensor_names.NameMapRecord,
        tensors=st.dictionaries(TEXT, MAPPED_TENSORS, max_size=3),
        refused=st.none() | TEXT,
    ),
    records.SaveOutcomes: st.builds(
        records.SaveOutcomes, steps=st.dictionaries(NUMBERS, OUTCOMES, max_size=3)
    ),
    records.Quarantine: st.builds(
        records.Quarantine, step=NUMBERS, identity=TEXT, error=TEXT, reason=TEXT, time=TIMES
    ),
    reports.ExplorerReport: st.builds(
        reports.ExplorerReport,
        name=TEXT,
        session=NAMES,
        status=st.sampled_from(["running", "require_sync", "stopped"]),
        sequence=st.none() | SEQUENCES,
        step=st.none() | NUMBERS,
        nothing_new=NUMBERS,
        refused=st.none() | TEXT,
        requests=NUMBERS,
        joined=st.none() | TEXT,
        loads=st.none() | st.lists(LOADS, max_size=3).map(tuple),
        bench=st.none() | NUMBERS,
        sync=st.none() | TERMS,
        delta_base=st.none() | SEQUENCES,
        stage=st.none() | TEXT,
        hub_names=st.booleans(),
        time=TIMES,
    ),
    reports.TrainerReport: st.builds(
        reports.TrainerReport,
        run_id=TEXT,
        world_size=SEQUENCES,
        status=st.sampled_from(["running", "require_sync", "stopped"]),
        step=st.none() | NUMBERS,
        name=st.none() | TEXT,
        session=st.none() | NAMES,
        nothing_new=NUMBERS,
        sync=st.none() | TERMS,
        time=TIMES,
    ),
    reports.DaemonReport: st.builds(
        reports.DaemonReport,
        session=NAMES,
        host=TEXT,
        pid=NUMBERS,
        epoch=NUMBERS,
        state=st.sampled_from(["watching", "merging", "stopped"]),
        detail=TEXT,
        sequence=st.none() | SEQUENCES,
        step=st.none() | NUMBERS,
        paused=st.none() | TEXT,
        memory_dir=st.none() | TEXT,
        builds=st.none()
        | st.builds(
            reports.BuildSettings,
            cast=st.sampled_from([None, "bf16", "fp16", "fp32"]),
            names=st.sampled_from([None, "hub", "trainer"]),
            dcp_prefix=st.none() | TEXT,
            max_shard_size=NUMBERS,
            digests=st.booleans(),
            tick=st.floats(0, 60),
        ),
        counters=st.builds(reports.DaemonCounters, published=NUMBERS, merged_bytes=NUMBERS),
        time=TIMES,
    ),
    reports.DeltaProgress: st.builds(
        reports.DeltaProgress,
        sequence=SEQUENCES,
        base=SEQUENCES,
        state=st.sampled_from(["making", "made", "none"]),
        done=NUMBERS,
        total=NUMBERS,
        seconds=st.none() | st.floats(0, 1e6),
        why=st.none() | TEXT,
        time=TIMES,
    ),
    records.PublishNotice: st.builds(
        records.PublishNotice, sequence=SEQUENCES, step=NUMBERS, session=TEXT
    ),
    journal_lines.AuditLine: st.builds(
        journal_lines.AuditLine,
        time=TIMES,
        what=st.sampled_from(["version", "step", "lease", "delta"]),
        name=TEXT,
        why=TEXT,
        session=TEXT,
    ),
    participants.Claim: st.builds(
        participants.Claim, session=TEXT, name=st.none() | TEXT, process=TEXT
    ),
    participants.Offer: st.builds(
        participants.Offer,
        offer=st.from_regex(r"[0-9a-f]{12}", fullmatch=True),
        session=TEXT,
        step=NUMBERS,
        members=st.lists(MEMBERS, max_size=3).map(tuple),
        decided=st.sampled_from([None, "go", "off", "files"]),
    ),
    participants.Rendezvous: st.builds(
        lambda ranks, **told: participants.Rendezvous(**ranks, **told),
        st.lists(st.tuples(TEXT, TEXT, st.integers(1, 8)), max_size=3).map(rendezvous),
        offer=st.from_regex(r"[0-9a-f]{12}", fullmatch=True),
        generation=SEQUENCES,
        group_name=TEXT.filter(bool),
        address=TEXT.filter(bool),
        port=st.integers(1, 65535),
        backend=st.sampled_from(["nccl", "gloo"]),
        save_id=TEXT.filter(bool),
    ),
    participants.OfferVerdict: st.builds(
        participants.OfferVerdict, verdict=st.sampled_from(["go", "off"]), session=TEXT
    ),
    participants.SavedState: st.builds(
        participants.SavedState,
        iteration=NUMBERS,
        state=st.dictionaries(TEXT, FINITE_JSON, max_size=3),
    ),
    journal_lines.JournalLine: st.builds(
        journal_lines.JournalLine,
        time=TIMES,
        event=st.sampled_from(["active", "published", "live", "skipped", "delta", "no_delta"]),
        changed=st.none() | st.floats(0, 1),
        delta_bytes=st.none() | NUMBERS,
        version=st.none() | SEQUENCES,
        step=st.none() | NUMBERS,
        kind=st.sampled_from([None, "full", "adapter", "remote"]),
        bytes=st.none() | NUMBERS,
        seconds=st.none() | st.floats(0, 1e6),
        pause=st.none() | st.floats(0, 1e6),
        explorer=st.none() | TEXT,
        why=st.none() | TEXT,
    ),
    requests.Pause: st.builds(requests.Pause, id=TEXT, by=TEXT, time=TIMES),
    requests.RollbackRequest: st.builds(
        requests.RollbackRequest,
        id=TEXT,
        sequence=SEQUENCES,
        by=TEXT,
        time=TIMES,
        outcome=st.sampled_from(["asked", "done", "refused"]),
        made=st.none() | SEQUENCES,
        why=TEXT,
    ),
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT, branches, max_leaves=8
)


def test_every_record_of_the_protocol_is_tried_here() -> None:
    # Others have messages of their own, which are on disk for seconds.
    found = {one for one in records.Record.__subclasses__() if "protocol" in one.__module__}
    assert set(RECORDS) == found


@pytest.mark.parametrize("model", RECORDS, ids=lambda model: model.__name__)
@given(data=st.data())
@settings(max_examples=20)
def test_a_record_reads_back_as_it_was_written(
    model: type[records.Record], data: st.DataObject
) -> None:
    record = data.draw(RECORDS[model])
    assert records.parse(model, records.encode(record), "it") == record


@pytest.mark.parametrize("model", RECORDS, ids=lambda model: model.__name__)
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
def test_a_damaged_record_is_a_record_or_a_record_error(
    data: st.DataObject, cut: int, flip: int
) -> None:
    model = data.draw(st.sampled_from(sorted(RECORDS, key=lambda model: model.__name__)))
    content = bytearray(records.encode(data.draw(RECORDS[model])))
    at = cut % len(content)
    content[at] ^= flip
    for damaged in (bytes(content), bytes(content[:at])):
        try:
            records.parse(model, damaged, "it")
        except RecordError:
            pass
