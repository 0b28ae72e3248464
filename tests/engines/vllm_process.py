"""A real vLLM server on the CPU, for tests: tiny models, prompts and answers as token ids."""

import atexit
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import httpx2
import pytest

from explorer_hooks.engines.vllm_engine import EXTENSION
from explorer_hooks.engines.vllm_server import VLLMServer
from tests.engines.environment import RELEASES, python_of
from tests.engines.server_process import Answer, ServerProcess
from tests.places import ROOT

#: Names the Python of the environment that tests/engines/environment.py makes.
PYTHON = "SYNCD_VLLM_PYTHON"
#: On some virtual machines vLLM's worker dies at the first request if it uses AMX.
_WITHOUT_AMX = "import torch.cpu; torch.cpu._is_amx_tile_supported = lambda: False"
#: The name of the model that it was started with.
MODEL = "policy"


def python(release: str) -> Path:
    """The Python that has a release of vLLM."""
    return Path(os.environ[PYTHON]) if release == RELEASES[0] else python_of(release)


def why_not(release: str = RELEASES[0]) -> str | None:
    """Why a release of vLLM is not here; None if it is."""
    if not os.environ.get(PYTHON):
        return (
            f"vLLM is not here: {PYTHON} names the Python of an environment with it; "
            f"{PYTHON}=$(python -m tests.engines.environment) makes one, of 3.5 GB"
        )
    there = python(release)
    return None if there.exists() else f"{there} is not there: vLLM {release}"


def require(release: str = RELEASES[0]) -> None:
    """Skip the test if a release of vLLM is not here."""
    if (missing := why_not(release)) is not None:
        pytest.skip(missing)


@cache
def _entry_points() -> Path:
    """A folder for the path of vLLM's Python.

    It has the metadata of an installed syncd, by which vLLM finds the weight transfer, and keeps
    vLLM from AMX.
    """
    folder = Path(mkdtemp(prefix="syncd-metadata-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    program = "import setuptools; setuptools.setup()"
    subprocess.run(
        (sys.executable, "-c", program, "--quiet", "egg_info", "--egg-base", folder),
        cwd=ROOT,
        check=True,
    )
    (folder / "sitecustomize.py").write_text(_WITHOUT_AMX)
    return folder


def environment(overlay: Path | None = None) -> dict[str, str]:
    """What vLLM needs of its environment, on two cores that others use too.

    Packages in the overlay's folder are found first.
    """
    paths = (_entry_points(), ROOT, *([overlay] if overlay else []))
    return os.environ | {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_PLUGINS": "syncd",
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
    }


class Reloading(VLLMServer):
    """Loads as if the server had no weight transfer of syncd's."""

    def _has_transfer(self) -> bool:
        return False


#: The two ways to load a folder.
WAYS = {"transfer": VLLMServer, "reload": Reloading}


class VLLMProcess(ServerProcess):
    """A server process.

    Args:
        model: its folder.
        log: what it says goes to its end.
        takes_adapters: whether it is started for them.
        ranks: its workers, each with a part of each tensor.
        release: of vLLM, whose environment it runs in; else in the one that PYTHON names.
        more: further options.
        overlay: a folder with packages to use instead of installed ones.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        takes_adapters: bool = True,
        ranks: int = 1,
        release: str = RELEASES[0],
        more: Sequence[str] = (),
        overlay: Path | None = None,
    ) -> None:
        self._takes_adapters = takes_adapters
        self._ranks = ranks
        self._release = release
        self._more = more
        self._overlay = overlay
        super().__init__(model, log)

    def _command(self, model: Path) -> tuple[list[str], dict[str, str]]:
        options = {
            "--model": str(model),
            "--host": "127.0.0.1",
            "--port": self._port,
            "--dtype": "bfloat16",
            "--served-model-name": MODEL,
            "--max-model-len": "128",
            "--max-num-seqs": "8",
            # Of the memory: it refuses to start if others use the rest.
            "--gpu-memory-utilization": "0.3",
            "--tensor-parallel-size": str(self._ranks),
            "--worker-extension-cls": EXTENSION,
            "--weight-transfer-config": '{"backend": "syncd"}',
        }
        flags = ["--skip-tokenizer-init", "--enforce-eager", *self._more]
        if self._release not in {"0.29.0", "0.28.0"}:  # which always have its routes
            flags.append("--enable-scale-out")
        if self._takes_adapters:
            flags += ["--enable-lora", "--max-lora-rank", "8"]
        words = (word for pair in options.items() for word in pair)
        program = (str(python(self._release)), "-m", "vllm.entrypoints.openai.api_server")
        return [*program, *words, *flags], environment(self._overlay)

    def generate(
        self, prompt: Sequence[int], count: int = 8, *, model: str = MODEL, logprobs: int = 0
    ) -> Answer:
        """The most probable tokens."""
        sampling = {"max_tokens": count, "temperature": 0.0, "detokenize": False}
        if logprobs:
            sampling["logprobs"] = logprobs
        body = {
            "model": model,
            "token_ids": list(prompt),
            "sampling_params": sampling | {"ignore_eos": True},
        }
        (choice,) = self.ask("/inference/v1/generate", body)["choices"]
        content = (choice.get("logprobs") or {}).get("content") or []
        return Answer(
            choice["token_ids"] or [],
            [{_token(one): one["logprob"] for one in at["top_logprobs"]} for at in content],
            [(s["version"], s["start"], s["end"]) for s in choice.get("weight_versions") or []],
        )

    def forced(self, tokens: Sequence[int]) -> list[int]:
        """The most probable token after each of the tokens but the last, given all before it."""
        sampling = {"max_tokens": 1, "prompt_logprobs": 1, "detokenize": False}
        body = {"model": MODEL, "token_ids": list(tokens), "sampling_params": sampling}
        told = self.ask("/inference/v1/generate", body)["prompt_logprobs"][1:]
        return [int(min(at, key=lambda token: at[token]["rank"])) for at in told]

    @property
    def label(self) -> str:
        """The label of its weights."""
        return str(self.ask("/weight_info", method="GET")["weight_version"])

    def metric(self, name: str) -> float:
        """The value of one of its metrics."""
        page = httpx2.get(f"{self.url}/metrics", trust_env=False).text
        return sum(
            float(line.split()[-1]) for line in page.splitlines() if line.startswith(f"{name}{{")
        )

    @property
    def is_paused(self) -> bool:
        """Whether requests wait."""
        return bool(self.ask("/is_paused", method="GET")["is_paused"])


def _token(entry: dict[str, Any]) -> int:
    """The id of a token in an answer; before vLLM 0.32 it is in a text."""
    return int(str(entry.get("token_id", entry.get("token"))).removeprefix("token_id:"))
