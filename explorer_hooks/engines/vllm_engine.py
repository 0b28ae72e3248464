"""The engine for a ``vllm.LLM`` in this process."""

from __future__ import annotations

import math
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Protocol

from explorer_hooks.engines.base import InProcessEngine
from explorer_hooks.engines.fitting import check_kind
from explorer_hooks.engines.vllm_workers import (
    VLLMWorkers,
    label_received,
    takes_names_of,
    workers_of,
)
from explorer_hooks.reader import LeasedVersion
from explorer_hooks.server_fit import Fits, check_names
from syncd.protocol.errors import EngineBrokenError
from syncd.protocol.reports import Rendezvous

#: No deadline, because a call of an ``LLM`` in this process cannot be given up.
_NO_LIMIT: Final = math.inf


class LLM(Protocol):
    """The part of ``vllm.LLM`` that syncd uses. ``llm_engine.vllm_config`` has its settings."""

    llm_engine: Any

    def collective_rpc(self, method: str, *, kwargs: dict[str, Any]) -> object:
        """Call a method of each worker."""

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache; return whether the cache is empty now."""

    def get_default_sampling_params(self) -> Any:
        """The default options of a request."""

    def generate(self, prompts: Any, sampling_params: Any, *, use_tqdm: bool) -> Any:
        """Generate, and wait until generation has ended."""


class VLLMEngine(InProcessEngine):
    """Loads versions into a ``vllm.LLM``.

    An LLM generates only while its caller waits, so no pause is needed. A version counts as served
    only after the LLM has generated one token. After a failed load the weights may be a mix of two
    versions, until the hook has loaded the previous version again. Without a previous version, the
    engine is broken.

    The LLM can take broadcasts if it was made with ``worker_extension_cls`` and
    :data:`~explorer_hooks.engines.vllm_workers.EXTENSION`.

    Args:
        llm: an ``LLM`` of vLLM 0.12 or newer.
        base: the model folder that the LLM was made from; by default the folder that the LLM names.
            If that folder is not on this host, the first version is loaded unchecked.
        is_local: False if workers are on other hosts, because they read the folder there.

    Raises:
        InvalidSettingsError: ``base`` is not a model folder.
    """

    hub_names = True

    def __init__(self, llm: LLM, *, base: str | Path | None = None, is_local: bool = True) -> None:
        self.is_local = is_local
        self._llm = llm
        self._workers = VLLMWorkers(
            lambda method, kwargs, _: llm.collective_rpc(method, kwargs=kwargs), "this vLLM"
        )
        self._fits = Fits(base, casts=True, whose="this vLLM")
        named = getattr(getattr(llm, "model_config", None), "model", None)
        if base is None and isinstance(named, str):
            self._fits.read_if_here(named)

    def check(self, version: LeasedVersion) -> None:
        """Compare a version with the base model, or else with the first version that was loaded.

        Raises:
            EngineMismatchError: the version's kind, or its tensors or their names, do not fit. Or
                vLLM runs on a CPU without syncd's extension, and would keep some of the old
                weights.
        """
        check_kind(version, self.kinds)
        if not takes_names_of(version, self._fits):
            check_names(version, "this vLLM")
        self._fits.check(version)
        engine = getattr(self._llm, "llm_engine", None)
        self._workers.check_reload(version, getattr(engine, "vllm_config", None))

    def load(self, version: LeasedVersion) -> None:
        """Let each worker load the version's folder, and let the LLM generate a token.

        Raises:
            EngineBrokenError: the LLM generates no token.
            Exception: vLLM failed. The weights may be a mix of two versions.
        """
        self._workers.load_folder(str(version.folder), _NO_LIMIT)
        self._prove(f"version {version.sequence}")
        self._fits.learn(version.manifest)

    @cached_property
    def workers(self) -> int:
        """The number of the LLM's ranks in a weight group; 0 if the LLM cannot take broadcasts."""
        return workers_of(self._llm.llm_engine.vllm_config.parallel_config)

    def receive(self, rendezvous: Rendezvous, rank_offset: int, deadline: float) -> None:
        """Let the workers receive and load a transfer, and let the LLM generate a token.

        Raises:
            BroadcastError: see :class:`~explorer_hooks.engines.base.WeightTaker`.
            EngineBrokenError: the weights are unknown until a version is loaded.
        """
        self._workers.receive(rendezvous, rank_offset, deadline)
        what = label_received(rendezvous)
        try:
            self._workers.load(_NO_LIMIT)
            self._prove(what)
        except EngineBrokenError:
            raise
        except Exception as error:
            raise EngineBrokenError(f"vLLM did not load {what}: {error}") from error

    def leave(self) -> None:
        """Let the workers leave the weight group, and release received weights."""
        if self.workers:
            self._workers.leave()

    def _prove(self, what: str) -> None:
        self.reset_cache()
        params = self._llm.get_default_sampling_params()
        params.max_tokens, params.temperature, params.detokenize = 1, 0.0, False
        prompt = {"prompt_token_ids": [1]}
        (answer,) = self._llm.generate([prompt], params, use_tqdm=False)
        if not answer.outputs or len(answer.outputs[0].token_ids) != 1:
            raise EngineBrokenError(f"vLLM generated no token after it had loaded {what}")

    def reset_cache(self) -> None:
        """Empty the prefix cache; raise EngineBrokenError if a request is running."""
        if not self._llm.reset_prefix_cache():
            raise EngineBrokenError(
                "vLLM's prefix cache still holds entries of the old weights, because vLLM is still "
                "generating. Call pull() only between calls of generate()"
            )
