"""Folders of torch.distributed.checkpoint: exactly what was saved, or an error that says what."""

import errno
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

from syncd.checkpoint.build import FreeSpace
from syncd.checkpoint.dcp.dcp_metadata import SavedName, select_model
from syncd.checkpoint.merging.options import MergeOptions
from syncd.checkpoint.open_save import holds_model_only
from syncd.checkpoint.save import Save, look_at_save
from syncd.daemon.steps import look_at_step
from syncd.protocol.errors import (
    CheckpointError,
    NoRoomError,
    SaveNotReadyError,
)
from syncd.protocol.names import is_resumable_state
from syncd.protocol.records import SaveOutcome
from syncd.storage.calls import Free
from syncd.storage.fsio import Storage
from tests.commands import invoke
from tests.dcp import FILE, Checkpoint, floats, properties, size, small
from tests.fsdp_models import CARRIED, TRAINED, values
from tests.jobs import nothing
from tests.merging import STORAGE, assert_equal, build, loaded
from tests.refusals import invalid, malformed, no_checkpoint, uncovered
from tests.shards import Built, Named, without_crc
from tests.storages import os_error
from trainer_hooks.dcp import announce_dcp

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save(state: dict[str, object], folder: Path) -> Path:
    """``dcp.save`` of one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def save_hf(state: dict[str, torch.Tensor], folder: Path, **options: object) -> Path:
    """The same through ``HuggingFaceStorageWriter``."""
    writer = dcp.HuggingFaceStorageWriter(str(folder), **options)  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=writer, no_dist=True)
    return folder


def refuses(folder: Path, match: str, prefix: str | None = None) -> None:
    """A merge of the folder is an error that says what."""
    out = folder.with_name(f"refused-{prefix}")
    with malformed(match):
        build(folder, out, prefix=prefix)


def difficult() -> dict[str, torch.Tensor]:
    """Every dtype, and every kind of shape."""
    return {
        **{str(dtype): values(5, 3, dtype=dtype) for dtype in (*TRAINED, *CARRIED)},
        **{
            f"{dtype} by itself": values(dtype=dtype)
            for dtype in (*TRAINED, *CARRIED)
            if dtype != torch.float4_e2m1fn_x2  # safetensors has no single pair of values
        },
        "nothing": torch.empty(0, 3),
        "nothing wide": torch.empty(3, 0, dtype=torch.int64),
        "one": torch.ones(1, 1, 1),
        "unusual": torch.tensor([float("nan"), float("-inf"), -0.0, 1e-40]),
        "a view": torch.arange(40.0).reshape(10, 4)[3:7],
        "long": torch.arange(700_000),
    }


class Small(Storage):
    """A disk on which 2 MiB are free."""

    def free(self, path: Path) -> Free:
        return super().free(path)._replace(bytes=2 * 1024 * 1024)


def test_with_another_prefix_there_may_be_room(tmp_path: Path) -> None:
    state = {"large": {"weight": torch.zeros(1_000_000)}, "small": {"weight": torch.zeros(1)}}
    folder = save(state, tmp_path / "save")
    found = look_at_save(STORAGE, folder, 1)
    space = FreeSpace(Small(tmp_path), folder, tmp_path)
    with pytest.raises(NoRoomError, match="are free in"):
        space.check(folder, found, MergeOptions(prefix="large."), nothing)
    space.check(folder, found, MergeOptions(prefix="small."), nothing)


# -- exact ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("distributed", [None, True, False], ids=["torch", "many", "one"])
def test_every_dtype_and_shape_comes_out_as_it_went_in(
    tmp_path: Path, distributed: bool | None
) -> None:
    state, path = difficult(), tmp_path / "save"
    if distributed is None:
        folder = save({"model": state, "optim": {"state": state}}, path)
    else:
        folder = save_hf(state, path, save_distributed=distributed)
    checked = "crc32" if distributed is None else "stillness"
    assert build(folder, tmp_path / "out").checked == checked
    assert_equal(loaded(tmp_path / "out"), state)


def test_torchs_own_consolidation_of_hugging_face_files_is_not_exact(tmp_path: Path) -> None:
    """Why there is another: where this fails, torch has mended it."""
    for name, value in {"number": torch.tensor(3.5), "integers": torch.arange(5)}.items():
        folder = save_hf({name: value}, tmp_path / name, save_distributed=True)
        (tmp_path / f"{name}-torch").mkdir()
        try:
            consolidate_safetensors_files(
                str(folder), str(tmp_path / f"{name}-torch"), fqn_to_index_mapping={name: 1}
            )
        except TypeError as error:
            assert "finfo" in str(error)  # noqa: PT017 - one of the two is raised
        else:
            assert not torch.equal(loaded(tmp_path / f"{name}-torch")[name], value)
        build(folder, tmp_path / f"{name}-out")
        assert_equal(loaded(tmp_path / f"{name}-out"), {name: value})


def test_what_no_file_has_is_an_error_and_not_zeros(tmp_path: Path) -> None:
    rows, whole, scalar = small(), small(), small()
    rows.chunks["model.weight"].pop()
    whole.chunks["model.weight"].clear()
    scalar.places.pop()
    for number, (checkpoint, match) in enumerate(
        (
            (rows, "weight: rows 2 to 3 are in no file"),
            (whole, "weight: rows 0 to 3 are in no file"),
            (scalar, r"the chunk of 'model\.scale' at \(\) is in no file"),
        )
    ):
        with uncovered(match):
            build(checkpoint.write(tmp_path / f"{number}"), tmp_path / f"out{number}")


def test_tensors_keep_the_order_of_the_state_dict(tmp_path: Path) -> None:
    checkpoint = Checkpoint()
    for number in range(6):
        checkpoint.add(("w", f"t{number}"), floats(number), (1,), file=f"__{5 - number}_0.distcp")
    manifest = build(checkpoint.write(tmp_path / "save"), tmp_path / "out", max_file_size=4)
    assert [tensor.name for tensor in manifest.tensors] == [f"t{number}" for number in range(6)]


def test_a_tensor_that_is_not_contiguous_is_an_error(tmp_path: Path) -> None:
    folder = save({"model": {"turned": torch.ones(3, 2).t()}}, tmp_path / "save")
    refuses(folder, r"'turned' is not contiguous .*: save a copy")


def test_without_crc_the_files_must_lie_still(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        folder = save({"model": {"w": torch.arange(9.0)}}, tmp_path / "save")
    finally:
        torch.serialization.set_crc32_options(True)
    assert build(folder, tmp_path / "out").checked == "stillness"
    assert_equal(loaded(tmp_path / "out"), {"w": torch.arange(9.0)})


def test_where_one_rank_has_no_crc_the_others_are_checked(tmp_path: Path) -> None:
    checkpoint = small()
    checkpoint.files[FILE][:] = without_crc(bytes(checkpoint.files[FILE]))
    folder = checkpoint.write(tmp_path / "save")
    assert build(folder, tmp_path / "out").checked == "stillness"
    content = (folder / "__1_0.distcp").read_bytes()
    (folder / "__1_0.distcp").write_bytes(content.replace(floats(5, 6), floats(5, 7)))
    refuses(folder, r"__1_0\.distcp: .* does not match its CRC-32")


# -- which tensors are the model's ----------------------------------------------------------------

OPTIMIZER = {"optim.state.w.exp_avg": SavedName(("optim", "state", "w", "exp_avg"), 2)}


def chosen(*paths: str, prefix: str | None = None, **more: SavedName) -> dict[str, str]:
    """The names that are chosen; a path is written a/b/c, and that of a number ends with ``#``."""
    entries = dict(OPTIMIZER)
    for path in paths:
        keys = tuple(path.rstrip("#").split("/"))
        entries[".".join(keys)] = SavedName(keys, 0 if path.endswith("#") else 2)
    return dict(select_model(entries | more, prefix, "F").names)


def test_the_model_is_found_wherever_it_was_put() -> None:
    assert chosen("model/a.w", "model/b") == {"model.a.w": "a.w", "model.b": "b"}
    assert chosen("app/model/a.w", "app/optimizer/x") == {"app.model.a.w": "a.w"}
    assert chosen("state_dict/a.w", "lr_scheduler/x#") == {"state_dict.a.w": "a.w"}
    # As torchtitan has it: the model's own keys at the top.
    assert chosen("model.layers.0.w", "lm_head", "train_state/step#", "dataloader/x") == {
        "model.layers.0.w": "model.layers.0.w",
        "lm_head": "lm_head",
    }
    assert chosen("model/w", "step#") == {"model.w": "w"}
    assert chosen("model/w", "ema/w") == {"model.w": "w"}
    assert chosen("model/w", "extra_state/w", "trainer/w") == {"model.w": "w"}
    assert chosen("step#") == {"step": "step"}


STATES = "rng cuda_rng torch_rng_state numpy_random_state/0 step global_step loss# app/rng app/lr#"


@given(
    st.sampled_from(["model", "app/model", "net", "app/net"]),
    st.sets(st.sampled_from(["w", "a.w", "rng", "step", "scaler.w", "optimus.w"])),
    st.sets(st.sampled_from(STATES.split())),
)
def test_states_beside_a_model_are_ignored_whatever_its_names(
    parent: str, weights: set[str], states: set[str]
) -> None:
    truth = {f"{parent}/{name}".replace("/", "."): name for name in {*weights, "b.w"}}
    beside = [*states, *(["losses"] if parent == "model" else [])]
    assert chosen(*(f"{parent}/{name}" for name in truth.values()), *beside) == truth
    # A model at the top level has such names too, and keeps them beside states in dicts.
    assert chosen(*truth.values(), "rng_state/0", "app/step").keys() == set(truth.values())


def test_a_save_with_a_state_beside_the_model_holds_not_only_a_model(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(2)}, "rng": torch.get_rng_state()}
    folder = save(state, tmp_path / "save")
    assert not holds_model_only(STORAGE, folder, prefix=None, cancel=nothing)
    build(folder, tmp_path / "out")
    assert_equal(loaded(tmp_path / "out"), state["model"])


def test_what_is_ambiguous_is_an_error_that_names_the_option() -> None:
    for paths in (
        "actor/w critic/w",
        "policy/w teacher/model/w",
        "policy/w teacher/model/w rng",
        "w critic/model/w",
        "a/model/w b/model/w",
        "model/w v_head.w",
        "ema/model/w step.w",
        "ema/w optimus.w",
        "net/w losses",
    ):
        with no_checkpoint(r"Give --prefix \(dcp_prefix\)"):
            chosen(*paths.split())
    with no_checkpoint(r"holds no tensors of a model; .* 'optim\.state\.w\.'"):
        chosen()


def test_a_prefix_says_which() -> None:
    assert chosen("actor/w", "critic/w", prefix="actor.") == {"actor.w": "w"}
    assert chosen("model/a/w", "model/b/w", prefix="model.") == {
        "model.a.w": "a.w",
        "model.b.w": "b.w",
    }
    assert chosen("model/w", "other", prefix="") == {"other": "other"}
    for prefix in ("ref.", ""):
        with no_checkpoint("has no tensor"):
            chosen("model/w", prefix=prefix)


def test_extra_state_is_left_out_and_anything_else_in_the_model_is_an_error(tmp_path: Path) -> None:
    extra = SavedName(("model", "a._extra_state"), None)
    nested = SavedName(("model", "_extra_state", "amax"), 1)
    expected = {"model.w": "w", "model.my_extra_state": "my_extra_state"}
    assert chosen("model/w", "model/my_extra_state", extra=extra, nested=nested) == expected
    checkpoint = small()
    checkpoint.add_bytes("model", "a._extra_state")
    checkpoint.add_bytes("lr_scheduler", "x")
    build(checkpoint.write(tmp_path / "fine"), tmp_path / "out")
    checkpoint.add_bytes("model", "config")
    refuses(checkpoint.write(tmp_path / "wrong"), r"'model\.config' is in the model's state dict")


def test_without_a_planners_word_names_are_as_they_are(tmp_path: Path) -> None:
    checkpoint = small()
    checkpoint.paths = None
    build(checkpoint.write(tmp_path / "save"), tmp_path / "out")
    assert loaded(tmp_path / "out").keys() == {"model.weight", "model.scale"}
    build(tmp_path / "save", tmp_path / "out2", prefix="model.")
    assert loaded(tmp_path / "out2").keys() == {"weight", "scale"}


def test_merge_takes_a_prefix(tmp_path: Path) -> None:
    checkpoint = small()
    checkpoint.add(("critic", "weight"), floats(9), (1,))
    folder = checkpoint.write(tmp_path / "save")
    out = tmp_path / "out"
    result = invoke("merge", folder, out, "--prefix", "critic.")
    assert result.exit_code == 0, result.output
    assert_equal(loaded(out), {"weight": torch.tensor([9.0])})


def test_an_optimizer_in_hugging_face_files_is_an_error_without_a_prefix(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(2)}, "optim": {"w": torch.ones(2)}}
    folder = save_hf(state, tmp_path / "save", save_distributed=True)  # type: ignore[arg-type]
    with no_checkpoint(r"also holds 'optim\.w'"):
        build(folder, tmp_path / "out")
    build(folder, tmp_path / "out2", prefix="model.")
    assert_equal(loaded(tmp_path / "out2"), {"w": torch.ones(2)})
    with no_checkpoint(r"no tensor whose name begins with 'actor\.'"):
        build(folder, tmp_path / "out3", prefix="actor.")


# -- when it is whole -----------------------------------------------------------------------------


def look(folder: Path) -> Save:
    return look_at_save(STORAGE, folder, 1)


def test_another_save_in_the_same_folder_is_another_identity(tmp_path: Path) -> None:
    folder = small().write(tmp_path)
    known = {look(folder).identity}
    for name in (".metadata", "__1_0.distcp"):
        (folder / name).write_bytes((folder / name).read_bytes() + b" ")
        known.add(look(folder).identity)
    (folder / "__2_0.distcp").touch()
    known.add(look(folder).identity)
    assert len(known) == 4
    assert None not in known


# -- files that were made to do harm --------------------------------------------------------------


def _place(**changed: object) -> Callable[[Checkpoint], None]:
    return lambda checkpoint: checkpoint.places[0][2].update(changed)


def _store(**changed: object) -> Callable[[Checkpoint], None]:
    return lambda checkpoint: checkpoint.stored["model.weight"].state.update(changed)


def _chunk(**changed: object) -> Callable[[Checkpoint], None]:
    return lambda checkpoint: checkpoint.chunks["model.weight"][0].state.update(changed)


def _cut(count: int) -> Callable[[Checkpoint], None]:
    def cut(checkpoint: Checkpoint) -> None:
        del checkpoint.files[FILE][-count:]

    return cut


def _swap(checkpoint: Checkpoint) -> None:
    first, third = checkpoint.places[0][2], checkpoint.places[2][2]
    first["offset"], third["offset"] = third["offset"], first["offset"]


WRONG: dict[str, tuple[Callable[[Checkpoint], None], str]] = {
    "cut by one": (_cut(1), r"the file has only \d+ bytes"),
    "cut by an item": (_cut(400), "the file has only"),
    **{
        kind: (_place(relative_path=path), "no .distcp file of this folder")
        for kind, path in {
            "upwards": "../x.distcp",
            "absolute": "/etc/x.distcp",
            "in a folder": "a/x.distcp",
            "hidden": ".x.distcp",
            "another kind": "x.pt",
        }.items()
    },
    "no name": (_place(relative_path=3), "lies in 'a int', which is no .distcp file"),
    "not there": (_place(relative_path="__7_0.distcp"), "__7_0.distcp is not there"),
    "negative": (_place(offset=-1), "impossible offset"),
    "negative length": (_place(length=-1), "impossible offset"),
    "too large": (_place(offset=2**63 - 1), "impossible offset"),
    "sum too large": (_place(offset=2**62, length=2**62), "impossible offset"),
    "beyond the file": (_place(offset=2**62), "the file has only"),
    "true": (_place(offset=True), "impossible offset"),
    "overlap": (_place(offset=1), "overlap in __0_0.distcp"),
    "other bytes": (_place(length=40), "cannot be read"),
    "nothing": (_place(length=0), "cannot be read"),
    "swapped": (_swap, "overlap|cannot be read|is F32"),
    "twice": (
        lambda given: given.places.append(given.places[0]),
        "lists an item of 'model.weight' twice",
    ),
    "compressed": (_place(transform_descriptors=["zstd"]), "was transformed while it was written"),
    "another dtype": (_store(properties=properties("int32")), r"is F32 \(2, 2\)"),
    "no dtype": (_store(properties=None), "cannot be read"),
    "a dtype that is none": (
        _store(properties=properties("complex128")),
        "has dtype complex128, which syncd does not merge",
    ),
    "no shape": (_store(size=None), "has no shape"),
    "another shape": (_store(size=size((4, 3))), "in no file|must be"),
    "smaller": (_store(size=size((3, 2))), "has size 3"),
    "huge": (_store(size=size((2**62, 2**62))), "in no file"),
    "fewer dimensions": (_store(size=size((8,))), "a chunk with wrong dimensions"),
    "another chunk": (_chunk(sizes=size((1, 4))), r"is F32 \(2, 2\), but .metadata says"),
    "a chunk elsewhere": (_chunk(offsets=size((1, 0))), r"at \(1, 0\) is in no file"),
    "a chunk of no kind": (_chunk(offsets=None), "a chunk with wrong dimensions"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_wrong_is_an_error_that_says_what(tmp_path: Path, kind: str) -> None:
    break_it, said = WRONG[kind]
    checkpoint = small()
    break_it(checkpoint)
    folder = checkpoint.write(tmp_path / "save")
    with no_checkpoint(said) as caught:
        build(folder, tmp_path / "out")
    assert len(str(caught.value)) < 700 + len(str(folder))


def test_a_pickle_that_asks_for_code_runs_nothing(tmp_path: Path) -> None:
    evil = Built(Named("os", "system"), (f"touch {tmp_path}/ran",))
    folder = small().write(tmp_path / "save", version=evil)
    refuses(folder, r"asks for os\.system, which is refused\. No code was run")
    folder = small().write(tmp_path / "fine" / "save")
    content = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(content.replace(b"_rebuild_tensor_v2", b"_rebuild_tensor_v9"))
    refuses(folder, "does not match its CRC-32")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [b"", b"N.", b"}.", b"no pickle", None, [1]])
def test_what_is_no_metadata_is_an_error(tmp_path: Path, content: object) -> None:
    folder = small().write(tmp_path / "save", storage_data=content)
    if isinstance(content, bytes):
        (folder / ".metadata").write_bytes(content)
    refuses(folder, r"is not the metadata of torch|cannot be read")


@pytest.mark.parametrize("name", [FILE, ".metadata"])
def test_links_are_not_followed(tmp_path: Path, name: str) -> None:
    folder = small().write(tmp_path / "save")
    (folder / name).rename(tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", folder / name)
    with pytest.raises((CheckpointError, SaveNotReadyError, OSError)):
        build(folder, tmp_path / "out")


def test_every_bit_of_the_model_is_checked_and_none_of_the_optimizer(tmp_path: Path) -> None:
    state = {"model": {"w": torch.arange(3000.0)}, "optim": {"m": torch.arange(3000.0) + 5000}}
    folder = save(state, tmp_path / "save")
    content = (folder / FILE).read_bytes()
    for name, value in (("w", 2999.0), ("m", 7999.0)):
        at = content.index(floats(value - 1, value))
        (folder / FILE).write_bytes(content[:at] + b"\1" + content[at + 1 :])
        if name == "m":
            build(folder, tmp_path / "out")
            assert_equal(loaded(tmp_path / "out"), {"w": torch.arange(3000.0)})
        else:
            refuses(folder, r"data/0 of 'w' at byte \d+ does not match its CRC-32")


# -- announcing -----------------------------------------------------------------------------------


def test_a_save_is_announced_once_it_is_done(tmp_path: Path) -> None:
    job = tmp_path / "job"
    job.mkdir()
    with pytest.raises(SaveNotReadyError, match="Announce a save only when it is complete"):
        announce_dcp(job, 3)
    small().write(job / "global_step_3" / "actor")
    announce_dcp(job, 3)
    assert (job / "latest_state_dict_iteration.txt").read_text() == "3\n"
    assert not (job / "latest_checkpointed_iteration.txt").exists()


def test_a_save_elsewhere_is_announced_by_second_names(tmp_path: Path) -> None:
    job, own = tmp_path / "job", small().write(tmp_path / "step-3")
    job.mkdir()
    actor = job / "global_step_3" / "actor"
    for _ in range(2):
        announce_dcp(job, 3, folder=own)
        assert {path.name for path in actor.iterdir()} == {".metadata", FILE, "__1_0.distcp"}
        assert (actor / FILE).samefile(own / FILE)
    assert (actor.parent / ".retired").exists()
    assert (job / "latest_checkpointed_iteration.txt").read_text() == "3\n"


def test_a_save_on_another_filesystem_cannot_be_announced(tmp_path: Path) -> None:
    own = small().write(tmp_path / "step-3")
    (tmp_path / "job").mkdir()

    class OtherDisk(Storage):
        def link(self, source: Path, target: Path) -> None:
            if target.name.endswith(".distcp"):
                raise os_error(errno.EXDEV, source)
            super().link(source, target)

    with invalid(r"cannot be hard-linked into .* link\). Save into"):
        announce_dcp(tmp_path / "job", 3, folder=own, storage=OtherDisk(durable=False))
    assert not (tmp_path / "job" / "latest_state_dict_iteration.txt").exists()


# -- what is never deleted ------------------------------------------------------------------------


@pytest.mark.parametrize("model_only", [True, False])
def test_a_checkpoint_counts_as_all_there_is_unless_it_was_seen_to_be_a_model_alone(
    tmp_path: Path, *, model_only: bool
) -> None:
    small().write(tmp_path / "actor")
    outcome = SaveOutcome(identity="x", outcome="published", model_only=model_only)

    def is_resumable() -> bool:
        seen = look_at_step(STORAGE, tmp_path, 1, outcome)
        assert seen is not None
        return seen.resumable

    assert is_resumable() is not model_only
    # Whatever else is there to resume from.
    (tmp_path / "actor" / "optim_world_size_1_rank_0.pt").touch()
    assert is_resumable()


def test_each_file_of_a_checkpoint_says_that_it_is_one() -> None:
    for name in (".metadata", "__0_0.distcp", "__0.metadata", "x.distcp"):
        assert is_resumable_state(name)
    for name in ("metadata", "model.safetensors", "shard-00001-model-00001-of-00001.safetensors"):
        assert not is_resumable_state(name)


def test_a_model_alone_is_told_from_one_with_anything_else(tmp_path: Path) -> None:
    def is_alone(checkpoint: Checkpoint, prefix: str | None = None) -> bool:
        checkpoint.write(tmp_path)
        return holds_model_only(STORAGE, tmp_path, prefix=prefix, cancel=nothing)

    assert is_alone(small())
    checkpoint = small()
    checkpoint.add_bytes("model", "a._extra_state")
    assert is_alone(checkpoint)
    checkpoint.add_bytes("train_state", "step")
    assert not is_alone(checkpoint)
    assert not is_alone(checkpoint, "other.")
    checkpoint = small()
    checkpoint.add(("optim", "m"), floats(1), (1,))
    assert not is_alone(checkpoint)
    assert not is_alone(checkpoint, "model.")
    (tmp_path / ".metadata").write_bytes(b"torn")
    assert not holds_model_only(STORAGE, tmp_path, prefix=None, cancel=nothing)
