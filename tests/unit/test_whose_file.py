"""Of several writers' files in a step folder the one counts that belongs to the weights."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from syncd.checkpoint.save import look_at_save
from syncd.daemon.config import DaemonConfig
from syncd.protocol.names import shard_name
from syncd.protocol.records import Manifest
from syncd.storage.fsio import Storage
from tests.commands import invoke
from tests.jobs import SmallJob
from tests.merging import assert_equal, build, loaded
from tests.refusals import no_checkpoint
from tests.storages import Clock
from tests.tiny_language import SIZES
from trainer_hooks import SaveSettings, TrainerHook, load_checkpoint

#: The configs of adapters; the first one is the plain LoRA of most tests.
METHODS: dict[str, Any] = {
    "LoRA": LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj"], init_lora_weights=False),
    "of all kinds": LoraConfig(
        r=2,
        target_modules=["q_proj", "o_proj", "embed_tokens"],
        modules_to_save=["lm_head"],
        bias="lora_only",
        use_dora=True,
        init_lora_weights=False,
    ),
    "with trained tokens": LoraConfig(
        r=2, target_modules=["q_proj"], trainable_token_indices=[1, 2], init_lora_weights=False
    ),
    "with embeddings": LoraConfig(r=2, target_modules=["q_proj", "embed_tokens", "lm_head"]),
    "IA3": IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"]),
}


def base(*, tied: bool = False) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=tied))


def peft(config: Any, seed: int = 1) -> PeftModel:
    tied = getattr(config, "trainable_token_indices", None) is not None
    model = get_peft_model(base(tied=tied), config)
    torch.manual_seed(seed)
    with torch.no_grad():
        for value in model.parameters():
            if value.requires_grad:
                value.add_(torch.randn_like(value))
    return model


def shards(state: dict[str, Tensor], actor: Path) -> None:
    torch.save(state, actor / shard_name(1, 0))


def full(state: dict[str, Tensor], actor: Path, name: str = "model.safetensors") -> None:
    (actor / name).parent.mkdir(parents=True, exist_ok=True)
    save_file({key: value.clone() for key, value in state.items()}, actor / name)


def parts(state: dict[str, Tensor], actor: Path, folder: str = "") -> None:
    for at in (0, 1):
        own = dict(list(state.items())[at::2])
        full(own, actor, f"{folder}model-0000{at + 1}-of-00002.safetensors")


#: The forms in which other trainers leave weights.
FORMS: dict[str, Callable[[dict[str, Tensor], Path], object]] = {
    "shards": shards,
    "a full state dict": full,
    "files": parts,
    "DCP": lambda state, actor: dcp.save({"model": state}, checkpoint_id=str(actor)),
    "a model for people": lambda state, actor: full(state, actor, "huggingface/model.safetensors"),
    "its files": lambda state, actor: parts(state, actor, "huggingface/"),
    "a model of Megatron's": lambda state, actor: parts(state, actor, "model/huggingface/"),
}
every_form = pytest.mark.parametrize("form", FORMS)


def actor_in(root: Path) -> Path:
    actor = root / "global_step_4" / "actor"
    (actor / "huggingface").mkdir(parents=True)
    base().config.save_pretrained(actor / "huggingface")
    return actor


def merged(actor: Path) -> tuple[Manifest, dict[str, Tensor]]:
    out = actor.parent.parent / "out"
    return build(actor, out), loaded(out)


@every_form
@pytest.mark.parametrize("weights", ["adapter_model.safetensors", "adapter_model.bin", "both"])
def test_weights_without_an_adapters_tensors_count_and_an_older_adapter_does_not(
    tmp_path: Path, form: str, weights: str
) -> None:
    actor, state = actor_in(tmp_path), base().state_dict()
    peft(METHODS["LoRA"]).save_pretrained(actor / "lora_adapter")
    made = actor / "lora_adapter" / "adapter_model.safetensors"
    if weights != made.name:
        shutil.copy(made, made.with_suffix(".bin"))
    if weights == "adapter_model.bin":
        made.unlink()
    shutil.copy(actor / "lora_adapter" / "adapter_config.json", actor / "huggingface")
    FORMS[form](state, actor)
    manifest, found = merged(actor)
    assert manifest.kind == "full"
    assert_equal(found, state)
    assert not (tmp_path / "out" / "adapter_config.json").exists()


@every_form
@pytest.mark.parametrize("method", METHODS)
def test_an_adapter_counts_beside_weights_that_hold_it(
    tmp_path: Path, form: str, method: str
) -> None:
    actor, model = actor_in(tmp_path), peft(METHODS[method])
    model.save_pretrained(actor / "lora_adapter")
    FORMS[form](model.state_dict(), actor)
    manifest, found = merged(actor)
    assert manifest.kind == "adapter"
    assert_equal(found, load_file(actor / "lora_adapter" / "adapter_model.safetensors"))


OTHERS: dict[str, Callable[[], PeftModel]] = {
    "values": lambda: peft(METHODS["LoRA"], seed=2),
    "a rank": lambda: peft(LoraConfig(r=4, target_modules=["q_proj"])),
    "more modules": lambda: peft(LoraConfig(r=2, target_modules=["q_proj", "k_proj"])),
    "other modules": lambda: peft(LoraConfig(r=2, target_modules=["k_proj"])),
    "a method": lambda: peft(METHODS["IA3"]),
    "a dtype": lambda: peft(METHODS["LoRA"]).bfloat16(),
}


@every_form
@pytest.mark.parametrize("other", OTHERS)
def test_two_different_adapters_are_refused_by_name(tmp_path: Path, form: str, other: str) -> None:
    actor = actor_in(tmp_path)
    OTHERS[other]().save_pretrained(actor / "lora_adapter")
    FORMS[form](peft(METHODS["LoRA"]).state_dict(), actor)
    with no_checkpoint(r"(?s)adapter.*an older save"):
        merged(actor)


@pytest.mark.parametrize(
    ("key", "value"), [("r", 4), ("r", 1), ("lora_alpha", 7), ("peft_type", "IA3")]
)
@pytest.mark.parametrize("home", ["lora_adapter", "huggingface"])
def test_an_adapters_config_of_another_save_is_refused(
    tmp_path: Path, home: str, key: str, value: object
) -> None:
    """Beside what verl 0.9 has written."""
    actor, config = actor_in(tmp_path), METHODS["LoRA"]
    shards(peft(config).state_dict(), actor)
    told = {"r": 2, "lora_alpha": 6, "task_type": "CAUSAL_LM"}
    (actor / "lora_train_meta.json").write_text(json.dumps(told))
    config.save_pretrained(actor / home)
    path = actor / home / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with no_checkpoint(r"another (rank|lora_alpha)|of type IA3"):
        merged(actor)
    path.unlink()
    shutil.rmtree(tmp_path / "out")
    assert merged(actor)[0].kind == "adapter"


@pytest.mark.parametrize("one", list(FORMS)[:4])
@pytest.mark.parametrize("other", list(FORMS)[:4])
def test_weights_in_two_forms_are_refused_by_name_and_the_daemon_goes_on(
    job: SmallJob, clock: Clock, one: str, other: str
) -> None:
    if one >= other:
        return
    actor, state = job.actor(4), base().state_dict()
    actor.mkdir(parents=True)
    FORMS[one](state, actor)
    FORMS[other](state, actor)
    job.point(4)
    with job.daemon(DaemonConfig(tick=1), clock=clock) as loop:
        loop.rounds(3, 2)
        assert job.outcomes == {4: "quarantined"}
        (record,) = job.layout.quarantine.iterdir()
        assert "Remove the older files" in record.read_text()
        job.save(5)
        loop.rounds(3, 2)
        assert job.latest.step == 5


@pytest.mark.parametrize("form", list(FORMS)[4:])
def test_a_whole_model_for_people_is_copied_if_there_are_no_other_weights(
    job: SmallJob, form: str
) -> None:
    actor, state = job.actor(4), base().state_dict()
    actor.mkdir(parents=True)
    FORMS[form](state, actor)
    (home,) = (path.parent for path in actor.rglob("*.safetensors") if "2-of" not in path.name)
    base().config.save_pretrained(home)
    job.point(4)
    job.run(rounds=3, seconds=5)
    folder = job.version(1)
    assert_equal(loaded(folder), state)
    inodes = [{file.stat().st_ino for file in place.iterdir()} for place in (folder, home)]
    assert inodes[0].isdisjoint(inodes[1])
    assert (folder / "config.json").exists()


@pytest.mark.parametrize(
    ("names", "why", "seconds"),
    [
        (["dist_ckpt/common.pt", "huggingface/config.json"], "Megatron", 5),
        (["model/dist_ckpt/common.pt", "optimizer/dist_ckpt/common.pt"], "Megatron", 5),
        (["fsdp_config.json", "huggingface/config.json"], "only fsdp_config.json, huggingface", 60),
        (["pytorch_model.bin"], "only pytorch_model.bin", 60),
    ],
)
def test_files_that_make_no_version_are_given_up_once_they_lie_still(
    job: SmallJob, clock: Clock, names: list[str], why: str, seconds: float
) -> None:
    for name in names:
        (job.actor(4) / name).parent.mkdir(parents=True, exist_ok=True)
        (job.actor(4) / name).touch()
    job.point(4)
    with job.daemon(DaemonConfig(tick=5), clock=clock) as loop:
        assert why in loop.run_once().waiting_for
        clock.advance(seconds - 1)
        assert why in loop.run_once().waiting_for
        assert not job.layout.saves.exists()
        clock.advance(1)
        loop.run_once()
        assert job.outcomes == {4: "quarantined"}
        FORMS["a model for people"](base().state_dict(), job.actor(4))
        loop.rounds(3, 5)
        assert job.layout.latest.exists() is ("pytorch_model.bin" not in names)
    assert not (set(names) - {str(p.relative_to(job.actor(4))) for p in job.actor(4).rglob("*")})


@pytest.mark.parametrize("layout", ["sharded", "full", "adapter"])
def test_a_copy_without_receipts_resumes_beside_what_an_older_run_has_left(
    job: SmallJob, tmp_path: Path, layout: str
) -> None:
    """A hook's full checkpoint, and files of eight ranks, a critic and an adapter."""
    is_adapter = layout == "adapter"
    config = METHODS["LoRA"]
    model, new = (peft(config, seed) if is_adapter else base() for seed in (1, 2))
    optimizers = [
        torch.optim.AdamW([p for p in one.parameters() if p.requires_grad]) for one in (model, new)
    ]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizers[0].step()
    saving = SaveSettings(layout="sharded" if is_adapter else layout)
    with TrainerHook(job.root, model, optimizer=optimizers[0], saving=saving) as hook:
        hook.save_checkpoint(4, block_until_saved=True)
    copy = tmp_path / "copy"
    shutil.copytree(job.root, copy, ignore=shutil.ignore_patterns(".receipts", ".syncd"))
    actor = copy / "global_step_4" / "actor"
    (actor.parent / "critic").mkdir()
    for name in ("optim", "extra_state", "../critic/model", "../critic/optim"):
        (actor / f"{name}_world_size_8_rank_0.pt").write_bytes(b"of an older run")
    if not is_adapter:
        peft(config).save_pretrained(actor / "lora_adapter")
    assert load_checkpoint(copy, new, optimizer=optimizers[1]) is not None
    assert_equal(new.state_dict(), model.state_dict())
    (saved, loaded) = (next(iter(one.state.values()))["exp_avg"] for one in optimizers)
    assert torch.equal(saved, loaded)
    manifest, found = merged(actor)
    assert manifest.kind == ("adapter" if is_adapter else "full")
    made = actor / "lora_adapter" / "adapter_model.safetensors"
    assert_equal(found, load_file(made) if is_adapter else model.state_dict())


@pytest.mark.parametrize(
    ("other", "is_refused"),
    [("pytorch_model.bin", True), ("actor.pt", True), ("rng_state.pth", False), ("log.txt", False)],
)
def test_a_model_for_people_counts_only_without_weights_that_nobody_reads(
    tmp_path: Path, other: str, *, is_refused: bool
) -> None:
    actor = actor_in(tmp_path)
    FORMS["a model for people"](base().state_dict(), actor)
    (actor / other).touch()
    assert ("Remove the older files" in look_at_save(Storage(), actor, 4).reason) is is_refused


@pytest.mark.parametrize("form", list(FORMS)[4:])
@pytest.mark.parametrize("foreign", [True, False])
def test_a_model_for_people_is_neither_pruned_nor_converted(
    job: SmallJob, form: str, *, foreign: bool
) -> None:
    for step in (4, 5, 6):
        job.actor(step).mkdir(parents=True)
        FORMS[form](base().state_dict(), job.actor(step))
        (job.actor(step) / "optim_world_size_1_rank_0.pt").touch()
        (job.actor(step) / "optim_world_size_1_rank_0.pt").rename(job.step(step) / "optimizer.pt")
        job.point(step)
        job.run(DaemonConfig(prune_foreign=foreign), rounds=3, seconds=5)
    assert job.latest.step == 6
    assert all((job.step(step) / "optimizer.pt").exists() for step in (4, 5, 6))
    (job.actor(4) / "optim_world_size_1_rank_0.pt").touch()
    before = sorted(job.actor(4).rglob("*"))
    assert "is a Hugging Face model already" in str(invoke("convert", job.step(4)).exception)
    assert sorted(job.actor(4).rglob("*")) == before


def test_what_syncd_has_converted_is_no_save(job: SmallJob) -> None:
    """Also if only this is kept."""
    actor = job.actor(4)
    actor.mkdir(parents=True)
    shards(base().state_dict(), actor)
    (actor / "optim_world_size_1_rank_0.pt").touch()
    assert invoke("convert", job.step(4)).exit_code == 0
    (actor / shard_name(1, 0)).unlink()
    assert look_at_save(Storage(), actor, 4).identity is None


@pytest.mark.parametrize("kind", ["folder", "link", "pipe"])
@pytest.mark.parametrize("name", ["lora_train_meta.json", "lora_adapter/adapter_model.safetensors"])
def test_what_is_no_file_beside_weights_that_need_none_does_not_count(
    tmp_path: Path, name: str, kind: str
) -> None:
    actor, state = actor_in(tmp_path), base().state_dict()
    shards(state, actor)
    (actor / name).parent.mkdir(exist_ok=True)
    if kind == "folder":
        (actor / name).mkdir()
    elif kind == "link":
        (actor / name).symlink_to("nowhere")
    else:
        os.mkfifo(actor / name)
    assert_equal(merged(actor)[1], state)
