"""A real SGLang server on the CPU, for tests."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from explorer_hooks.engines.http_server import ServerAccess
from explorer_hooks.engines.sglang_server import SGLangServer
from tests.engines.server_process import Answer, ServerProcess

#: Names the Python of the environment that tests/engines/environment.py makes.
PYTHON = "SYNCD_SGLANG_PYTHON"
#: Only its routes that change something want a key.
ADMIN_KEY = "only-for-tests"
#: For adapters of the layers that :func:`tests.engines.tiny_models.adapter` is given.
ADAPTERS = (
    *("--enable-lora", "--lora-target-modules", "o_proj", "--max-lora-rank", "8"),
    *("--lora-backend", "torch_native", "--max-loras-per-batch", "2"),
)
_ON_CPU = Path(__file__).with_name("sglang_on_cpu")


def require() -> None:
    """Skip the test if SGLang is not here."""
    if not os.environ.get(PYTHON):
        pytest.skip(
            f"SGLang is not here: {PYTHON} names the Python of an environment with it; "
            f"{PYTHON}=$(python -m tests.engines.environment --sglang) makes one, of 3 GB"
        )


class SGLangProcess(ServerProcess):
    """A server process.

    Args:
        model: its folder.
        log: what it says goes to its end.
        has_tokenizer: whether the folder has one.
        more: further options.
        variables: of its environment.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        has_tokenizer: bool = False,
        more: Sequence[str] = (),
        **variables: str,
    ) -> None:
        self._more = (*more, *(() if has_tokenizer else ("--skip-tokenizer-init",)))
        self._variables = variables
        super().__init__(model, log)

    def _command(self, model: Path) -> tuple[list[str], dict[str, str]]:
        options = {
            "--model-path": str(model),
            "--host": "127.0.0.1",
            "--port": self._port,
            "--dtype": "float32",
            "--device": "cpu",
            "--attention-backend": "torch_native",
            "--sampling-backend": "pytorch",
            "--grammar-backend": "none",
            # Of the memory: it refuses to start if others use the rest.
            "--mem-fraction-static": "0.2",
            "--max-total-tokens": "2048",
            "--admin-api-key": ADMIN_KEY,
            "--served-model-name": "policy",
        }
        words = [word for pair in options.items() for word in pair]
        flags = ["--disable-cuda-graph", "--skip-server-warmup"]
        flags += ["--sleep-on-idle"]  # else it keeps a core busy
        environment = os.environ | {
            "SGLANG_USE_CPU_ENGINE": "1",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(_ON_CPU),
        }
        program = (os.environ[PYTHON], "-m", "sglang.launch_server")
        return [*program, *words, *flags, *self._more], environment | self._variables

    def engine(self, **options: Any) -> SGLangServer:
        """Loads versions into it."""
        return SGLangServer(self.url, access=ServerAccess(admin_api_key=ADMIN_KEY), **options)

    def generate(self, prompt: Sequence[int], count: int = 8, **more: object) -> Answer:
        """The most probable tokens."""
        return self.read(self.generated(prompt, count, **more))

    @staticmethod
    def read(told: dict[str, Any]) -> Answer:
        """What is in an answer."""
        meta, tokens = told["meta_info"], told["output_ids"]
        own = [{"version": meta["weight_version"], "start": 0, "end": len(tokens)}]
        return Answer(
            tokens,
            [{token: logprob for logprob, token, _ in at} for at in meta["output_top_logprobs"]],
            [(s["version"], s["start"], s["end"]) for s in meta.get("weight_versions", own)],
        )

    def generated(self, prompt: Sequence[int], count: int = 1, **more: object) -> dict[str, Any]:
        """The whole of an answer."""
        body = {
            "input_ids": list(prompt),
            "sampling_params": {"max_new_tokens": count, "temperature": 0.0, "ignore_eos": True},
            "return_logprob": True,
            "top_logprobs_num": 5,
        }
        answer: dict[str, Any] = self.ask("/generate", body | more)
        return answer

    @property
    def info(self) -> dict[str, Any]:
        """Which model it says that it has."""
        told: dict[str, Any] = self.ask("/model_info", method="GET")
        return told

    @property
    def label(self) -> str:
        """The label of its weights."""
        return str(self.info["weight_version"])
