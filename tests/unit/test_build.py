import errno
import json
import re
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import save
from torch import nn

from explorer_hooks.engines.torch_module import TorchModule
from explorer_hooks.reader import Reader
from syncd.checkpoint.safetensors_file import SafetensorsFile
from syncd.checkpoint.safetensors_header import HeaderEntry, header_bytes
from syncd.checkpoint.version import read_manifest, verify_version
from syncd.daemon.config import DaemonConfig
from syncd.protocol.errors import SupersededError
from syncd.protocol.names import part_name, shard_name
from syncd.protocol.records import Manifest, ReceiptFile
from syncd.storage.calls import Free
from tests.commands import invoke
from tests.jobs import SmallJob, receipt_of
from tests.refusals import unfit
from tests.shards import shard, tensor
from tests.storages import Clock, FastStorage, RuledStorage, once, refuse


def test_a_superseded_daemon_leaves_its_successors_notice(job: SmallJob) -> None:
    def take_over(*_: object) -> None:
        job.take_over().replace_file(job.layout.publish_lock, b"the successor's")

    job.storage = RuledStorage(once("rename", take_over, where="published/v000001"))
    job.save(4)
    with pytest.raises(SupersededError), job.daemon() as loop:
        loop.run_once()
    assert job.layout.publish_lock.read_bytes() == b"the successor's"


def test_a_later_save_of_the_published_step_stays_quarantined_for_the_next_daemon(
    job: SmallJob, clock: Clock
) -> None:
    job.save(4)
    job.run()
    (job.actor(4) / ".receipts" / "rank_0.json").unlink()
    (job.actor(4) / ".receipts").rmdir()
    job.put(job.actor(4) / "model.safetensors", b"x" * 64)
    job.point(4)
    tried = []
    for _ in range(3):
        with job.daemon(clock=clock) as loop:
            for _ in range(3):
                tried.extend(loop.run_once().actions)
                clock.advance(5)
    assert len(tried) == 1
    assert job.outcomes == {4: "quarantined"}
    assert read_manifest(job.storage, job.version(1)).step == 4


# -- adapters ----------------------------------------------------------------------------------

Q = "base_model.model.q"
CONFIG = b'{"peft_type": "LORA", "bias": "none"}'
#: A PEFT model; each tensor is a record of its own.
PEFT = [
    f"{Q}.base_layer.weight",
    f"{Q}.base_layer.bias",
    f"{Q}.lora_A.default.weight",
    f"{Q}.lora_B.default.weight",
    "base_model.model.score.original_module.weight",
    "base_model.model.score.modules_to_save.default.weight",
]
#: What PEFT saves of it: its name, and which record it is.
SAVED = {f"{Q}.lora_A.weight": 2, f"{Q}.lora_B.weight": 3, "base_model.model.score.weight": 5}
FROZEN = ("model.norm.weight", "model.q_proj.base_layer.weight")
SHARD = shard_name(1, 0)
LORA = "lora_adapter/adapter_model.safetensors"
TOLD = "lora_adapter/adapter_config.json"
BASE = {"huggingface/config.json": b"{}", "huggingface/tokenizer.json": b"tokens"}


def bytes_of(record: int) -> bytes:
    return bytes([record + 1]) * 24


def shard_of(*names: str) -> bytes:
    state = {name: tensor(key=str(number)) for number, name in enumerate(names)}
    return shard(state, **{f"data/{number}": bytes_of(number) for number in range(len(names))})


def file_of(*names: str) -> bytes:
    """A safetensors file."""
    entries = (HeaderEntry(name, "F32", (1,), 4 * at, 4 * at + 4) for at, name in enumerate(names))
    return header_bytes(entries) + bytes(4 * len(names))


#: Of a version that is an adapter, with a tokenizer.
ADAPTER_FILES = {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json"}
PEFT_SAVE = {SHARD: shard_of(*PEFT), TOLD: CONFIG}


def put(job: SmallJob, files: dict[str, bytes], step: int = 4) -> Path:
    """A foreign save of these files, and the pointer."""
    actor = job.actor(step)
    for name, content in files.items():
        (actor / name).parent.mkdir(parents=True, exist_ok=True)
        job.put(actor / name, content)
    job.point(step)
    return actor


def look(job: SmallJob, config: DaemonConfig | None = None) -> None:
    """Let a daemon do what there is to do."""
    job.run(config, rounds=3, seconds=5)


def serve(job: SmallJob, config: DaemonConfig | None = None) -> Manifest:
    """The same: the manifest of the version that LATEST names then."""
    look(job, config)
    folder = job.version(job.latest.sequence)
    manifest = read_manifest(job.storage, folder)
    verify_version(job.storage, folder, manifest)
    assert job.latest.kind == manifest.kind
    return manifest


def published(job: SmallJob, files: dict[str, bytes]) -> Manifest:
    """What becomes of a foreign save of these files."""
    put(job, files)
    return serve(job)


def names_in(manifest: Manifest) -> set[str]:
    return {file.name for file in manifest.files}


@pytest.mark.parametrize("home", ["lora_adapter", "huggingface"])
def test_the_shards_of_a_peft_model_become_one_file_that_peft_reads(
    job: SmallJob, home: str
) -> None:
    put(job, {SHARD: shard_of(*PEFT), f"{home}/adapter_config.json": CONFIG, **BASE})
    manifest = serve(job, DaemonConfig(max_shard_size=1))
    assert manifest.kind == "adapter"
    # Without the base's weights the folder is no model, and must not look like one.
    assert names_in(manifest) == ADAPTER_FILES
    folder = job.version(1)
    with SafetensorsFile.open(job.storage, folder / "adapter_model.safetensors") as file:
        content = (folder / "adapter_model.safetensors").read_bytes()
        found = {entry.name: content[entry.begin : entry.end] for entry in file.entries}
    assert found == {name: bytes_of(record) for name, record in SAVED.items()}


def test_a_reader_sees_an_adapter_and_a_module_is_never_loaded_with_it(job: SmallJob) -> None:
    published(job, PEFT_SAVE)
    with Reader(job.root, "explorer") as reader:
        version = reader.next_version(0, 0)
        assert version.kind == "adapter"
        with unfit(r"v1 \(step 4\) is a LoRA adapter"):
            TorchModule(nn.Linear(2, 2)).check(version)
        version.release()
        job.save(5)
        serve(job)
        version = reader.next_version(1, 0)
        assert version.kind == "full"
        version.release()


def test_the_trained_biases_are_those_that_the_config_says(job: SmallJob) -> None:
    manifest = published(job, PEFT_SAVE | {TOLD: CONFIG.replace(b"none", b"lora_only")})
    assert {entry.name for entry in manifest.tensors} == {*SAVED, f"{Q}.base_layer.bias"}


def test_what_is_not_published_is_not_read(job: SmallJob) -> None:
    content = shard_of(*PEFT)
    manifest = published(job, {SHARD: content.replace(bytes_of(0), bytes(24)), TOLD: CONFIG})
    assert manifest.checked == "crc32"
    put(job, {SHARD: content.replace(bytes_of(2), bytes(24)), TOLD: CONFIG}, 5)
    look(job)
    assert job.outcomes[5] == "quarantined"


with_and_without_receipt = pytest.mark.parametrize("has_receipt", [True, False])


@pytest.mark.parametrize(
    ("listed", "width", "published"),
    [
        (None, 4, {"config.json", "tokenizer.json", "more/vocab.txt"}),
        (None, 6, set()),
        ([], 4, {"config.json", "tokenizer.json", "more/vocab.txt"}),
        (["tokenizer.json"], 4, {"config.json", "tokenizer.json", "more/vocab.txt"}),
        (["tokenizer.json"], 6, {"tokenizer.json"}),
        (["config.json"], 4, {"config.json"}),
        (["config.json"], 6, {"config.json"}),
    ],
)
def test_small_files_of_another_save_do_not_count(
    job: SmallJob,
    listed: list[str] | None,
    width: int,
    published: set[str],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    content = save({"embed_tokens.weight": torch.zeros(8, 4), "norm.weight": torch.zeros(4)})
    config = b'{"architectures": ["X"], "vocab_size": 8, "hidden_size": %d}' % width
    files = {**BASE, "huggingface/config.json": config, "huggingface/more/vocab.txt": b""}
    actor = put(job, {"model.safetensors": content, **files})
    if listed is not None:
        told = (vouched(f"huggingface/{name}", files[f"huggingface/{name}"]) for name in listed)
        job.receipt(4, "run-4-0", 0, 1, receipt_of(content), *told)
    assert names_in(serve(job)) == published | {"model.safetensors"}
    assert caplog.text.count("its hidden_size is 6, but") == (width == 6)
    assert "no config.json" not in caplog.text
    assert invoke("merge", actor, tmp_path / "out").exit_code == 0
    assert published == names_in(read_manifest(job.storage, tmp_path / "out")) - {
        "model.safetensors"
    }


@with_and_without_receipt
def test_an_adapter_is_linked_when_it_has_our_receipt_else_copied(
    job: SmallJob, *, has_receipt: bool
) -> None:
    content = file_of("x.lora_A.weight")
    actor = put(job, {LORA: content, TOLD: CONFIG, "lora_adapter/tokenizer.json": b""})
    if has_receipt:
        vouch_for_adapter(job, content)
    manifest = serve(job)
    assert ("tokenizer.json" in names_in(manifest)) is not has_receipt
    assert manifest.checked == ("receipt" if has_receipt else "stillness")
    published = job.version(1) / "adapter_model.safetensors"
    assert published.samefile(actor / LORA) is has_receipt
    assert published.read_bytes() == content


def vouched(name: str, content: bytes) -> ReceiptFile:
    digest = xxhash.xxh3_128_hexdigest(content)
    return ReceiptFile(name=name, size=len(content), digest=digest, over="content")


def vouch_for_adapter(job: SmallJob, content: bytes) -> None:
    job.receipt(4, "run-4-0", 0, 1, receipt_of(content, LORA), vouched(TOLD, CONFIG))


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "gone, but"), (b"by hand", "not the file that")]
)
@pytest.mark.parametrize("is_adapter", [False, True])
def test_a_vouched_file_that_is_wrong_is_waited_for_before_any_weights_are_copied(
    job: SmallJob, clock: Clock, content: bytes | None, reason: str, *, is_adapter: bool
) -> None:
    path = job.actor(4) / (TOLD if is_adapter else "huggingface/config.json")
    if is_adapter:
        weights = file_of("x.lora_A.weight")
        put(job, {LORA: weights, TOLD: CONFIG})
        vouch_for_adapter(job, weights)
    else:
        job.save(4)
    right = path.read_bytes()
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    job.storage = storage = RuledStorage()
    with job.daemon(clock=clock) as loop:
        loop.rounds(3, 1)
        assert job.daemon_says.detail.startswith(f"{path} is {reason} the receipt of save run-4-0")
        written = [str(given[-1]) for how, given in storage.calls if how in {"link", "create"}]
        assert not [name for name in written if name.endswith("model.safetensors")]
        assert job.versions == []
        path.write_bytes(right)
        loop.rounds(10, 5)
    assert (job.version(1) / path.name).read_bytes() == right


def test_pefts_own_files_come_before_the_base_models(job: SmallJob) -> None:
    manifest = published(
        job,
        {
            SHARD: shard_of(*PEFT),
            TOLD: CONFIG,
            "lora_adapter/tokenizer.json": b"with more tokens",
            "lora_adapter/config.json": b"{}",
            "lora_adapter/other/adapter_config.json": CONFIG,
            "huggingface/adapter_config.json": b"an older one",
            "huggingface/more/vocab.txt": b"",
            **BASE,
        },
    )
    assert names_in(manifest) == ADAPTER_FILES | {"more/vocab.txt"}
    folder = job.version(1)
    assert (folder / "adapter_config.json").read_bytes() == CONFIG
    assert (folder / "tokenizer.json").read_bytes() == b"with more tokens"


BROKEN: dict[str, tuple[dict[str, bytes], str]] = {
    "no config": ({SHARD: shard_of(*PEFT)}, "without its adapter_config.json.*actor/lora_adapter"),
    "no config beside it": (
        {LORA: file_of("x.lora_A.weight"), **BASE},
        "without its adapter_config.json.*actor/lora_adapter",
    ),
    "a torn config": (
        PEFT_SAVE | {TOLD: b"{"},
        "is not an adapter config of PEFT",
    ),
    "a huge config": (
        PEFT_SAVE | {TOLD: b" " * (1024 * 1024 + 1)},
        "is not an adapter config of PEFT",
    ),
    "a config of another kind": (
        PEFT_SAVE | {TOLD: b'{"peft_type": "IA3"}'},
        "is for an adapter of type IA3, but the shards hold a LoRA adapter",
    ),
    "a pickle": ({"lora_adapter/adapter_model.bin": b"", TOLD: CONFIG}, "is a pickle"),
    "two adapters": (
        {
            SHARD: shard_of(
                *(name.replace("default", other) for other in ("a", "b") for name in PEFT[2:4]),
            ),
            TOLD: CONFIG,
        },
        r"2 adapters \(a, b\)",
    ),
    "an adapter by other names": (
        {LORA: file_of(*PEFT[2:4]), TOLD: CONFIG},
        "with the tensor names of a PEFT model",
    ),
    "an empty adapter": ({LORA: file_of(), TOLD: CONFIG}, "holds no tensors"),
    "VeRA": (
        {
            SHARD: shard_of(
                "base_model.model.q.base_layer.weight", "base_model.model.q.vera_lambda_b.x"
            )
        },
        "a PEFT model of another method than LoRA",
    ),
    "a module that PEFT trains in whole": (
        {SHARD: shard_of("base_model.model.lm_head.modules_to_save.default.weight")},
        "a PEFT model of another method than LoRA",
    ),
    "a full state dict of IA3": (
        {"model.safetensors": file_of("base_model.model.q.weight", "base_model.model.q.ia3_l.x")},
        "a PEFT model of another method than LoRA",
    ),
    **{
        f"the base of a LoRA model: {next(iter(files))}": (
            files,
            r"actor holds the frozen base of a LoRA model .*lora\.merge=True",
        )
        for files in (
            {SHARD: shard_of(*FROZEN)},
            {"model.safetensors": file_of(*FROZEN)},
            {part_name(2, number): file_of(name) for number, name in enumerate(FROZEN)},
        )
    },
    "a full state dict of a PEFT model": (
        {"model.safetensors": file_of(*PEFT), TOLD: CONFIG},
        "holds a PEFT model, which no engine loads",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_an_adapter_that_cannot_be_published_is_quarantined_and_the_next_save_served(
    job: SmallJob, kind: str
) -> None:
    files, reason = BROKEN[kind]
    put(job, files)
    with job.daemon() as loop:
        loop.rounds(3, 5)
        assert job.outcomes == {4: "quarantined"}
        assert job.versions == []
        assert re.search(reason, job.refused.reason)
        job.save(5)
        loop.rounds(3, 5)
    assert job.latest.step == 5


def test_a_config_that_comes_late_makes_a_new_save_of_it(job: SmallJob, clock: Clock) -> None:
    put(job, {SHARD: shard_of(*PEFT)})
    with job.daemon(clock=clock) as loop:
        loop.rounds(3, 5)
        assert job.outcomes == {4: "quarantined"}
        put(job, {TOLD: CONFIG})
        clock.advance(100)  # a quarantined save is looked at now and then
        loop.rounds(3, 5)
    assert job.latest.kind == "adapter"


@pytest.mark.parametrize("name", ["model.lora_A", "model.mixer.lora_A.key.weight"])
def test_a_full_model_with_names_like_those_of_lora_stays_a_full_model(
    job: SmallJob, name: str
) -> None:
    manifest = published(job, {SHARD: shard_of("model.embed.weight", name), **BASE})
    assert manifest.kind == "full"
    assert names_in(manifest) == {"model.safetensors", "config.json", "tokenizer.json"}


class Small(FastStorage):
    """A disk on which little is free."""

    def __init__(self, free: int) -> None:
        super().__init__()
        self.bytes = free

    def free(self, path: Path) -> Free:
        return super().free(path)._replace(bytes=self.bytes)


LARGE = 4 * 1024 * 1024


def large(*names: str) -> bytes:
    """A shard whose first tensor is large."""
    state = {name: tensor(key="1") for name in names}
    state[names[0]] = tensor((LARGE // 4,), (1,))
    return shard(state, **{"data/0": bytes(LARGE), "data/1": bytes_of(1)})


def test_room_is_asked_for_what_is_written_and_not_for_the_base_model(job: SmallJob) -> None:
    job.storage = Small(LARGE // 2)
    put(job, {SHARD: large(*PEFT), TOLD: CONFIG})
    look(job)
    assert job.latest.step == 4
    put(job, {SHARD: large("model.weight", *PEFT[:2])}, 5)
    look(job)
    assert job.latest.step == 4
    job.storage = Small(0)
    put(job, {SHARD: large(*PEFT), TOLD: CONFIG}, 7)
    look(job)
    assert job.latest.step == 4


class Counted(Small):
    """The same, and how often bytes of zips were read."""

    reads = 0

    def pread_all(self, fd: int, count: int, offset: int) -> bytes:
        self.reads += 1
        return super().pread_all(fd, count, offset)


def test_a_save_that_does_not_fit_is_parsed_once_and_not_at_every_attempt(
    job: SmallJob, clock: Clock
) -> None:
    job.storage = storage = Counted(LARGE // 2)
    put(job, {SHARD: large("model.weight")})
    with job.daemon(clock=clock) as loop:
        loop.rounds(3, 5)
        reads = storage.reads
        assert reads > 0
        for _ in range(5):
            clock.advance(100)
            loop.rounds(3, 5)
        assert storage.reads == reads
        storage.bytes = 10 * LARGE
        clock.advance(100)
        loop.rounds(3, 5)
    assert job.latest.step == 4


@with_and_without_receipt
def test_an_adapter_takes_room_only_where_it_is_copied(job: SmallJob, *, has_receipt: bool) -> None:
    job.storage = Small(LARGE // 2)
    content = header_bytes([HeaderEntry("x.lora_A.weight", "U8", (LARGE,), 0, LARGE)]) + bytes(
        LARGE
    )
    put(job, {LORA: content, TOLD: CONFIG})
    if has_receipt:
        job.receipt(4, "run-4-0", 0, 1, receipt_of(content, LORA))
    look(job)
    assert job.layout.latest.exists() is has_receipt


def test_a_file_of_another_method_than_lora_is_an_adapter_as_peft_saved_it(job: SmallJob) -> None:
    manifest = published(
        job, {LORA: file_of("base_model.model.q.ia3_l"), TOLD: b'{"peft_type": "IA3"}'}
    )
    assert manifest.kind == "adapter"


def test_an_adapter_that_latest_does_not_name_yet_is_adopted_as_one(job: SmallJob) -> None:
    put(job, PEFT_SAVE)
    job.storage = RuledStorage(refuse("rename", errno.EIO, where="LATEST"))
    look(job)
    assert not job.layout.latest.exists()
    assert job.versions != []
    job.storage = FastStorage()
    with job.daemon():
        pass
    assert (job.latest.step, job.latest.kind) == (4, "adapter")


def test_a_version_of_before_there_were_kinds_is_a_full_model(job: SmallJob) -> None:
    job.save(4)
    serve(job)
    for path in (job.layout.latest, job.version(1) / "manifest.json"):
        record = json.loads(path.read_bytes())
        del record["kind"]
        path.write_text(json.dumps(record))
    assert (job.versions, serve(job).kind) == (["v000001"], "full")
