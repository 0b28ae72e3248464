"""All workers of a vLLM, and calls of :class:`~.vllm_worker.SyncdWorker`'s methods. No torch.

Broadcasts do not use vLLM's own ``nccl`` transfer, for three reasons. Its waits have no deadline,
so a trainer that dies in one leaves the server hanging. It changes the model before everything has
arrived. It is for GPUs alone.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import Final

from explorer_hooks.engines.fitting import named
from explorer_hooks.reader import LeasedVersion
from explorer_hooks.server_fit import Fits
from syncd.checkpoint.merging.plan import is_output_embedding
from syncd.protocol.errors import (
    BroadcastError,
    EngineBrokenError,
    EngineMismatchError,
    ServerError,
    ServerRefusedError,
)
from syncd.protocol.names import MODEL_CONFIG
from syncd.protocol.participants import Rendezvous
from syncd.protocol.records import SaveId, encode

log = logging.getLogger(__name__)

#: The value of ``--worker-extension-cls`` that vLLM must be started with.
EXTENSION: Final = "explorer_hooks.engines.vllm_worker.SyncdWorker"


#: The model types whose experts vLLM 0.32 also loads under the names of transformers' modules.
_BY_BOTH: Final = frozenset({"olmoe", "qwen2_moe", "qwen3_moe"})

#: Seconds for an answer, in addition to those of the call itself.
_GRACE: Final = 60.0

#: Calls a method of each worker by its name and arguments, and returns a list of their answers.
#: The last argument is the limit in seconds.
CollectiveRpc = Callable[[str, dict[str, object], float], object]


def workers_of(parallel_config: object) -> int:
    """The number of a vLLM's ranks in a weight group; 0 if it cannot take broadcasts.

    Args:
        parallel_config: vLLM's object, or a dict of its JSON.
    """
    told = _fields(parallel_config)
    if told.get("worker_extension_cls") != EXTENSION:
        log.warning(
            "this vLLM takes no broadcasts, and loads versions from files: for broadcasts start "
            "it with --worker-extension-cls %s",
            EXTENSION,
        )
        return 0
    if told.get("data_parallel_size") != 1:
        # With data parallelism vLLM returns only the answers of one replica.
        log.warning(
            "a vLLM with --data-parallel-size above 1 takes no broadcasts: it loads from files"
        )
        return 0
    size = told.get("world_size")
    return size if isinstance(size, int) else 0


def _fields(config: object) -> Mapping[str, object]:
    """The fields of a configuration of vLLM, which may be a dict of its JSON."""
    if isinstance(config, dict):
        return config
    return vars(config) if config is not None else {}


class VLLMWorkers:
    """The workers of one vLLM; for broadcasts it must have the extension.

    Args:
        rpc: calls a method of all of them.
        whose: the vLLM, for messages.

    Attributes:
        half_loaded: whether the last load has failed, or may have.
    """

    def __init__(self, rpc: CollectiveRpc, whose: str) -> None:
        self.half_loaded = False
        self._repacks = False
        self._warned = False
        self._rpc = rpc
        self._whose = whose

    def check_reload(self, version: LeasedVersion, vllm_config: object) -> None:
        """Check that a reload will change the whole model, and choose how the workers load it.

        On a CPU vLLM 0.32 keeps packed copies of weights. Its own reload leaves some of them
        unchanged: those of an output layer that is tied to the embedding, and of experts. The
        extension packs them again; without it such a model is refused.

        Args:
            version: the version, of kind ``full``.
            vllm_config: vLLM's object, or a dict of its JSON; None if it is unknown.

        Raises:
            EngineMismatchError: a part of the model would keep its old weights.
            OSError: storage failed while the model's config was read.
        """
        told = _fields(vllm_config)
        device = _fields(told.get("device_config")).get("device")
        self._repacks = False
        if device is None:
            if not self._warned:
                self._warned = True
                log.warning(
                    "%s does not report whether it runs on a CPU: if it does, it may keep old "
                    "weights of a tied output layer, or of experts, after a reload",
                    self._whose,
                )
        elif str(device).startswith("cpu"):
            parallel = _fields(told.get("parallel_config"))
            self._repacks = parallel.get("worker_extension_cls") == EXTENSION
            stays = None if self._repacks else _left_by_reload(version)
            if stays is not None:
                raise EngineMismatchError(
                    f"{named(version)} is not loaded into {self._whose}, which runs on a CPU: "
                    f"{stays}, which vLLM's own reload leaves wrong. Start the server with "
                    f'--weight-transfer-config \'{{"backend": "syncd"}}\' (an LLM in this process '
                    f"with --worker-extension-cls {EXTENSION}), or start it anew from each "
                    "version's folder (syncd follow --command)"
                )

    def load_folder(self, folder: str, timeout: float) -> None:
        """Have all workers load a model folder. Only on a CPU this needs the extension.

        After a failed load they load the folder twice, because vLLM 0.32 counts the layers of the
        failed load as a part of the next one, and silently leaves out the rest of them.

        Args:
            folder: as the workers see it.
            timeout: limit in seconds of each load.

        Raises:
            ServerRefusedError: some worker failed: the model is torn.
            Exception: an error of the call itself: the model may be torn.
        """
        times = 2 if self.half_loaded else 1
        self.half_loaded = True
        for _ in range(times):
            if not self._repacks:
                self._rpc("reload_weights", {"weights_path": folder}, timeout)
            elif failed := self._ask("syncd_load_folder", {"folder": folder}, timeout):
                raise ServerRefusedError(f"{self._whose} did not load {folder}: {_told(failed)}")
        self.half_loaded = False

    def receive(self, rendezvous: Rendezvous, rank_offset: int, deadline: float) -> None:
        """Have all workers receive a transfer, and keep it in memory; the model is not touched.

        Args:
            rendezvous: the record with the group's address.
            rank_offset: the group rank of the first worker.
            deadline: the limit in seconds of joining, and of the transfer.

        Raises:
            BroadcastError: some worker did not receive it; all have left the group. The cause is an
                EngineMismatchError if the transfer does not fit the model.
        """
        if self.half_loaded:
            raise BroadcastError(
                f"{self._whose} must load a version from files first, because a load has failed"
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
            raise BroadcastError(f"{self._whose} did not take part: {error}") from error
        if failed:
            self.leave()
            why = f"{self._whose}: {_told(failed)}"
            misfits = any(one.get("misfits") for one in failed)
            raise BroadcastError(why) from EngineMismatchError(why) if misfits else None

    def load(self, timeout: float) -> None:
        """Have all workers load the received weights.

        Args:
            timeout: seconds.

        Raises:
            EngineBrokenError: some worker failed: the model is torn.
            Exception: an error of the call itself: the weights are unknown.
        """
        self.half_loaded = True
        failed = self._ask("syncd_load", {}, timeout)
        if failed:
            raise EngineBrokenError(
                f"{self._whose} did not load the received weights: {_told(failed)}"
            )
        self.half_loaded = False

    def leave(self) -> None:
        """Have the workers leave the group, and release received weights; raises nothing."""
        try:
            failed = _told(self._ask("syncd_leave", {}, 0))
        except Exception as error:  # noqa: BLE001 # an LLM may raise anything; logging it is all that can be done
            failed = str(error)
        if failed:
            log.warning("%s: its workers may still be in the weight group: %s", self._whose, failed)

    def _ask(
        self, method: str, kwargs: dict[str, object], timeout: float
    ) -> list[Mapping[str, object]]:
        """The answers of the workers that failed."""
        told = self._rpc(method, kwargs, timeout + _GRACE)
        answers = told if isinstance(told, list) else []
        if not answers or not all(isinstance(one, dict) and "failed" in one for one in answers):
            raise ServerError(f"{self._whose} gave an unexpected answer to {method}: {told}")
        return [one for one in answers if one["failed"] is not None]


def takes_names_of(version: LeasedVersion, fits: Fits | None) -> bool:
    """True if vLLM finds tensors by the names of a version.

    It was measured with vLLM 0.32: for the types in ``_BY_BOTH`` vLLM finds experts by the
    trainer's names, too. It may do so for other types; if not, it fails in the middle of the load.

    Args:
        version: to load.
        fits: the model that this vLLM serves, if known. It finds tensors by the names of the
            checkpoint that it was started with.
    """
    if version.kind != "full" or fits is None or fits.has_names_of(version):
        return True
    config = _config_of(version)
    return isinstance(config, dict) and config.get("model_type") in _BY_BOTH


def _config_of(version: LeasedVersion) -> object:
    """The model's config; None if it has none that can be read.

    Raises:
        OSError: storage failed.
    """
    if any(file.name == MODEL_CONFIG for file in version.manifest.files):
        try:
            return json.loads(version.read_file(MODEL_CONFIG))
        except (ValueError, RecursionError):
            pass  # the config does not tell
    return None


def _left_by_reload(version: LeasedVersion) -> str | None:
    """Weights that vLLM's own reload leaves wrong on a CPU, in words; None if there are none.

    A config without ``tie_word_embeddings`` may mean tied layers, because transformers before 5
    writes it only if it is False.

    Raises:
        OSError: the config cannot be read.
    """
    config = _config_of(version)
    names = [tensor.name for tensor in version.manifest.tensors]
    parts, part = [], config
    while isinstance(part, dict):
        parts.append(part)
        part = part.get("text_config")
    keys = [key for each in parts for key, value in each.items() if value]
    if any("expert" in name.lower() or "moe" in name.lower() for name in (*names, *keys)):
        return "it has experts"
    if not any(map(is_output_embedding, names)):
        return "its output layer is tied to the embedding"
    said = [each.get("tie_word_embeddings") for each in parts]
    if True in said or False not in said:
        return f"its output layer is, or may be (see its {MODEL_CONFIG}), tied to the embedding"
    return None


def _told(failed: list[Mapping[str, object]]) -> str:
    """The errors of the workers; empty if there are none."""
    return "; ".join(sorted({str(one["failed"]) for one in failed}))


def label_received(rendezvous: Rendezvous) -> str:
    """The name of received weights in a server: their step, and their save."""
    saved = SaveId.parse(rendezvous.save_id)
    step = f"step-{saved.step}-" if saved is not None else ""
    return f"{step}broadcast-{rendezvous.save_id}"
