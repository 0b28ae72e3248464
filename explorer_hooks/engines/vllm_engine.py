"""The engine for a ``vllm.LLM`` in this process, and the calls to the workers of any vLLM.

vLLM's own ``nccl`` transfer is not used. It has no deadlines, so the server would hang if the
trainer dies. It changes the model before all weights have arrived, and works only on GPUs.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Protocol

from explorer_hooks.engines.base import InProcessEngine
from explorer_hooks.engines.fitting import check_kind, named
from explorer_hooks.reader import LeasedVersion
from explorer_hooks.server_fit import Fits, check_names
from syncd.checkpoint.tensor_rules import is_output_embedding, shown
from syncd.protocol.errors import (
    BroadcastError,
    EngineBrokenError,
    EngineMismatchError,
    ServerError,
    ServerRefusedError,
)
from syncd.protocol.names import MODEL_CONFIG
from syncd.protocol.records import SaveId, encode
from syncd.protocol.reports import Rendezvous

log = logging.getLogger(__name__)

#: The value of ``--worker-extension-cls`` that vLLM must be started with.
EXTENSION: Final = "explorer_hooks.engines.vllm_worker.SyncdWorker"


#: The model types whose experts vLLM also loads by the names of transformers' modules, as
#: tests showed.
_BY_BOTH: Final = frozenset({"olmoe", "qwen2_moe", "qwen3_moe"})

#: The parts of a model's config that describe an encoder have such names, as ``vision_config``.
_ENCODER: Final = re.compile("audio|image|speech|video|vision|visual")

#: Seconds for an answer, in addition to those of the call itself.
_GRACE: Final = 60.0

#: Calls each worker's method with this name and arguments, within seconds; returns all answers.
CollectiveRpc = Callable[[str, dict[str, object], float], object]
#: No deadline, because a call of an ``LLM`` in this process cannot be given up.
_NO_LIMIT: Final = math.inf


class LLM(Protocol):
    """The part of ``vllm.LLM`` that syncd uses. ``llm_engine.vllm_config`` has its settings."""

    llm_engine: Any

    def collective_rpc(self, method: str, *, kwargs: dict[str, Any]) -> object:
        """Call a method of each worker."""

    def reset_prefix_cache(self, *, reset_connector: bool = False) -> bool:
        """Empty the prefix cache, or also its connector's; return whether it is empty now."""

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
    :data:`~EXTENSION`.

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
                weights. Or the model has an encoder, and this vLLM cannot reset its cache.
        """
        check_kind(version, self.kinds)
        if not takes_names_of(version, self._fits):
            check_names(version, "this vLLM")
        self._fits.check(version)
        if self._reset_encoder is None:
            check_encoder(version, self._config, "this vLLM")
        self._workers.check_reload(version, self._config)

    def load(self, version: LeasedVersion) -> None:
        """Let each worker load the version's folder, and let the LLM generate a token.

        Raises:
            EngineBrokenError: the LLM generates no token.
            Exception: vLLM failed. The weights may be a mix of two versions.
        """
        self._workers.load_folder(str(version.folder), _NO_LIMIT)
        self._prove(f"v{version.sequence}")
        self._fits.learn(version.manifest)

    @cached_property
    def workers(self) -> int:
        """The number of the LLM's ranks in a weight group; 0 if the LLM cannot take broadcasts."""
        if self._reset_encoder is None and encodes(self._config):
            return 0
        return workers_of(self._config.parallel_config)

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
        (answer,) = self._llm.generate([{"prompt_token_ids": [1]}], params, use_tqdm=False)
        if not answer.outputs or len(answer.outputs[0].token_ids) != 1:
            raise EngineBrokenError(f"vLLM generated no token after it had loaded {what}")

    def reset_cache(self) -> None:
        """Empty all caches of results; raise EngineBrokenError if a request is running."""
        has_connector = self._config.kv_transfer_config is not None
        options = {"reset_connector": True} if has_connector else {}
        if not self._llm.reset_prefix_cache(**options):
            raise EngineBrokenError(
                "vLLM's prefix cache still holds entries of the old weights, because vLLM is still "
                "generating. Call pull() only between calls of generate()"
            )
        if self._reset_encoder is not None:
            self._reset_encoder()

    @property
    def _config(self) -> Any:
        return self._llm.llm_engine.vllm_config

    @property
    def _reset_encoder(self) -> Callable[[], None] | None:
        """Drops the encoder's outputs, by which vLLM answers repeated images; since vLLM 0.16."""
        return getattr(self._llm.llm_engine, "reset_encoder_cache", None)


def workers_of(parallel_config: object) -> int:
    """The number of a vLLM's ranks in a weight group; 0 if it cannot take broadcasts.

    ``parallel_config`` is vLLM's ParallelConfig, or a dict with its fields.
    """
    fields = _fields(parallel_config)
    if fields.get("worker_extension_cls") != EXTENSION:
        log.warning(
            "this vLLM cannot receive broadcasts, so it loads versions from files. To receive "
            "broadcasts, start vLLM with --worker-extension-cls %s",
            EXTENSION,
        )
        return 0
    if fields.get("data_parallel_size") != 1:
        # With data parallelism vLLM returns only the answers of one replica.
        log.warning(
            "a vLLM with --data-parallel-size above 1 cannot receive broadcasts; loading versions "
            "from files"
        )
        return 0
    size = fields.get("world_size")
    return size if isinstance(size, int) else 0


def _fields(config: object) -> Mapping[str, object]:
    if isinstance(config, dict):
        return config
    return getattr(config, "__dict__", {})


@dataclass
class VLLMWorkers:
    """Calls the workers of one vLLM. For broadcasts the vLLM must have syncd's extension.

    Attributes:
        half_loaded: True if the last load has failed, or may have failed.
    """

    rpc: CollectiveRpc
    whose: str
    half_loaded: bool = False
    _repacks: bool = False
    _warned: bool = False

    def check_reload(self, version: LeasedVersion, vllm_config: object) -> None:
        """Check that a reload will change the whole model, and choose how the workers load it.

        On a CPU, vLLM's own reload is wrong for experts, and for an output layer that is tied
        to the embedding. syncd's extension reloads both correctly. ``vllm_config`` is vLLM's
        VllmConfig, a dict with its fields, or None.

        Raises:
            EngineMismatchError: a part of the model would keep its old weights.
        """
        told = _fields(vllm_config)
        device = _fields(told.get("device_config")).get("device")
        self._repacks = False
        if device is None:
            if not self._warned:
                self._warned = True
                log.warning(
                    "%s does not report whether it runs on a CPU. There, a reload may keep old "
                    "weights in a tied output layer or in experts. On a GPU, ignore this warning",
                    self.whose,
                )
        elif str(device).startswith("cpu"):
            parallel = _fields(told.get("parallel_config"))
            self._repacks = parallel.get("worker_extension_cls") == EXTENSION
            stays = None if self._repacks else _left_by_reload(version)
            if stays is not None:
                raise EngineMismatchError(
                    f"cannot load {named(version)} into {self.whose}: {stays}. On a CPU, vLLM's "
                    "own reload would keep old weights. For a server, use "
                    f'--weight-transfer-config \'{{"backend": "syncd"}}\'; for an LLM, '
                    f"--worker-extension-cls {EXTENSION}. Or restart vLLM from each folder"
                )

    def load_folder(self, folder: str, timeout: float) -> None:
        """Let all workers load a model folder, with ``timeout`` seconds for each load.

        After an error the model may have parts of two versions. The next call then loads twice,
        because vLLM counts the failed load's layers as part of the next load, and could skip
        layers.
        """
        times = 2 if self.half_loaded else 1
        self.half_loaded = True
        for _ in range(times):
            if not self._repacks:
                self.rpc("reload_weights", {"weights_path": folder}, timeout)
            elif failed := self._ask("syncd_load_folder", {"folder": folder}, timeout):
                raise ServerRefusedError(f"{self.whose} did not load {folder}: {_reasons(failed)}")
        self.half_loaded = False

    def receive(self, rendezvous: Rendezvous, rank_offset: int, deadline: float) -> None:
        """Let all workers receive a transfer into memory, without changing the model.

        Raises:
            BroadcastError: see :meth:`~explorer_hooks.engines.base.WeightTaker.receive`.
        """
        if self.half_loaded:
            raise BroadcastError(
                f"{self.whose} must load a version from files first, because a load has failed"
            )
        kwargs: dict[str, object] = {
            "rendezvous": encode(rendezvous).decode(),
            "rank_offset": rank_offset,
            "deadline": deadline,
        }
        try:
            failed = self._ask("syncd_receive", kwargs, 2 * deadline)
        except Exception as error:
            self.leave()
            raise BroadcastError(
                f"{self.whose} did not take part in the transfer: {error}"
            ) from error
        if failed:
            self.leave()
            why = f"{self.whose}: {_reasons(failed)}"
            misfits = any(one.get("misfits") for one in failed)
            raise BroadcastError(why) from EngineMismatchError(why) if misfits else None

    def load(self, timeout: float) -> None:
        """Let all workers load the received weights. After an error the weights are unknown."""
        self.half_loaded = True
        failed = self._ask("syncd_load", {}, timeout)
        if failed:
            raise EngineBrokenError(
                f"{self.whose} did not load the received weights: {_reasons(failed)}"
            )
        self.half_loaded = False

    def leave(self) -> None:
        """Let the workers leave the group, and release received weights. Raises no error."""
        try:
            failed = _reasons(self._ask("syncd_leave", {}, 0))
        except Exception as error:  # noqa: BLE001 # an LLM may raise anything; logging it is all that can be done
            failed = str(error)
        if failed:
            log.warning(
                "the workers of %s did not confirm that they left the weight group. They may hold "
                "received weights in memory until the next broadcast: %s",
                self.whose,
                failed,
            )

    def _ask(
        self, method: str, kwargs: dict[str, object], timeout: float
    ) -> list[Mapping[str, object]]:
        """Call a method of all workers; return the answers of the workers that failed."""
        answer = self.rpc(method, kwargs, timeout + _GRACE)
        answers = answer if isinstance(answer, list) else []
        if not answers or not all(isinstance(each, dict) and "failed" in each for each in answers):
            raise ServerError(
                f"{self.whose} gave an unexpected answer to {method}: {shown(str(answer))}"
            )
        return [each for each in answers if each["failed"] is not None]


def encodes(vllm_config: object) -> bool | None:
    """True if the served model encodes images or sounds; None if the config does not tell."""
    model = _fields(_fields(vllm_config).get("model_config"))
    return bool(model["multimodal_config"]) if "multimodal_config" in model else None


def check_encoder(version: LeasedVersion, vllm_config: object, whose: str) -> None:
    """Refuse a version for a vLLM that cannot drop the outputs of the model's encoder.

    An adapter changes them only if the vLLM applies adapters to the encoder.

    Raises:
        EngineMismatchError: vLLM would answer repeated images or sounds by the old weights, or end.
    """
    if version.kind == "adapter":
        lora = _fields(_fields(vllm_config).get("lora_config"))
        stays = bool(lora.get("enable_tower_connector_lora"))
    else:
        known = encodes(vllm_config)
        stays = has_encoder(version) if known is None else known
    if stays:
        raise EngineMismatchError(
            f"cannot load {named(version)} into {whose}: the model encodes images or sounds, and "
            "this release keeps what it encoded with the old weights. Use vLLM 0.16 or newer"
        )


def has_encoder(version: LeasedVersion) -> bool:
    """True if the config of a version says that its model encodes images or sounds."""
    return _has_encoder(_config_of(version))


def _has_encoder(config: object) -> bool:
    return isinstance(config, dict) and any(
        isinstance(part, dict) and (_ENCODER.search(name) is not None or _has_encoder(part))
        for name, part in config.items()
    )


def takes_names_of(version: LeasedVersion, fits: Fits) -> bool:
    """True if vLLM accepts the names of a version's tensors.

    vLLM accepts the names of the checkpoint that it was started with. For the model types in
    ``_BY_BOTH`` it also accepts the trainer's names. With other names vLLM could fail in the middle
    of the load. ``fits`` describes the served model.
    """
    if version.kind != "full" or fits.has_names_of(version):
        return True
    config = _config_of(version)
    return isinstance(config, dict) and config.get("model_type") in _BY_BOTH


def _config_of(version: LeasedVersion) -> object:
    if any(file.name == MODEL_CONFIG for file in version.manifest.files):
        try:
            return json.loads(version.read_file(MODEL_CONFIG))
        except (ValueError, RecursionError):
            pass  # the config does not tell
    return None


def _left_by_reload(version: LeasedVersion) -> str | None:
    """Name the weights that vLLM's own reload leaves wrong on a CPU; None if there are none.

    Layers may be tied if the config has no ``tie_word_embeddings``: transformers before release 5
    writes this key only if its value is False.
    """
    config = _config_of(version)
    names = [tensor.name for tensor in version.manifest.tensors]
    parts, part = [], config
    while isinstance(part, dict):
        parts.append(part)
        part = part.get("text_config")
    keys = [key for each in parts for key, value in each.items() if value]
    if any("expert" in name.lower() or "moe" in name.lower() for name in (*names, *keys)):
        return "the model has experts"
    if not any(map(is_output_embedding, names)):
        return "the model's output layer is tied to the embedding"
    said = [each.get("tie_word_embeddings") for each in parts]
    if True in said or False not in said:
        return f"the model's output layer is perhaps tied to the embedding (see {MODEL_CONFIG})"
    return None


def _reasons(failed: list[Mapping[str, object]]) -> str:
    return "; ".join(sorted({shown(str(one["failed"]), 500) for one in failed}))


def label_received(rendezvous: Rendezvous) -> str:
    """The label of received weights in a server, from their step and save."""
    saved = SaveId.parse(rendezvous.save_id)
    step = f"step-{saved.step}-" if saved is not None else ""
    return f"{step}broadcast-{rendezvous.save_id}"
