import json

import pydantic
import pytest

from syncd.protocol.errors import ProtocolMismatchError, RecordError
from syncd.protocol.records import (
    PROTOCOL,
    Format,
    Latest,
    Manifest,
    Receipt,
    ReceiptFile,
    Record,
    SaveId,
    VersionFile,
    encode,
    parse,
)
from syncd.protocol.reports import (
    DaemonReport,
    ExplorerReport,
    GroupMember,
    Rendezvous,
    TrainerReport,
)

LATEST = Latest(sequence=17, step=4, folder="v000017", save_id="run-4-0")


def test_a_record_is_one_line() -> None:
    assert encode(LATEST).endswith(b"}\n")
    assert encode(LATEST).count(b"\n") == 1


def test_keys_of_a_later_minor_change_are_passed_over() -> None:
    content = encode(LATEST).replace(b"}", b', "added_later": [1]}', 1)
    assert parse(Latest, content, "LATEST") == LATEST


REPORTED = {"session": "s", "status": "running", "time": 0.0}
#: Records, and keys of them that have other names in the code.
KEYS: dict[type[Record], tuple[dict[str, object], dict[str, object]]] = {
    Latest: (
        LATEST.model_dump(exclude_none=True),
        {"ahead": {"sequence": 18, "step": 5, "save_id": "run-5-0"}, "closed": "why"},
    ),
    ExplorerReport: ({"name": "e", "sequence": 17, **REPORTED}, {"follows_ahead": True}),
    TrainerReport: ({"run_id": "r", "world_size": 1, **REPORTED}, {"no_links": "why"}),
    DaemonReport: (
        {"session": "s", "host": "h", "pid": 1, "epoch": 1, "state": "stopped", "time": 0.0,
         "builds": {"max_shard_size": 1, "digests": True, "tick": 1.0}},
        {"links": True, "no_links": "why"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KEYS, ids=lambda kind: kind.__name__)
def test_keys_on_disk_stay_those_of_0_3(kind: type[Record]) -> None:
    usual, keys = KEYS[kind]
    record, without = (parse(kind, json.dumps(one).encode(), "") for one in (usual | keys, usual))
    changed = {name for name, value in record if value != getattr(without, name)}
    assert len(changed) == len(keys)
    assert json.loads(encode(record)).items() >= keys.items()


def test_a_newer_protocol_says_install_the_newer_syncd() -> None:
    newer = LATEST.model_copy(update={"protocol": PROTOCOL + 1})
    with pytest.raises(ProtocolMismatchError, match="install the newer syncd") as raised:
        parse(Latest, encode(newer), "job/LATEST")
    assert "job/LATEST" in str(raised.value)


def test_a_newer_protocol_of_another_shape_is_not_taken_for_a_broken_record() -> None:
    content = b'{"protocol": 2, "sequence": 9, "kind": "delta", "base": 8}'
    with pytest.raises(ProtocolMismatchError):
        parse(Latest, content, "LATEST")


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"null", b"[]", b"17", b'{"sequence": 1}', b"\xff\xfe", b"\x00" * 64,
     b'{"sequence":0,"step":1,"folder":"v000001"}', b'{"sequence":1,"step":-1,"folder":"v000001"}',
     b'{"sequence":1,"step":1,"folder":"../v000001"}', b'{"protocol":"x"}',
     b'{"sequence":99999999999999999999,"step":1,"folder":"v000001"}'],
)  # fmt: skip
def test_anything_else_is_a_record_error_that_names_the_file(content: bytes) -> None:
    with pytest.raises(RecordError, match=r"job/LATEST is not a valid latest record") as raised:
        parse(Latest, content, "job/LATEST")
    assert not isinstance(raised.value, ProtocolMismatchError)


@pytest.mark.parametrize("cut", range(1, 40))
def test_a_torn_record_is_a_record_error(cut: int) -> None:
    content = encode(LATEST)
    with pytest.raises(RecordError):
        parse(Latest, content[: -1 - cut], "LATEST")


@pytest.mark.parametrize("lease_time", ["0", "-1", "1e-300", "0.049", "1e400", "NaN", "3601"])
def test_a_lease_time_that_nobody_can_keep_is_refused_by_name(lease_time: str) -> None:
    with pytest.raises(RecordError, match=r"format\.json .*lease_time"):
        parse(Format, f'{{"lease_time": {lease_time}}}'.encode(), "format.json")


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../x", "a/../b", "a//b", "./a", "a\nb", "a/"])
def test_a_file_of_a_version_stays_inside_its_folder(name: str) -> None:
    with pytest.raises(pydantic.ValidationError):
        VersionFile(name=name, size=1)
    with pytest.raises(pydantic.ValidationError):
        ReceiptFile(name=name, size=1, digest="0" * 32, over="content")


def test_nothing_is_written_of_what_is_not_known() -> None:
    report = ExplorerReport(name="e", session="s", status="running", time=1.0)
    assert b"refused" not in encode(report)
    assert parse(ExplorerReport, encode(report), "e.json") == report


def test_a_receipt_needs_a_save_id() -> None:
    with pytest.raises(pydantic.ValidationError):
        Receipt(save_id="", step=1, rank=0, world_size=1, files=())


@pytest.mark.parametrize("kind", [Manifest, Receipt])
def test_a_record_of_another_step_than_its_saves_is_refused(kind: type[Record]) -> None:
    content = b'{"sequence":1,"step":%d,"save_id":"run-4-0","checked":"receipt","digests":"off",'
    content += b'"rank":0,"world_size":1,"files":[],"tensors":[]}'
    parse(kind, content % 4, "it")
    with pytest.raises(RecordError, match="step is 5, but save_id names step 4"):
        parse(kind, content % 5, "it")


def test_a_save_id_reads_back_as_it_was_written() -> None:
    save_id = SaveId("ab12", 300, 7)
    assert SaveId.parse(str(save_id)) == save_id


@pytest.mark.parametrize("text", ["", "run", "run-1", "run-1-", "run-x-1", "-1-2", "run-1-2-3"])
def test_another_text_is_no_save_id(text: str) -> None:
    assert SaveId.parse(text) is None


def test_only_a_later_save_of_the_same_run_is_newer() -> None:
    save = SaveId("a", 5, 3)
    assert SaveId("a", 2, 4).is_newer_than(save)
    assert not SaveId("a", 9, 3).is_newer_than(save)
    assert not SaveId("b", 9, 9).is_newer_than(save)


def group(*members: tuple[int, int], world_size: int) -> Rendezvous:
    return Rendezvous(
        offer="0" * 12,
        generation=1,
        group_name="g",
        address="127.0.0.1",
        port=1,
        world_size=world_size,
        backend="gloo",
        members=tuple(
            GroupMember(name=f"e{rank}", session="s", rank_offset=rank, workers=workers)
            for rank, workers in members
        ),
        save_id="run-1-1",
    )


def test_the_ranks_of_a_weight_group_are_each_somebodys_once() -> None:
    assert group((1, 2), (3, 1), world_size=4).members[1].rank_offset == 3
    for members, world_size in ([(1, 2), (2, 1)], 4), ([(1, 1), (3, 1)], 4), ([(1, 1)], 3):
        with pytest.raises(pydantic.ValidationError, match="rank"):
            group(*members, world_size=world_size)
    with pytest.raises(pydantic.ValidationError):
        group((1, 0), world_size=1)
