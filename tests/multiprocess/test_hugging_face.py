"""What transformers makes of a merged folder: the model that was trained, to the last bit."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from syncd.protocol.errors import CoverageError
from syncd.protocol.names import HUGGINGFACE
from tests.multiprocess.hf_ranks import CONFIGS, EMBEDDING, LM_HEAD, TOKENS, compute_as_everywhere
from tests.multiprocess.processes import syncd
from tests.rank_programs import written_by

#: One file; and several, the embedding in one of its own.
SIZES = {"default size": (), "small files": ("--max-shard-size", "3000")}


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written_by(tmp_path_factory, "tests.multiprocess.hf_ranks")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads, chosen = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    compute_as_everywhere()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(chosen)


def merged(save: Path, out: Path, *options: str) -> Path:
    result = syncd("merge", save / "actor", out, "--no-fsync", *options)
    assert result.returncode == 0, result.stderr
    return out


def told(save: Path, copy: Path, fields: dict[str, object]) -> Path:
    """The same save with another config.json."""
    shutil.copytree(save, copy)
    path = copy / "actor" / HUGGINGFACE / "config.json"
    config = json.loads(path.read_text())
    assert config["tie_word_embeddings"] is True
    path.write_text(json.dumps({**config, **fields}))
    return copy


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors, as the safetensors library reads them; the index must say where each is."""
    found, files = {}, {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            for name in opened.keys():  # noqa: SIM118 - not a dict
                assert name not in found
                found[name], files[name] = opened.get_tensor(name), path.name
    index = folder / "model.safetensors.index.json"
    if index.exists():
        told = json.loads(index.read_text())
        assert told["weight_map"] == files
        assert told["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    else:
        assert set(files.values()) == {"model.safetensors"}
    return found


def assert_loads_as_trained(folder: Path, save: Path, *, left_out: frozenset[str]) -> None:
    """from_pretrained gives every tensor of the files, and the trainer's logits."""
    model, told = AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, output_loading_info=True
    )
    assert told.keys() >= {"missing_keys", "unexpected_keys", "mismatched_keys"}
    assert not any(told.values()), told
    held, found = model.state_dict(), tensors(folder)
    assert held.keys() - found.keys() == left_out
    for name, tensor in found.items():
        assert held[name].dtype == tensor.dtype
        assert torch.equal(held[name], tensor), name
    logits = load_file(save / "logits.safetensors")["logits"]
    with torch.no_grad():
        said = model(input_ids=TOKENS).logits
    assert said.dtype == logits.dtype
    assert torch.equal(said, logits)


# -- what was trained is what is loaded --------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", [*CONFIGS, "qwen2-copied"])
def test_a_merged_folder_loads_to_the_logits_of_its_trainer(
    saves: Path, tmp_path: Path, name: str, size: str
) -> None:
    folder = merged(saves / name, tmp_path / "out", "--names", "trainer", *SIZES[size])
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (size == "small files")
    # What the config ties is there once, also where FSDP1 saves bytes of its own by both names.
    left_out = frozenset({LM_HEAD} if name.startswith("qwen2") else ())
    assert_loads_as_trained(folder, saves / name, left_out=left_out)
    for file in (saves / name / "actor" / HUGGINGFACE).iterdir():
        assert (folder / file.name).read_bytes() == file.read_bytes()


# -- tied embeddings ---------------------------------------------------------------------------


@pytest.mark.parametrize("save", ["qwen2", "qwen2-copied"])
def test_what_is_not_tied_by_the_config_is_there_twice(
    saves: Path, tmp_path: Path, save: str
) -> None:
    untied = told(saves / save, tmp_path / "untied", {"tie_word_embeddings": False})
    folder = merged(untied, tmp_path / "out")
    assert tensors(folder).keys() >= {LM_HEAD, EMBEDDING}
    assert_loads_as_trained(folder, saves / save, left_out=frozenset())


@pytest.mark.parametrize("text", [{}, {"tie_word_embeddings": True}], ids=["alone", "in a part"])
def test_what_is_not_tied_by_the_config_may_differ(
    saves: Path, tmp_path: Path, text: dict[str, object]
) -> None:
    """Nor is it tied by a part of the config: Qwen3-VL-MoE says both, and ties nothing."""
    fields = {"tie_word_embeddings": False, "text_config": text}
    untied = told(saves / "qwen2-differing", tmp_path / "untied", fields)
    found = tensors(merged(untied, tmp_path / "out"))
    assert torch.equal(found[LM_HEAD], found[EMBEDDING] + 1)


def test_what_is_tied_by_the_config_and_differs_is_an_error_that_names_both(
    saves: Path, tmp_path: Path
) -> None:
    """transformers would load one of them and drop the other without a word."""
    result = syncd("merge", saves / "qwen2-differing" / "actor", tmp_path / "out")
    assert result.returncode == CoverageError.exit_code
    for name in (LM_HEAD, EMBEDDING, "tie_word_embeddings"):
        assert name in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "fields",
    [{"tie_word_embeddings": "yes"}, {"text_config": {"tie_word_embeddings": []}}],
    ids=["text", "a list in a part"],
)
def test_a_config_that_says_nonsense_of_ties_leaves_both_in(
    saves: Path, tmp_path: Path, fields: dict[str, object]
) -> None:
    save = told(saves / "qwen2", tmp_path / "save", fields)
    assert tensors(merged(save, tmp_path / "out")).keys() >= {LM_HEAD, EMBEDDING}
