"""Saves of whole tensors: the daemon publishes the ranks' files themselves."""

import errno
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

import pytest
import torch
import xxhash
from torch import Tensor

from syncd.checkpoint.build import build_model_folder
from syncd.checkpoint.merging.options import MergeOptions, Work
from syncd.checkpoint.model_folder import INDEX
from syncd.checkpoint.safetensors_file import DIGESTS
from syncd.checkpoint.safetensors_header import HeaderEntry, header_bytes
from syncd.checkpoint.save import look_at_save
from syncd.checkpoint.tensor_rules import DTYPES, Cast
from syncd.checkpoint.version import verify_version
from syncd.protocol.names import HUGGINGFACE, NAME_MAP, RECEIPTS, part_name, receipt_name
from syncd.protocol.records import Manifest, Names, Receipt, ReceiptFile, encode
from syncd.storage.fsio import Storage
from tests.jobs import flip, nothing, read
from tests.merging import STORAGE, assert_equal, loaded
from tests.refusals import malformed, no_checkpoint, uncovered, unverified
from tests.storages import RuledStorage, refuse

PARTS: list[dict[str, Tensor]] = [
    {"b": torch.arange(5000.0), "scale": torch.tensor(2.5)},
    {"a": torch.ones(3, 4, dtype=torch.bfloat16), "none": torch.empty(0, 2)},
    {},
]


def put(folder: Path, parts: list[dict[str, Tensor]] = PARTS, *, said: bool = True) -> list[Path]:
    """A whole save of these parts, as a rank each writes them."""
    actor = folder / "actor"
    (actor / RECEIPTS).mkdir(parents=True)
    paths = []
    for rank, tensors in enumerate(parts):
        path = actor / part_name(len(parts), rank)
        file = _write(path, tensors, said=said)
        receipt = Receipt(
            save_id="run-1-0", step=1, rank=rank, world_size=len(parts), files=(file,)
        )
        (actor / RECEIPTS / receipt_name(rank)).write_bytes(encode(receipt))
        paths.append(path)
    return paths


def _write(path: Path, tensors: Mapping[str, Tensor], *, said: bool) -> ReceiptFile:
    at, entries, contents = 0, [], []
    for name, tensor in tensors.items():
        content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        dtype = DTYPES[str(tensor.dtype).removeprefix("torch.")][0]
        entries.append(HeaderEntry(name, dtype, tuple(tensor.shape), at, at + len(content)))
        contents.append(content)
        at += len(content)
    digests = "".join(map(xxhash.xxh3_128_hexdigest, contents))
    header = header_bytes(entries, {DIGESTS: digests} if said else None)
    path.write_bytes(header + b"".join(contents))
    digest = xxhash.xxh3_128_hexdigest(header)
    return ReceiptFile(name=path.name, size=path.stat().st_size, digest=digest, over="header")


def publish(
    folder: Path,
    name: str = "out",
    *,
    storage: Storage = STORAGE,
    cast: Cast | None = None,
    names: Names = "trainer",
) -> Manifest:
    actor, out = folder / "actor", folder / name
    out.mkdir()
    return build_model_folder(
        storage,
        actor,
        look_at_save(storage, actor, 1),
        out,
        options=MergeOptions(cast=cast, names=names),
        work=Work(nothing),
        sequence=1,
    )


def test_the_ranks_files_become_the_versions_files(tmp_path: Path) -> None:
    paths = put(tmp_path)
    manifest = publish(tmp_path)
    for path in paths:
        assert (tmp_path / "out" / path.name).stat().st_ino == path.stat().st_ino
    everything = PARTS[0] | PARTS[1]
    assert_equal(loaded(tmp_path / "out"), everything)
    index = json.loads((tmp_path / "out" / INDEX).read_bytes())
    assert index["weight_map"].keys() == everything.keys()
    assert index["metadata"]["total_size"] == sum(one.nbytes for one in everything.values())
    verify_version(STORAGE, tmp_path / "out", manifest)  # the digests are those of the bytes


def test_no_tensor_is_read_to_publish_it(tmp_path: Path) -> None:
    paths = put(tmp_path)
    for path in paths:
        header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
        os.truncate(path, header)  # a hole in place of the tensors
        os.truncate(path, header + sum(one.nbytes for one in PARTS[paths.index(path)].values()))
    manifest = publish(tmp_path)
    with unverified("digest"):
        verify_version(STORAGE, tmp_path / "out", manifest)


def test_no_function_of_the_merge_is_entered(tmp_path: Path) -> None:
    put(tmp_path)
    entered = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.parent.name == "merging" and path.name != "options.py":
            entered.add((path.name, frame.f_code.co_name))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        publish(tmp_path)
        assert not entered
        publish(tmp_path, "cast", cast="bf16")
    finally:
        sys.setprofile(before)
    assert ("plan.py", "plan_merge") in entered


def test_a_part_gets_the_names_of_the_hub_if_they_are_asked_for(tmp_path: Path) -> None:
    actor = tmp_path / "actor"
    put(tmp_path)
    (actor / HUGGINGFACE).mkdir()
    names = {"tensors": {"b": {"shape": [5000], "pieces": [{"name": "hub.b"}]}}}
    content = json.dumps(names).encode()
    (actor / HUGGINGFACE / NAME_MAP).write_bytes(content)
    path = actor / RECEIPTS / receipt_name(0)
    receipt = read(Receipt, path)
    digest = xxhash.xxh3_128_hexdigest(content)
    listed = ReceiptFile(
        name=f"{HUGGINGFACE}/{NAME_MAP}", size=len(content), digest=digest, over="content"
    )
    path.write_bytes(encode(receipt.model_copy(update={"files": (*receipt.files, listed)})))
    publish(tmp_path, names="hub")
    found = loaded(tmp_path / "out")
    assert found.keys() == {"hub.b", "scale", "a", "none"}
    assert torch.equal(found["hub.b"], PARTS[0]["b"])


def test_a_single_file_needs_no_index(tmp_path: Path) -> None:
    put(tmp_path, PARTS[:1])
    manifest = publish(tmp_path)
    assert [file.name for file in manifest.files] == ["model.safetensors"]


@pytest.mark.parametrize("said", [True, False], ids=["digests", "no digests"])
def test_parts_are_copied_where_links_cannot_be_had(tmp_path: Path, *, said: bool) -> None:
    paths = put(tmp_path, said=said)
    manifest = publish(tmp_path, storage=RuledStorage(refuse("link", errno.EPERM)))
    assert (tmp_path / "out" / paths[0].name).stat().st_ino != paths[0].stat().st_ino
    verify_version(STORAGE, tmp_path / "out", manifest)


def test_a_copy_that_is_not_what_was_written_is_not_published(tmp_path: Path) -> None:
    flip(put(tmp_path)[0], -2)
    storage = RuledStorage(refuse("link", errno.EPERM))
    with malformed(r"model-00001-of-00003\.safetensors .* wrote"):
        publish(tmp_path, storage=storage)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_the_files_of_another_user_are_copied(tmp_path: Path) -> None:
    paths = put(tmp_path)
    os.chown(paths[0], 12345, -1)
    publish(tmp_path)
    mine = tmp_path / "out" / paths[0].name
    assert (mine.stat().st_uid, mine.stat().st_nlink) == (os.geteuid(), 1)
    assert (tmp_path / "out" / paths[1].name).stat().st_nlink == 2


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ([PARTS[0], {"b": torch.arange(5000.0)}], r"b in both .*00001-of-00002"),
        ([{}, {}], "holds no tensors"),
    ],
)
def test_a_name_in_two_parts_and_parts_without_any_tensor_are_refused(
    tmp_path: Path, parts: list[dict[str, Tensor]], why: str
) -> None:
    put(tmp_path, parts)
    with uncovered(why):
        publish(tmp_path)


def test_a_part_is_cast_if_that_is_asked_for(tmp_path: Path) -> None:
    put(tmp_path)
    publish(tmp_path, cast="bf16")
    everything = PARTS[0] | PARTS[1]
    assert_equal(loaded(tmp_path / "out"), {k: v.bfloat16() for k, v in everything.items()})


def test_a_cast_of_packed_weights_is_refused(tmp_path: Path) -> None:
    put(tmp_path, [{"a_blocks": torch.ones(4, dtype=torch.uint8)}])
    with no_checkpoint("a_blocks is quantized"):
        publish(tmp_path, cast="bf16")


def test_a_save_is_whole_when_all_ranks_have_vouched_for_their_parts(tmp_path: Path) -> None:
    actor = tmp_path / "actor"
    put(tmp_path)
    (actor / RECEIPTS / receipt_name(2)).unlink()
    assert "rank 2 of 3" in look_at_save(STORAGE, actor, 1).reason
