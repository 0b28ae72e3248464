"""Loads weights inside vLLM's workers, on its own or as vLLM's weight transfer ``syncd``.

:mod:`.vllm_plugin` registers :func:`make_transfer`, which
:class:`~.vllm_server.TransferSession` drives.
"""

from __future__ import annotations

import ast
import importlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import torch

from syncd.checkpoint.version import read_manifest, verify_version
from syncd.protocol.names import MANIFEST
from syncd.storage.fsio import Storage

log = logging.getLogger(__name__)

#: The interface that the transfer needs, by file: the parameters of functions, the types of fields,
#: and the abstract methods of classes.
INTERFACE: Final = {
    "distributed/weight_transfer/base.py": {
        "WeightTransferEngine": "init_transfer_engine, start_weight_update, "
        "finish_weight_update, receive_weights, shutdown",
        "WeightTransferEngine.__init__": "self, config, vllm_config, device, model",
        "WeightTransferEngine.parse_init_info": "self, init_dict",
        "WeightTransferEngine.init_transfer_engine": "self, init_info",
        "WeightTransferEngine.start_weight_update": "self",
        "WeightTransferEngine.update_weights": "self, update_info",
        "WeightTransferEngine.receive_weights": "self, update_info",
        "WeightTransferEngine.finish_weight_update": "self",
        "WeightTransferEngine.shutdown": "self",
    },
    "model_executor/model_loader/__init__.py": {"get_model_loader": "load_config"},
    "model_executor/model_loader/default_loader.py": {
        "DefaultModelLoader.get_all_weights": "self, model_config, model",
    },
    "model_executor/model_loader/reload/layerwise.py": {
        "initialize_layerwise_reload": "model",
        "finalize_layerwise_processing": "model, model_config",
        "finalize_layerwise_reload": "*args, **kwargs",
    },
    "distributed/parallel_state.py": {
        "get_world_group": "",
        "GroupCoordinator.world_size": "int",
        "GroupCoordinator.rank_in_group": "int",
        "GroupCoordinator.cpu_group": "ProcessGroup",
    },
    "config/vllm.py": {
        "VllmConfig.model_config": "ModelConfig",
        "VllmConfig.load_config": "LoadConfig",
    },
    "config/model.py": {
        "ModelConfig.model": "str",
        "ModelConfig.model_weights": "str",
        "ModelConfig.revision": "str | None",
    },
}


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


@dataclass(frozen=True)
class OtherInterface:
    """Replaces the transfer if vLLM's interface differs, so ``reload_weights`` loads versions."""

    differences: str
    supports_draft_weight_update: ClassVar[bool] = False

    def __call__(self) -> dict[str, object]:
        """Report the differences, beside the state of a transfer that loads nothing."""
        return {"is_open": False, "holds": None, "differences": self.differences}

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


def find_differences(vllm: Path) -> str:
    """Say what differs in the sources of a vLLM's package; empty if nothing does.

    Nothing of vLLM is imported, so the files of a wheel are enough.
    """
    differences = []
    for file, entries in INTERFACE.items():
        path = vllm / file
        actual = dict(_read(ast.parse(path.read_text()).body) if path.is_file() else ())
        for name, wanted in entries.items():
            if actual.get(name) != wanted:
                differences.append(f"{name}: {actual.get(name)!r} instead of {wanted!r}")
    return ", ".join(differences)


def _read(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, str]]:
    for node in body:
        match node:
            case ast.FunctionDef(name=name, args=parameters):
                for each in ast.walk(parameters):
                    if isinstance(each, ast.arg):
                        each.annotation = None
                yield prefix + name, ast.unparse(parameters)
            case ast.AnnAssign(target=ast.Name(id=name), annotation=kind):
                yield prefix + name, ast.unparse(kind)
            case ast.ClassDef(name=name, body=members):
                yield (
                    name,
                    ", ".join(
                        member.name
                        for member in members
                        if isinstance(member, ast.FunctionDef)
                        and "abstractmethod" in map(ast.unparse, member.decorator_list)
                    ),
                )
                yield from _read(members, f"{name}.")


def reload_whole(
    reload_weights: Callable[[], object], *, model: Any, vllm_config: Any, on_cpu: bool
) -> None:
    """Reload all weights. After a failure the model may have parts of two versions.

    vLLM itself only logs the names of tensors that no file has.
    """
    load = model.load_weights
    wanted = _plain(name for name, _ in model.named_parameters())

    def load_all(weights: object) -> set[str] | None:
        loaded: set[str] | None = load(weights)
        # As vLLM does at its start, trust the names of models without quantization only.
        if loaded is not None and vllm_config.model_config.quantization is None:
            missing = sorted(wanted - _plain(loaded))
            if missing:
                raise RuntimeError(
                    f"the version lacks weights of {len(missing)} tensors of this vLLM's model, "
                    f"such as {missing[0]}"
                )
        return loaded

    model.load_weights = load_all
    try:
        if on_cpu:
            _reload_packed(reload_weights, model, vllm_config)
        else:
            reload_weights()
    except Exception:
        _end_reload(model, vllm_config)
        raise
    finally:
        del model.load_weights


def _plain(names: Iterable[str]) -> set[str]:
    """Names without the levels that vLLM, or a vLLM below 0.32, does not report as loaded."""
    return {name.replace(".base_layer.", ".").replace(".routed_experts.", ".") for name in names}


def _end_reload(model: Any, vllm_config: Any) -> None:
    """End a failed reload, because vLLM would count its layers as part of the next reload."""
    try:
        # Importable only in vLLM's own environment.
        config = importlib.import_module("vllm.config")
        reload = importlib.import_module("vllm.model_executor.model_loader.reload")
        with config.set_current_vllm_config(vllm_config):
            reload.finalize_layerwise_reload(model, vllm_config.model_config)
    except Exception as error:  # noqa: BLE001 # another release may lack this; the reload's own error is raised
        log.warning("cannot end a failed reload: %r. Restart vLLM", error)


def _reload_packed(reload_weights: Callable[[], object], model: Any, vllm_config: Any) -> None:
    """Reload on a CPU, including the weights that vLLM packs for its CPU kernels at its start.

    vLLM's own reload has two faults. If an output layer is tied to the embedding, its packed copy
    stays old, because nothing is loaded under the layer's name. And unpacked experts are copied
    over packed experts.
    """
    modules = list(model.modules())
    methods: list[Any] = [getattr(module, "quant_method", None) for module in modules]
    experts = [method for method in methods if hasattr(method, "moe_kernel")]
    if not experts and getattr(vllm_config.model_config, "is_moe", False):
        raise RuntimeError(
            "this vLLM has experts of a kind that cannot be reloaded on a CPU. Restart vLLM from "
            "each version's folder (syncd follow --command)"
        )
    for method in experts:
        method.moe_kernel = None  # vLLM then packs the experts again
    reload_weights()
    if any(method.moe_kernel is None for method in experts):
        raise RuntimeError(
            "after the reload, vLLM did not pack all experts for the CPU. Restart vLLM"
        )
    sharing: dict[int, list[Any]] = {}
    for module in modules:
        if hasattr(module, "cpu_linear"):
            sharing.setdefault(id(module.weight), []).append(module)
    for group in sharing.values():
        for module in group if len(group) > 1 else ():
            module.quant_method.process_weights_after_loading(module)
