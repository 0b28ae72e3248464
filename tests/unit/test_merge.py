import errno
import itertools
import json
import os
import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import load_file, save_file

from syncd.checkpoint.merging.merge import run_plan
from syncd.checkpoint.merging.options import MergeOptions, Work
from syncd.checkpoint.merging.plan import MergePlan, plan_merge
from syncd.checkpoint.merging.source_reader import SourceReader, record_checks
from syncd.checkpoint.model_folder import copy_model_files, write_index
from syncd.checkpoint.parallel import threads_here
from syncd.checkpoint.placement import Local
from syncd.checkpoint.safetensors_file import SafetensorsFile
from syncd.checkpoint.torch_files.shard_file import ShardFile
from syncd.checkpoint.whole_files import digest_file
from syncd.protocol.errors import (
    CancelledError,
    SaveNotReadyError,
)
from tests.fsdp_fixtures import shard_paths
from tests.jobs import nothing
from tests.merging import STORAGE, STORED, assert_equal, loaded, merge
from tests.refusals import malformed, no_checkpoint, uncovered
from tests.shards import shard
from tests.shards import tensor as shard_tensor
from tests.storages import RuledStorage, refuse

Opened = Callable[[Path], list[ShardFile]]


def plan_of(shards: list[ShardFile], max_file_size: int) -> MergePlan:
    indexes = [(shard.path.name, shard.tensors()) for shard in shards]
    return plan_merge(indexes, max_file_size=max_file_size)


def saved(folder: Path, state: dict[str, torch.Tensor]) -> Path:
    """The file of one rank, in a folder of its own."""
    path = folder / "saved" / "model_world_size_1_rank_0.pt"
    path.parent.mkdir()
    torch.save(state, path)
    return path


# -- digests -----------------------------------------------------------------------------------


def test_digests_are_of_tensors_and_of_headers_and_tensors(
    written: Path, tmp_path: Path, opened: Opened
) -> None:
    merged = merge(opened(written / "fsdp2-2"), tmp_path / "out", digests=True, max_file_size=700)
    by_name = {tensor.name: tensor for tensor in merged.tensors}
    for name, tensor in loaded(tmp_path / "out").items():
        content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        assert by_name[name].digest == xxhash.xxh3_128_hexdigest(content)
    for file in merged.files:
        with SafetensorsFile.open(STORAGE, tmp_path / "out" / file.name) as source:
            digests = [by_name[entry.name].digest or "" for entry in source.entries]
            whole = source.header + b"".join(map(bytes.fromhex, digests))
            assert file.digest == xxhash.xxh3_128_hexdigest(whole)
            again, tensors = digest_file(STORAGE, source, cancel=nothing)
        assert again == file
        assert set(tensors) <= set(merged.tensors)


def test_a_foreign_full_state_dict_is_digested_and_copied(tmp_path: Path) -> None:
    state = {"b": torch.arange(300_000.0), "a": torch.tensor(True), "none": torch.empty(0, 2)}
    path = tmp_path / "model.safetensors"
    save_file(state, path)
    with SafetensorsFile.open(STORAGE, path) as source:
        only = digest_file(STORAGE, source, cancel=nothing)
        target = tmp_path / "copy.safetensors"
        copied = digest_file(STORAGE, source, cancel=nothing, copy_to=target)
        without, _ = digest_file(STORAGE, source, digests=False, cancel=nothing)
    assert copied == only
    assert target.read_bytes() == path.read_bytes()
    assert without.digest is None
    assert without.size == path.stat().st_size


def test_a_file_that_is_no_whole_safetensors_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.arange(4), "b": torch.arange(3)}, path)
    content = path.read_bytes()
    header = content[8 : 8 + int.from_bytes(content[:8], "little")]
    cases = [content[:cut] for cut in range(0, len(content), 5)]
    cases += [content + b"\0", b"\xff" * 8 + content[8:]]
    for old, new in [(b"[4]", b"[5]"), (b"I64", b"X64"), (b'"b"', b'"a"'), (b"[0,", b"[8,"),
                     (b"{", b" "), (b"[4]", b"4.0"), (b"[4]", b"[-]")]:  # fmt: skip
        cases.append(content.replace(header, header.replace(old, new, 1)))
    for case in cases:
        path.write_bytes(case)
        with malformed("not a whole safetensors file"):
            SafetensorsFile.open(STORAGE, path)


def test_packed_values_are_counted_as_in_torch_inside_and_as_safetensors_does_in_files(
    tmp_path: Path, opened: Opened
) -> None:
    packed = torch.arange(24, dtype=torch.uint8).reshape(4, 6).view(torch.float4_e2m1fn_x2)
    path = tmp_path / "model.safetensors"
    save_file({"a": packed}, path)
    content = path.read_bytes()
    with SafetensorsFile.open(STORAGE, path) as source:
        assert source.entries[0].shape == (4, 6)
    for wrong in (b"[4,6]", b"[8,3]", b"[]"):
        path.write_bytes(content.replace(b"[4,12]", wrong.ljust(6)))
        with malformed("a length that does not fit its shape"):
            SafetensorsFile.open(STORAGE, path)
    path = saved(tmp_path, {"one": packed[0, 0]})
    with malformed(r"'one' is F4 .* Save it as uint8"):
        merge(opened(path.parent), tmp_path / "out")


# -- what is found out while the bytes are read ------------------------------------------------


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A copy of a stored save, to be damaged."""
    folder = tmp_path / "saved"
    shutil.copytree(STORED / "torch-2.15.0" / "fsdp2", folder)
    return folder


def flip(path: Path, record: str, at: int) -> None:
    with ShardFile.open(STORAGE, path) as shard:
        place = shard.records[record].offset + at
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


with_and_without_digests = pytest.mark.parametrize("digests", [False, True])


@pytest.mark.parametrize("record", ["data/0", "data/3", "version"])
@with_and_without_digests
def test_a_wrong_crc_of_any_record_is_found_used_or_not(
    stored: Path,
    tmp_path: Path,
    opened: Opened,
    record: str,
    digests: bool,
) -> None:
    """``data/0`` of rank 3 is padding alone: it has none of the three rows."""
    flip(shard_paths(stored)[3], record, 0)
    with malformed(f"rank_3.pt: record {record} does not match"):
        merge(opened(stored), tmp_path / "out", digests=digests, check_crc=True)


def test_without_crc_in_the_file_its_check_is_left_out(tmp_path: Path, opened: Opened) -> None:
    state = {"weight": torch.arange(9.0)}
    torch.serialization.set_crc32_options(False)
    try:
        path = saved(tmp_path, state)
    finally:
        torch.serialization.set_crc32_options(True)
    shards = opened(path.parent)
    assert not shards[0].has_crc
    merge(shards, tmp_path / "out", check_crc=True)
    assert_equal(loaded(tmp_path / "out"), state)


def test_plain_tensors_that_differ_between_ranks_are_named(tmp_path: Path, opened: Opened) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    for rank in range(3):
        weight = torch.zeros(2_000_000)
        weight[-1] = rank // 2
        torch.save({"a": torch.ones(3), "b": weight}, saved / f"model_world_size_3_rank_{rank}.pt")
    with uncovered(r"b differs between ranks 0 and 2.*rank_0.*rank_2"):
        merge(opened(saved), tmp_path / "out")


@pytest.mark.parametrize("size", [1000, 3_000_000])
@with_and_without_digests
def test_a_source_that_becomes_shorter_is_to_be_looked_at_again(
    tmp_path: Path, opened: Opened, size: int, digests: bool
) -> None:
    path = saved(tmp_path, {"weight": torch.zeros(size, dtype=torch.uint8)})
    shards = opened(path.parent)
    shards[0].tensors()
    with path.open("r+b") as file:
        file.truncate(shards[0].records["data/0"].offset + size // 2)
    with pytest.raises(SaveNotReadyError, match=r"rank_0\.pt became shorter"):
        merge(shards, tmp_path / "out", digests=digests)


def test_a_merge_stops_when_asked(written: Path, tmp_path: Path, opened: Opened) -> None:
    def stop() -> None:
        raise CancelledError("asked to stop")

    for number, (digests, check_crc) in enumerate(itertools.product((False, True), repeat=2)):
        with pytest.raises(CancelledError):
            merge(
                opened(written / "fsdp2-2"),
                tmp_path / str(number),
                digests=digests,
                check_crc=check_crc,
                cancel=stop,
            )


# -- several files at a time ------------------------------------------------------------------


@with_and_without_digests
@pytest.mark.parametrize("check_crc", [False, True])
@pytest.mark.parametrize("kind", ["fsdp2-4", "fsdp2_tp-8", "fsdp1-4", "plain-2"])
def test_threads_write_the_same_files_as_one_does(
    written: Path,
    tmp_path: Path,
    opened: Opened,
    kind: str,
    check_crc: bool,
    digests: bool,
) -> None:
    shards = opened(written / kind)
    made = []
    for threads in (1, 4):
        folder = tmp_path / str(threads)
        merged = merge(
            shards, folder, digests=digests, check_crc=check_crc, max_file_size=300, threads=threads
        )
        made.append((merged, {path.name: path.read_bytes() for path in folder.iterdir()}))
    assert len(made[0][1]) > 4
    assert made[0] == made[1]


def views_of_one_storage(folder: Path) -> dict[str, torch.Tensor]:
    """A save whose tensors all lie in one record, with bytes between them that none has."""
    whole = torch.arange(400_000, dtype=torch.int32)
    state = {f"t{at}": whole[at : at + 9_000] for at in range(0, 400_000, 10_000)}
    saved(folder, state)
    return state


by_one_and_several_threads = pytest.mark.parametrize("threads", [1, 4])


@by_one_and_several_threads
def test_a_record_in_many_files_is_checked_by_all_its_bytes(
    tmp_path: Path, opened: Opened, threads: int
) -> None:
    state = views_of_one_storage(tmp_path)
    whole = {"check_crc": True, "max_file_size": 80_000, "threads": threads}
    shards = opened(tmp_path / "saved")
    merged = merge(shards, tmp_path / "good", **whole)  # type: ignore[arg-type]  # one dict
    assert len(merged.files) > 10
    assert_equal(loaded(tmp_path / "good"), state)
    record = shards[0].records["data/0"]
    for number, at in enumerate((0, 700_003, 38_001, record.size - 1)):
        with shards[0].path.open("r+b", buffering=0) as file:
            (byte,) = os.pread(file.fileno(), 1, record.offset + at)
            os.pwrite(file.fileno(), bytes((byte ^ 1,)), record.offset + at)
            with malformed(r"record data/0 does not match its CRC-32"):
                merge(shards, tmp_path / str(number), **whole)  # type: ignore[arg-type]  # as above
            os.pwrite(file.fileno(), bytes((byte,)), record.offset + at)


class Together(RuledStorage):
    """A storage where ``method`` first returns in threads of a merge once two have called it."""

    def __init__(self, method: str) -> None:
        super().__init__(self._meet)
        self._method, self._both, self._met = method, threading.Barrier(2), set[str]()

    def _meet(self, method: str, _given: object) -> None:
        name = threading.current_thread().name
        if method == self._method and name.startswith("syncd-copy") and name not in self._met:
            self._met.add(name)
            self._both.wait(60)


@pytest.mark.skipif(threads_here(2) < 2, reason="there is one processor")
def test_two_files_are_written_at_once(written: Path, tmp_path: Path, opened: Opened) -> None:
    shards = opened(written / "fsdp2-4")
    assert len(plan_of(shards, 1700).files) % 2 == 0
    merge(shards, tmp_path / "out", max_file_size=1700, threads=2, storage=Together("create"))


@pytest.mark.skipif(threads_here(2) < 2, reason="there is one processor")
def test_a_large_file_is_written_by_several_threads_and_is_the_same(
    tmp_path: Path, opened: Opened
) -> None:
    sizes = (30, 0, 10, 30, 0)  # MiB: the second share begins with the fourth tensor
    saved(tmp_path, {f"t{n}": torch.full((size, 2**18), n) for n, size in enumerate(sizes)})
    shards = opened(tmp_path / "saved")
    found = [
        merge(
            shards, tmp_path / str(threads), digests=True, check_crc=True, threads=threads,
            storage=storage,
        )
        for threads, storage in ((1, STORAGE), (2, Together("pwrite")))
    ]  # fmt: skip
    (name,) = (file.name for file in found[0].files)
    assert found[0] == found[1]
    assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()


def test_of_a_record_that_several_read_only_the_rest_is_read_to_check_it(
    tmp_path: Path, opened: Opened
) -> None:
    views_of_one_storage(tmp_path)
    shards = opened(tmp_path / "saved")
    (checks,) = record_checks(shards, check_crc=True)
    assert checks is not None
    first, second, third = (
        SourceReader(RuledStorage(), shards, checks=[checks], cancel=nothing) for _ in range(3)
    )
    record = shards[0].records["data/0"]
    part = memoryview(bytearray(1000))
    for reader, at in (first, 5000), (second, 0), (first, 6000), (second, 500), (third, 5500):
        reader.read_into(0, record.offset + at, part)
    storage = third.storage = RuledStorage()
    third.finish()
    read = [(given[2] - record.offset, len(given[1])) for _, given in storage.calls]
    assert [one for one in read if 0 <= one[0] < record.size] == [
        (1000, 4000), (7000, 2**20), (7000 + 2**20, record.size - 7000 - 2**20)
    ]  # fmt: skip


def test_threads_end_with_the_first_that_storage_refuses(
    written: Path, tmp_path: Path, opened: Opened
) -> None:
    storage = RuledStorage(refuse("create", errno.ENOSPC, where="model-00003"))
    with pytest.raises(OSError, match="No space"):
        merge(
            opened(written / "fsdp2-4"),
            tmp_path / "out",
            max_file_size=300,
            threads=4,
            storage=storage,
        )
    assert not [t for t in threading.enumerate() if t.name.startswith("syncd-copy")]


@by_one_and_several_threads
def test_progress_is_told_by_one_thread_grows_and_ends_at_the_whole(
    written: Path, tmp_path: Path, opened: Opened, threads: int
) -> None:
    shards = opened(written / "fsdp2-4")
    plan = plan_of(shards, 300)
    seen: list[tuple[int, int, threading.Thread]] = []
    run_plan(
        STORAGE, plan, shards, tmp_path, options=MergeOptions(threads=threads), checked="crc32",
        work=Work(
            nothing,
            lambda done, total: seen.append((done, total, threading.current_thread())),
        ),
    )  # fmt: skip
    assert [done for done, _, _ in seen] == sorted({done for done, _, _ in seen})
    assert {total for _, total, _ in seen} == {plan.data_size} == {seen[-1][0]}
    assert {thread for _, _, thread in seen} == {threading.current_thread()}


def test_files_are_of_about_the_same_size() -> None:
    index = {
        f"t{number}": Local("U8", (size,), 0, size, "data/0", None)
        for number, size in enumerate([400, *[10] * 150, 300, 5, 5])
    }
    plan = plan_merge([("rank 0", index)], max_file_size=1000)
    sizes = [file.data_size for file in plan.files]
    assert len(sizes) == 3
    assert max(sizes) <= 1000
    assert max(sizes) - min(sizes) < 200


# -- the rest of the folder --------------------------------------------------------------------


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "huggingface").mkdir()
    return tmp_path / "huggingface"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "version").mkdir()
    return tmp_path / "version"


def test_everything_but_weights_is_copied_and_links_are_not_followed(
    source: Path, folder: Path
) -> None:
    (source / "sub" / "deep").mkdir(parents=True)
    kept = {
        "config.json": b"{}",
        "tokenizer.model": b"\0" * 9,
        "sub/deep/a.txt": b"",
        "sub/b": b"b",
    }
    for name, content in kept.items():
        (source / name).write_bytes(content)
    for name in ("model.safetensors", "pytorch_model.bin", "a.pt", "b.pth", "sub/c.safetensors",
                 "model.safetensors.index.json", ".tmp-config.json", "manifest.json"):  # fmt: skip
        (source / name).write_bytes(b"skipped")
    (source / "secret.json").symlink_to("/etc/passwd")
    (source / "loop").symlink_to(source)
    copied = copy_model_files(STORAGE, source, folder, cancel=nothing)
    assert {name: file.digest for name, file in copied.items()} == {
        name: xxhash.xxh3_128_hexdigest(content) for name, content in kept.items()
    }
    found = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    assert found == kept


def test_a_plain_model_has_no_folder_to_copy(tmp_path: Path) -> None:
    assert copy_model_files(STORAGE, tmp_path / "huggingface", tmp_path, cancel=nothing) == {}


@pytest.mark.parametrize(
    ("name", "message"), [("a\nb", "Rename the file"), ("dump", "dump is larger than")]
)
def test_a_name_that_no_manifest_can_hold_and_a_huge_file_are_errors(
    source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    monkeypatch.setattr("syncd.checkpoint.model_folder.FILE_LIMIT", 10)
    (source / name).write_bytes(bytes(11 if name == "dump" else 0))
    with no_checkpoint(message):
        copy_model_files(STORAGE, source, folder, cancel=nothing)


@pytest.mark.parametrize(
    ("make", "name"),
    [(Path.touch, "{0}.txt"), (os.makedirs, "{1}/{0}"), (Path.touch, "{0}.safetensors")],
    ids=["empty files", "folders in folders", "names of weights"],
)
def test_cancel_ends_the_walk_through_a_folder_and_its_copy(
    source: Path, folder: Path, make: Callable[[Path], None], name: str
) -> None:
    for number in range(50):
        make(source / name.format(number, number % 5))
    storage = RuledStorage()
    left = itertools.count(20, -1)

    def cancel() -> None:
        if next(left) == 0:
            raise CancelledError("asked to stop")

    with pytest.raises(CancelledError):
        copy_model_files(storage, source, folder, cancel=cancel)
    calls = [method for method, _ in storage.calls]
    assert calls.count("kinds") <= 21
    assert calls.count("create") <= 21


def test_folders_inside_folders_without_end_are_an_error_at_once(
    source: Path, folder: Path
) -> None:
    (source / Path(*["d"] * 200)).mkdir(parents=True)
    storage = RuledStorage()
    with no_checkpoint("64 levels deep"):
        copy_model_files(storage, source, folder, cancel=nothing)
    assert sum(method == "kinds" for method, _ in storage.calls) < 100


def test_cancel_is_asked_for_each_tensor_by_all_that_goes_through_them(tmp_path: Path) -> None:
    """Proving, the header, the copy, the manifest: also of tensors without any bytes."""
    asked = []
    for count in (100, 300):
        path = tmp_path / f"{count}.pt"
        path.write_bytes(shard({f"t{n}": shard_tensor((0,), (1,)) for n in range(count)}))
        calls = itertools.count()
        with ShardFile.open(STORAGE, path) as opened:
            index = [(path.name, opened.tensors())]
            cancel = partial(next, calls)
            plan = plan_merge(index, max_file_size=10**9, cancel=cancel)
            (tmp_path / f"out-{count}").mkdir()
            run_plan(
                STORAGE,
                plan,
                [opened],
                tmp_path / f"out-{count}",
                options=MergeOptions(),
                checked="stillness",
                work=Work(cancel),
            )
        asked.append(next(calls))
    assert asked[1] - asked[0] >= 4 * 200


def test_several_weight_files_have_an_index(written: Path, tmp_path: Path, opened: Opened) -> None:
    shards = opened(written / "fsdp2-4")
    assert write_index(STORAGE, tmp_path, merge(shards, tmp_path / "one")) == ()
    merged = merge(shards, tmp_path / "several", max_file_size=700)
    (file,) = write_index(STORAGE, tmp_path / "several", merged)
    content = (tmp_path / "several" / file.name).read_bytes()
    assert file.digest == xxhash.xxh3_128_hexdigest(content)
    index = json.loads(content)
    assert index["metadata"]["total_size"] == merged.data_size
    for name, weights in index["weight_map"].items():
        assert name in load_file(tmp_path / "several" / weights)
