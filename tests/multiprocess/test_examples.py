"""The programs that trainer.md, transformers.md and engines.md show: docs/examples."""

import string
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, Qwen2Tokenizer

from explorer_hooks import ExplorerHook, TorchModule
from tests import tiny_language
from tests.examples import FOLDER
from tests.explorers import publish
from tests.jobs import SmallJob
from tests.merging import assert_equal
from tests.multiprocess.processes import DEADLINE, ENVIRONMENT, Daemon
from tests.programs import completed
from tests.rank_programs import ROOT
from trainer_hooks import load_checkpoint

#: What AutoTokenizer makes of a Qwen2's folder; a token a letter.
_WORDS = ("<unk>", "<pad>", "<eos>", "Ġ", *string.ascii_letters, *string.digits)
_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def run(folder: Path, name: str, *arguments: object, launcher: tuple[str, ...] = ()) -> str:
    """What a program prints; it must end well."""
    done = completed(
        [sys.executable, *launcher, FOLDER / name, *arguments],
        cwd=folder,
        env=ENVIRONMENT | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        timeout=3 * DEADLINE,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout


@pytest.mark.parametrize("name", ["fsdp2.py", "hf_trainer.py", "trl_grpo.py"])
def test_an_explorer_serves_what_an_example_has_trained(
    name: str, job: Path, tmp_path: Path
) -> None:
    if name == "trl_grpo.py":
        pytest.importorskip("trl", reason="trl is not installed")
    base, model = tmp_path / "base", tiny_language.model()
    model.save_pretrained(base)
    vocabulary = {word: number for number, word in enumerate(_WORDS)}
    unknown, padding, end = _WORDS[:3]
    Qwen2Tokenizer(
        vocabulary, [], unk_token=unknown, pad_token=padding, eos_token=end
    ).save_pretrained(base)
    with Daemon(job), ExplorerHook(job, "explorer", TorchModule(model)) as hook:
        said = run(tmp_path, name, job, base, 3, launcher=_RANKS)
        while hook.pull(DEADLINE).step < 3:
            pass
        if name == "fsdp2.py":
            trained = tiny_language.model()
            load_checkpoint(job, trained)
            again = run(tmp_path, name, job, base, 4, launcher=_RANKS)
            assert [line.split(":")[0] for line in (said + again).splitlines()] == [
                f"step {step}" for step in range(1, 5)
            ]
        else:
            trained = AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    first = AutoModelForCausalLM.from_pretrained(base)
    assert_equal(dict(model.state_dict()), dict(trained.state_dict()))
    with pytest.raises(AssertionError):
        assert_equal(dict(model.state_dict()), dict(first.state_dict()))


def test_an_engine_of_ones_own_follows_a_job(job: Path, tmp_path: Path) -> None:
    publish(SmallJob(job), 7)
    assert run(tmp_path, "own_engine.py", job, 7) == "step 7: [7.0, 2.0, 3.0]\n"
