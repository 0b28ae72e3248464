"""A tensor may have any name that a safetensors file can hold, and keeps it; others are errors."""

import json
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import nn

from syncd.checkpoint.merging.merge import run_plan
from syncd.checkpoint.merging.options import MergeOptions, Work
from syncd.checkpoint.merging.plan import plan_merge
from syncd.checkpoint.model_folder import write_index
from syncd.checkpoint.placement import Local, Position
from syncd.checkpoint.sandbox.isolated import IsolatedParser
from syncd.checkpoint.torch_files.shard_file import ShardFile
from syncd.checkpoint.whole_files import Merged
from syncd.protocol.errors import ShardFormatError
from syncd.protocol.names import MANIFEST, shard_name
from syncd.protocol.records import Manifest
from tests.jobs import SmallJob, nothing, read, weights
from tests.merging import build
from tests.products import product
from tests.refusals import malformed, no_checkpoint, uncovered
from tests.storages import STORAGE
from trainer_hooks import TrainerHook

#: Names that something on the way might take for something else, and that are only names.
ODD = (
    "", " ", "  leading and trailing  ", ".", "..", "/", "../../etc/passwd", "data/0", "data.pkl",
    "archive/data.pkl", "__metadata__x", "__METADATA__", "__metadata__.weight", "weight_map",
    "_extra_state.weight", "_flat_param.weight", "true", "null", "0", "-1", "1e999", "{}", "[]",
    "{0} %s $HOME `id`",
    "it's", 'a "quoted" name', "back\\slash", "\\u0041", "a,b:c;d", "<b>&amp;</b>",
    "caf\u00e9", "cafe\u0301",  # one text to a reader, two names
    "模型.层.0", "🤖", "\u202egnp.exe", "\u200f", "\u200b", "\ufeff", "\u2028", "\ufffd", "\uffff",
    "\U0010ffff", "x" * 1000, "é" * 1000, "🤖" * 1000,
)  # fmt: skip

#: Names that are refused, and how the error calls what is wrong with them.
REFUSED: dict[Any, str] = {
    "__metadata__": "'__metadata__' has the name of safetensors' own metadata",
    "half a pair \ud83e": r"'half a pair \ud83e' is a key that is not text",
    "\udd16 the other half": r"'\udd16 the other half' is a key that is not text",
    "\0": r"'\x00' is a name with control characters",
    "two\nlines": r"'two\nlines' is a name with control characters",
    "\x1b[31mred": r"'\x1b[31mred' is a name with control characters",
    "é\t": r"'é\t' is a name with control characters",
    "\x7f": r"'\x7f' is a name with control characters",
    "\x9b31m": r"'\x9b31m' is a name with control characters",
    "x" * 1001: f"'{'x' * 200}…' is a name of 1001 characters, over the limit of 1000",
    "🤖" * 1001: f"'{'🤖' * 200}…' is a name of 1001 characters, over the limit of 1000",
    7: "a int is a key that is not text",
    None: "a NoneType is a key that is not text",
    ("layer", 0): "a tuple is a key that is not text",
}

#: What is no tensor of the model has a name that ends so, and is left out or refused.
SPECIAL = ("_extra_state", "_flat_param")

legal = st.text(st.characters(exclude_categories=["Cc", "Cs"]), max_size=40).filter(
    lambda name: name != "__metadata__" and not name.endswith(SPECIAL)
)
#: Text with one character in it that no name may have.
refused = st.builds(
    "{}{}{}".format,
    legal,
    st.characters(categories=["Cc"]) | st.integers(0xD800, 0xDFFF).map(chr),
    legal,
)
PROPERTY = settings(max_examples=100)


def save(path: Path, names: Any) -> dict[Any, torch.Tensor]:
    """A shard by torch with a tensor of its own for each name."""
    state = {name: torch.tensor([number]) for number, name in enumerate(names)}
    torch.save(state, path)
    return state


def merge(shards: list[ShardFile], folder: Path, max_file_size: int = 10**9) -> Merged:
    plan = plan_merge([(s.path.name, s.tensors()) for s in shards], max_file_size=max_file_size)
    options, work = MergeOptions(), Work(nothing)
    return run_plan(STORAGE, plan, shards, folder, options=options, checked="crc32", work=work)


def loaded(folder: Path) -> dict[str, int]:
    """What the safetensors library reads; where there are several files, as the index says."""
    found, files = {}, {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a dict
                found[name], files[name] = int(opened.get_tensor(name)), path.name
    index = folder / "model.safetensors.index.json"
    if index.exists():
        assert json.loads(index.read_text())["weight_map"] == files
    return found


# -- names that are kept -----------------------------------------------------------------------


@PROPERTY
@given(names=st.lists(legal, min_size=1, max_size=8, unique=True), max_file_size=st.integers(1, 80))
@example(names=list(ODD), max_file_size=80)
def test_a_name_comes_out_of_a_merge_as_it_was_saved(
    child: IsolatedParser, names: list[str], max_file_size: int
) -> None:
    with tempfile.TemporaryDirectory() as root:
        path, folder = Path(root) / "shard.pt", Path(root) / "out"
        save(path, names)
        folder.mkdir()
        with ShardFile.open(STORAGE, path) as here, ShardFile.open(STORAGE, path) as there:
            found = here.tensors()
            assert list(found) == names
            assert list(there.tensors(parse=child.read_pieces).items()) == list(found.items())
            merged = merge([here], folder, max_file_size)
        write_index(STORAGE, folder, merged)
        assert loaded(folder) == {name: number for number, name in enumerate(names)}


def test_odd_names_are_kept_from_the_save_to_the_manifest(tmp_path: Path) -> None:
    """As ``syncd merge`` does it, with the pickle read in a child process."""
    actor, out = tmp_path / "actor", tmp_path / "out"
    actor.mkdir()
    for rank in range(2):
        save(actor / shard_name(2, rank), ODD)
    build(actor, out, max_file_size=80)
    assert loaded(out) == {name: number for number, name in enumerate(ODD)}
    manifest = read(Manifest, out / MANIFEST)
    assert sorted(tensor.name for tensor in manifest.tensors) == sorted(ODD)


def test_extra_state_is_left_out_by_the_last_part_of_its_name_alone(tmp_path: Path) -> None:
    path, kept = tmp_path / "shard.pt", ["_extra_state.weight", "_extra_state ", "a.my_extra_state"]
    save(path, ["layer._extra_state", "_extra_state", *kept])
    with ShardFile.open(STORAGE, path) as opened:
        assert list(opened.tensors()) == kept


@pytest.mark.parametrize("prefix", [None, "model."])
@pytest.mark.parametrize(
    ("saved", "plain"),
    [
        (["_orig_mod.a.w", "_orig_mod.b"], ["a.w", "b"]),
        (["layers.0._orig_mod.w", "norm.w"], ["layers.0.w", "norm.w"]),
        (["a._checkpoint_wrapped_module._orig_mod._fsdp_wrapped_module.w"], ["a.w"]),
        (["module._orig_mod.w", "module._orig_mod.module.a"], ["w", "module.a"]),
        (["_orig_mod.module.module.w"], ["w"]),
        (["module.w", "head.w"], ["module.w", "head.w"]),
        (["a._orig_mod", "my_orig_mod.w"], ["a._orig_mod", "my_orig_mod.w"]),
    ],
)
def test_wrappers_names_are_left_out(
    tmp_path: Path, saved: list[str], plain: list[str], prefix: str | None
) -> None:
    actor, out = tmp_path / "actor", tmp_path / "out"
    actor.mkdir()
    if prefix is None:
        save(actor / shard_name(1, 0), saved)
    else:
        state = {name: torch.tensor([number]) for number, name in enumerate(saved)}
        dcp.save({"model": state}, checkpoint_id=actor, no_dist=True)
    build(actor, out, prefix=prefix)
    assert loaded(out) == {name: number for number, name in enumerate(plain)}


def test_a_name_that_two_tensors_would_have_without_wrappers_is_an_error(tmp_path: Path) -> None:
    save(tmp_path / shard_name(1, 0), ["a.w", "a._orig_mod.w"])
    with uncovered("two tensors would have the same name"):
        build(tmp_path, tmp_path / "out")


def test_a_hook_has_left_out_module_itself(job: SmallJob) -> None:
    model = nn.Module()
    model.module = nn.Linear(2, 2)
    with TrainerHook(job.root, model) as hook:
        hook.after_step(1)
    build(job.actor(1), job.root / "out")
    with safe_open(job.root / "out" / "model.safetensors", "pt") as opened:
        assert set(opened.keys()) == {"module.weight", "module.bias"}


# -- names that are refused --------------------------------------------------------------------


def refusal(path: Path, child: IsolatedParser) -> str:
    """What both ways of reading say of a shard, which is the same."""
    messages = []
    for parse_ in ({}, {"parse": child.read_pieces}):
        with (
            ShardFile.open(STORAGE, path) as opened,
            pytest.raises(ShardFormatError) as caught,
        ):
            opened.tensors(**parse_)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    return messages[0]


@pytest.mark.parametrize("name", REFUSED, ids=lambda name: ascii(name)[:20])
def test_a_name_that_cannot_be_kept_is_an_error_that_names_file_and_tensor(
    child: IsolatedParser, tmp_path: Path, name: Any
) -> None:
    path = tmp_path / "shard.pt"
    save(path, ["good", name])
    assert refusal(path, child) == f"{path}: {REFUSED[name]}"


@PROPERTY
@given(name=refused)
def test_an_error_shows_a_name_that_cannot_be_kept_so_that_any_terminal_can(
    child: IsolatedParser, name: str
) -> None:
    with tempfile.TemporaryDirectory() as root:
        path = Path(root) / "shard.pt"
        save(path, [name])
        message = refusal(path, child)
    assert message.startswith(f"{path}: '")
    assert message.isprintable()


def save_shard(actor: Path, name: str) -> None:
    torch.save({name: torch.zeros(1)}, actor / shard_name(1, 0))


def save_dcp(actor: Path, name: str) -> None:
    dcp.save({"model": {name: torch.zeros(1)}}, checkpoint_id=actor, no_dist=True)


def save_one_file(actor: Path, name: str) -> None:
    (actor / "model.safetensors").write_bytes(weights(1.0, name=name))


def save_parts(actor: Path, name: str) -> None:
    (actor / "model-00001-of-00001.safetensors").write_bytes(weights(1.0, name=name))


def save_adapter(actor: Path, name: str) -> None:
    (actor / "lora_adapter").mkdir()
    (actor / "lora_adapter" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (actor / "lora_adapter" / "adapter_model.safetensors").write_bytes(weights(1.0, name=name))


@pytest.mark.parametrize(
    ("save_", "name"),
    product(
        [save_shard, save_dcp, save_one_file, save_parts, save_adapter],
        ["weight\n", "\x1b[2Jweight", "w\x7f", "\x9b31m"],
        usual=lambda save_, name: save_ is save_shard or name == "\x1b[2Jweight",
    ),
)
def test_control_characters_in_a_name_are_refused_in_every_kind_of_save(
    tmp_path: Path, save_: Callable[[Path, str], None], name: str
) -> None:
    actor = tmp_path / "actor"
    actor.mkdir()
    save_(actor, name)
    with malformed("is a name with control characters") as caught:
        build(actor, tmp_path / "out")
    assert str(caught.value).startswith(str(actor))
    assert_quiet(caught)


def test_a_foreign_save_with_control_characters_in_a_name_is_quarantined(job: SmallJob) -> None:
    with job.daemon() as loop:
        job.save(1, receipts=False)
        (job.actor(1) / "model.safetensors").write_bytes(weights(1.0, name="a\x1b[2J"))
        loop.rounds(40, 5)
    assert "is a name with control characters" in job.refused.reason
    assert not job.layout.latest.exists()


@pytest.mark.parametrize(
    "name", ["a\nb.json", "\x1b[2J.json", "\x7f.json", "\x9b31m.json"], ids=ascii
)
def test_a_file_whose_name_has_control_characters_is_not_published(
    tmp_path: Path, name: str
) -> None:
    actor = tmp_path / "actor"
    (actor / "huggingface").mkdir(parents=True)
    save_one_file(actor, "weight")
    (actor / "huggingface" / name).write_text("{}")
    with no_checkpoint("cannot be the name of a published file") as caught:
        build(actor, tmp_path / "out")
    assert_quiet(caught)


# -- names in messages -------------------------------------------------------------------------

#: Names that would do something to a terminal or a log, or fill it.
LOUD = ("\u202egnp", "\u2066red", "\u2028", "🤖" * 1000)


def local(size: int, position: Position | None = None) -> Local:
    return Local("F32", (size,), 0, 4 * size, "data/0", position)


def assert_quiet(caught: pytest.ExceptionInfo[Exception]) -> None:
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 1000


each_name = pytest.mark.parametrize("name", LOUD, ids=lambda name: ascii(name)[:10])


@each_name
def test_a_plan_that_fails_shows_a_name_so_that_any_terminal_can(name: str) -> None:
    shards = [(f"rank {size}", {name: local(size)}) for size in (2, 3)]
    with uncovered("but a plain F32 tensor") as caught:
        plan_merge(shards, max_file_size=10**9)
    assert_quiet(caught)


@each_name
def test_a_gap_or_a_clash_shows_a_name_so_that_any_terminal_can(name: str) -> None:
    with uncovered("rows 1 to 3 are in no file") as caught:
        plan_merge([("rank 0", {name: local(1, Position((4,), (0,)))})], max_file_size=10**9)
    assert_quiet(caught)
    with uncovered("would both get the name") as caught:
        plan_merge(
            [("rank 0", {"weight": local(1), name: local(1)})],
            max_file_size=10**9,
            rename=lambda _: name,
        )
    assert_quiet(caught)


@each_name
def test_a_tensor_that_differs_is_shown_so_that_any_terminal_can(tmp_path: Path, name: str) -> None:
    (tmp_path / "out").mkdir()
    with ExitStack() as stack:
        shards = []
        for rank in range(2):
            path = tmp_path / shard_name(2, rank)
            torch.save({name: torch.tensor(rank)}, path)
            shards.append(stack.enter_context(ShardFile.open(STORAGE, path)))
        with uncovered("differs between ranks") as caught:
            merge(shards, tmp_path / "out")
    assert_quiet(caught)
