"""syncd's weight transfer inside vLLM's workers: loads a version's folder into all workers.

:mod:`.vllm_plugin` registers :func:`make_transfer`, and :mod:`.vllm_session` drives the transfer.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from explorer_hooks.engines.vllm_interface import find_differences
from explorer_hooks.engines.vllm_reload import reload_whole
from syncd.checkpoint.version import read_manifest, verify_version
from syncd.protocol.names import MANIFEST
from syncd.storage.fsio import Storage

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FolderUpdate:
    """The arguments of ``/update_weights``.

    Attributes:
        folder: a model folder that every worker sees under this path. It must stay during the load.
        label: the name of the folder's weights.
    """

    folder: str
    label: str


class FolderTransfer:
    """Loads the weights of a folder into one worker's model.

    No model changes unless every worker finds the folder's files as the manifest lists them. The
    whole load is one call, so a client that dies cannot leave a half-finished load.

    If any worker fails, only the last worker raises the error. Otherwise vLLM would stop reading at
    the first error, and take the other answers for answers to the next call. So a client asks for
    the workers' state through ``/collective_rpc``, which calls this object.

    The other methods and the attributes without values are those of vLLM's own base class, which
    :func:`make_transfer` adds.
    """

    init_info_cls: ClassVar[type] = dict
    update_info_cls: ClassVar[type] = FolderUpdate
    supports_draft_weight_update: ClassVar[bool] = False

    vllm_config: Any
    device: torch.device
    model: Any
    _is_open = False
    _holds: str | None = None

    def __call__(self) -> dict[str, object]:
        """Report the state of this worker.

        Returns:
            ``is_open``: True during an update. ``holds``: the label of the loaded weights; None
            before the first load and after a failed load.
        """
        return {"is_open": self._is_open, "holds": self._holds}

    def init_transfer_engine(self, init_info: object) -> None:
        """Do nothing."""

    def start_weight_update(self) -> None:
        """Record that an update was started."""
        self._is_open = True

    def update_weights(self, update_info: Mapping[str, object]) -> None:
        """Check a folder on all workers, and load it if no check has failed.

        vLLM's own method would call ``torch.accelerator.synchronize``, which fails on a CPU.
        """
        failed = None
        try:
            update = FolderUpdate(**update_info)  # type: ignore[arg-type] # a TypeError is reported, too
            check_files(update)
        except Exception as error:  # noqa: BLE001 # all workers must be told of it
            failed = f"{error!r}: the weights are unchanged"
        if not self._all_agree(failed):
            return
        self._holds = None
        try:
            self.receive_weights(update)
            if self.device.type != "cpu":
                torch.accelerator.synchronize()
        except Exception as error:
            log.exception("the load of %s failed", update.folder)
            failed = repr(error)
        if self._all_agree(failed):
            self._holds = update.label

    def receive_weights(self, update_info: FolderUpdate) -> None:
        """Load a folder by vLLM's own loader, which reads only this worker's parts."""
        loaders = importlib.import_module("vllm.model_executor.model_loader")
        reload = importlib.import_module("vllm.model_executor.model_loader.reload")
        config = self.vllm_config.model_config
        # The other two say where to find the model that vLLM was started with.
        config.model, config.model_weights, config.revision = update_info.folder, "", None
        loader = loaders.get_model_loader(self.vllm_config.load_config)

        def load() -> None:
            reload.initialize_layerwise_reload(self.model)
            self.model.load_weights(loader.get_all_weights(config, self.model))
            reload.finalize_layerwise_reload(self.model, config)

        reload_whole(
            load,
            model=self.model,
            vllm_config=self.vllm_config,
            on_cpu=self.device.type == "cpu",
        )

    def finish_weight_update(self) -> None:
        """Record that the update is finished."""
        self._is_open = False

    def shutdown(self) -> None:
        """Do nothing."""

    def _all_agree(self, failed: str | None) -> bool:
        """Return True if no worker has failed; otherwise the last worker raises the errors."""
        group = importlib.import_module("vllm.distributed.parallel_state").get_world_group()
        gathered: list[str | None] = [None] * group.world_size
        torch.distributed.all_gather_object(gathered, failed, group=group.cpu_group)
        wrong = sorted({error for error in gathered if error is not None})
        if wrong and group.rank_in_group == group.world_size - 1:
            self._is_open = False  # vLLM ends an update that raises an error
            raise RuntimeError("; ".join(wrong))
        return not wrong


def check_files(update: FolderUpdate) -> None:
    """Compare the files of a folder with its manifest, without reading the weights.

    A folder without a manifest, for example the one that vLLM was started with, is not compared.

    Raises:
        VerificationError: a file is missing, changed or extra.
        FileNotFoundError: this worker does not see the folder.
    """
    storage, folder = Storage(), Path(update.folder)
    if folder.is_absolute() and not folder.is_dir():  # vLLM would look for it on the hub
        raise FileNotFoundError(
            f"{folder} does not exist on this worker. All workers must see the folder at the same "
            "path"
        )
    if MANIFEST not in storage.names(folder):
        return
    manifest = read_manifest(storage, folder)
    # The follower has compared the digests, so only sizes and headers are compared here.
    files = tuple(file.model_copy(update={"digest": None}) for file in manifest.files)
    verify_version(
        storage, folder, manifest.model_copy(update={"digests": "off", "files": files}), threads=1
    )


class OtherInterface:
    """Replaces the transfer if vLLM's interface differs, so ``reload_weights`` loads versions."""

    supports_draft_weight_update: ClassVar[bool] = False

    def __init__(self, differences: str) -> None:
        self._differences = differences

    def __call__(self) -> dict[str, object]:
        """Report the differences, beside the state of a transfer that loads nothing."""
        return {"is_open": False, "holds": None, "differences": self._differences}

    def shutdown(self) -> None:
        """Do nothing."""


def make_transfer(*args: object, **kwargs: object) -> object:
    """Return this worker's transfer, with the arguments of vLLM's ``WeightTransferEngine``."""
    differences = find_differences(Path(importlib.import_module("vllm").__path__[0]))
    if differences:
        log.warning(
            "this vLLM's interface differs from the one that syncd's weight transfer needs, so "
            "versions are loaded by reload_weights: %s",
            differences,
        )
        return OtherInterface(differences)
    base = importlib.import_module("vllm.distributed.weight_transfer.base")
    # vLLM cannot be imported before its worker has begun, so its class is added here.
    return type("SyncdTransfer", (FolderTransfer, base.WeightTransferEngine), {})(*args, **kwargs)
