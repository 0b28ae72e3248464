"""A fold makes the files that a merge of the same save would make."""

import errno
import resource
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from syncd.checkpoint.merging.options import Work
from syncd.checkpoint.name_map import NameMap
from syncd.checkpoint.safetensors_file import DIGESTS
from syncd.checkpoint.version import verify_version
from syncd.daemon.maker import MakerProcess
from syncd.daemon.orders import FoldOrder
from syncd.deltas.delta_index import DeltaFolder
from syncd.deltas.folding import fold
from syncd.deltas.limits import DeltaError
from syncd.deltas.needs import missing_extra
from syncd.deltas.whole_version import WholeVersion
from syncd.protocol.errors import VerificationError
from syncd.protocol.records import Manifest
from tests.deltas import STORAGE, changed, contents, random_tensors, same_files, write_version
from tests.jobs import SmallJob, flip, nothing
from tests.makers import end_idle_makers
from tests.saved_deltas import delta_folder, save_delta, save_full

SHAPES: dict[str, tuple[str, tuple[int, ...]]] = {
    "embed.weight": ("BF16", (7, 3)),
    "layer.weight": ("BF16", (11, 4)),
    "bias": ("F32", (5,)),
    "scale": ("F32", ()),
    "nothing": ("BF16", (0, 4)),
    "big": ("BF16", (3, 2**19)),
}
FILES = [["embed.weight", "scale", "nothing"], ["big", "layer.weight", "bias"]]


def chain_of(
    folder: Path, versions: list[dict[str, Any]], world_size: int, *, raw: bool = False
) -> list[DeltaFolder]:
    pairs = pairwise(versions)
    return [
        delta_folder(
            folder / f"d{number}",
            f"run-{number}-{number}",
            f"run-{number + 1}-{number + 1}",
            None if raw else old,
            new,
            world_size,
        )
        for number, (old, new) in enumerate(pairs, 1)
    ]


def folded(base: WholeVersion, chain: list[DeltaFolder], folder: Path) -> Manifest:
    folder.mkdir()
    merged = fold(STORAGE, base, chain, folder, to=STORAGE, work=Work(nothing))
    return base.manifest.model_copy(update={"files": merged.files, "tensors": merged.tensors})


def like(version: WholeVersion, made: Manifest) -> bool:
    told = version.manifest
    return (made.files, made.tensors) == (told.files, told.tensors)


@pytest.mark.parametrize(("world_size", "raw"), [(1, False), (4, False), (4, True)])
def test_a_fold_of_a_chain_has_the_files_of_the_last_save(
    tmp_path: Path, world_size: int, raw: bool
) -> None:
    tensors = [random_tensors(0, **SHAPES)]
    for seed in range(3):
        tensors.append(changed(tensors[-1], 0.05, seed))
    small = {"config.json": b"{}", "more/a.txt": b"a"}
    (tmp_path / "later").mkdir()
    base = write_version(tmp_path, 1, tensors[0], files=FILES, small=small)
    last = write_version(tmp_path / "later", 4, tensors[-1], files=FILES, small=small)
    made = folded(base, chain_of(tmp_path, tensors, world_size, raw=raw), tmp_path / "made")
    assert same_files(tmp_path / "made", last)
    assert like(last, made)


def test_the_digests_in_the_headers_are_those_of_the_new_bytes(tmp_path: Path) -> None:
    old = random_tensors(0, a=("BF16", (9, 2)), b=("F32", (3,)))
    new = changed(old, 0.5)
    (tmp_path / "later").mkdir()

    def said(tensors: Mapping[str, Any]) -> dict[str, str]:
        digests = (xxhash.xxh3_128_hexdigest(x.tobytes()) for _, x in tensors.values())
        return {DIGESTS: "".join(digests)}

    base = write_version(tmp_path, 1, old, small={}, metadata=said(old))
    last = write_version(tmp_path / "later", 2, new, small={}, metadata=said(new))
    made = folded(base, chain_of(tmp_path, [old, new], 2), tmp_path / "made")
    assert same_files(tmp_path / "made", last)
    assert like(last, made)


def test_pieces_with_the_trainers_names_fill_the_hubs_tensors(tmp_path: Path) -> None:
    """Stacked experts, cut between ranks; a joined tensor; a renamed one; a tied head."""
    old = random_tensors(
        0,
        **{
            "experts.gate_up": ("BF16", (3, 4, 2)),
            "q": ("BF16", (4, 2)),
            "k": ("BF16", (2, 2)),
            "model.embed_tokens.weight": ("BF16", (5, 2)),
        },
    )
    names = NameMap.read(
        b"""{"protocol": 1, "tensors": {
        "experts.gate_up": {"shape": [3, 4, 2], "pieces": [
            {"name": "experts.{}.gate", "first": 0, "rows": [0, 2]},
            {"name": "experts.{}.up", "first": 0, "rows": [2, 4]}]},
        "q": {"shape": [4, 2], "pieces": [{"name": "qk", "at": 0}]},
        "k": {"shape": [2, 2], "pieces": [{"name": "qk", "at": 4}]}}}""",
        "the map",
    )
    small = {"config.json": b'{"tie_word_embeddings": true}', "name_map.json": names.encode()}

    def on_hub(tensors: Mapping[str, Any]) -> dict[str, Any]:
        stacked = tensors["experts.gate_up"][1]
        found = {}
        for expert in range(3):
            found[f"experts.{expert}.up"] = ("BF16", stacked[expert, 2:])
            found[f"experts.{expert}.gate"] = ("BF16", stacked[expert, :2])
        found["qk"] = ("BF16", np.concatenate([tensors["q"][1], tensors["k"][1]]))
        found["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
        return found

    def saved(tensors: dict[str, Any]) -> dict[str, Any]:
        return {"lm_head.weight": tensors["model.embed_tokens.weight"], **tensors}

    new = changed(old, 0.3)
    (tmp_path / "later").mkdir()
    base = write_version(tmp_path, 1, on_hub(old), small=small)
    base = WholeVersion(base.folder, base.manifest.model_copy(update={"names": "hub"}))
    last = write_version(tmp_path / "later", 2, on_hub(new), small=small)
    made = folded(base, chain_of(tmp_path, [saved(old), saved(new)], 2), tmp_path / "made")
    assert same_files(tmp_path / "made", last)
    assert like(last, made)
    untied = saved(new) | {"lm_head.weight": ("BF16", new["q"][1].repeat(2, 0)[:5])}
    chain = chain_of(tmp_path / "later", [saved(old), untied], 2)
    with pytest.raises(DeltaError, match="should be equal"):
        folded(base, chain, tmp_path / "other")


@pytest.mark.parametrize("damage", ["delta", "base", "small file", "missing delta", "shape", "gap"])
def test_damage_and_misfits_are_found(tmp_path: Path, damage: str) -> None:
    old = random_tensors(0, a=("BF16", (9, 2)), b=("F32", (300, 3)))
    new = changed(old, 0.3)
    base = write_version(tmp_path, 1, old)
    wrong = dict(new)
    if damage == "shape":
        wrong["a"] = ("BF16", new["a"][1][:8])
    if damage == "gap":
        del wrong["a"]
    chain = (
        chain_of(tmp_path, [old, wrong], 2)
        if damage != "shape"
        else [delta_folder(tmp_path / "d1", "run-1-1", "run-2-2", None, wrong)]
    )
    if damage == "delta":
        flip(chain[0].folder / "rank-1", 40)
    if damage == "base":
        flip(base.folder / "model.safetensors")
    if damage == "small file":
        flip(base.folder / "config.json", 1)
    if damage == "missing delta":
        (chain[0].folder / "rank-1").unlink()
    errors = {"small file": VerificationError, "missing delta": FileNotFoundError}
    with pytest.raises(errors.get(damage, DeltaError)):
        folded(base, chain, tmp_path / "made")


def test_deltas_that_divide_the_tensors_differently_do_not_fit(tmp_path: Path) -> None:
    tensors = [random_tensors(0, a=("BF16", (9, 2)))]
    tensors += [changed(tensors[0], 0.3, seed) for seed in (1, 2)]
    base = write_version(tmp_path, 1, tensors[0])
    chain = [
        delta_folder(tmp_path / "d1", "run-1-1", "run-2-2", tensors[0], tensors[1], 2),
        delta_folder(tmp_path / "d2", "run-2-2", "run-3-3", tensors[1], tensors[2], 3),
    ]
    with pytest.raises(DeltaError, match="different ways"):
        folded(base, chain, tmp_path / "made")
    assert contents(base.folder)


def test_a_child_process_folds_and_tells_what_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # the first child could write only a part
    job = SmallJob(tmp_path / "job")
    save_full(job, 1)
    with job.daemon() as loop:
        loop.run_once()
        save_delta(job, 2, 1, world_size=2)
        loop.run_once()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for number in (0, 1, 2):
        folder = tmp_path / f"made-{number}"
        folder.mkdir()
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft if number else 100, hard))
        end_idle_makers()
        child = MakerProcess(job)
        child.begin(FoldOrder(folder, job.latest, [2]), Work(nothing))
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        deadline = time.monotonic() + 60
        made = None
        try:
            while made is None and time.monotonic() < deadline:
                made = child.poll()
                time.sleep(0.01)
        except OSError as error:
            found = number, error.errno, str(folder) in str(error)
            assert found == (0, errno.EFBIG, True)
        except DeltaError as error:
            assert number == 2
            assert "rank-1" in str(error)  # noqa: PT017 - the first round must not raise
        else:
            assert number == 1
            assert made is not None
            assert (made.sequence, made.step, made.save_id) == (2, 2, "run-2-2")
            verify_version(STORAGE, folder, made)
        finally:
            child.stop()
        if number == 1:
            flip(job.delta(2) / "rank-1", 2)


def test_this_host_can_fold() -> None:
    assert missing_extra() is None


def test_a_fold_opens_few_of_many_files(tmp_path: Path) -> None:
    tensors = [random_tensors(0, a=("BF16", (200, 2)))]
    tensors += [changed(tensors[-1], 0.3, seed) for seed in range(2)]
    base = write_version(tmp_path, 1, tensors[0])
    chain = chain_of(tmp_path, tensors, 200)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + 300, hard)
    )
    try:
        folded(base, chain, tmp_path / "made")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
