"""Reloads of a model inside vLLM's workers that are right on a CPU, and end if they fail."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)


def reload_whole(
    reload_weights: Callable[[], object], *, model: Any, vllm_config: Any, on_cpu: bool
) -> None:
    """Reload the weights. If that fails, the model is torn, and the next reload begins anew.

    Args:
        reload_weights: vLLM's own reload, of all weights.
        model: the worker's, a module.
        vllm_config: the worker's.
        on_cpu: whether the worker runs on a CPU.

    Raises:
        RuntimeError: on a CPU, the model has experts of a kind that cannot be reloaded.
        Exception: an error of vLLM.
    """
    try:
        if on_cpu:
            _reload_packed(reload_weights, model, vllm_config)
        else:
            reload_weights()
    except Exception:
        _end_reload(model, vllm_config)
        raise


def _end_reload(model: Any, vllm_config: Any) -> None:
    """End a failed reload: else vLLM 0.32 counts its loaded parts as parts of the next one."""
    try:
        # Importable only in vLLM's own environment.
        config = importlib.import_module("vllm.config")
        reload = importlib.import_module("vllm.model_executor.model_loader.reload")
        with config.set_current_vllm_config(vllm_config):
            reload.finalize_layerwise_reload(model, vllm_config.model_config)
    except Exception as error:  # noqa: BLE001 # another release may lack this; the reload's own error is raised
        log.warning("a reload that failed could not be ended: restart vLLM: %r", error)


def _reload_packed(reload_weights: Callable[[], object], model: Any, vllm_config: Any) -> None:
    """Reload on a CPU, including the weights that vLLM keeps in another layout.

    vLLM 0.32 packs weights for its CPU kernels when it starts. Its own reload leaves the packed
    copy of an output layer that shares the embedding's weight unchanged, because nothing is loaded
    under that layer's name; and it copies experts over the packed ones without packing them.

    Raises:
        RuntimeError: the experts are of an unknown kind.
        Exception: an error of vLLM.
    """
    modules = list(model.modules())
    methods: list[Any] = [getattr(module, "quant_method", None) for module in modules]
    experts = [method for method in methods if hasattr(method, "moe_kernel")]
    if not experts and getattr(vllm_config.model_config, "is_moe", False):
        raise RuntimeError("this vLLM has experts of a kind that cannot be reloaded on a CPU")
    for method in experts:
        method.moe_kernel = None  # vLLM then packs them as it did when it started
    reload_weights()
    if any(method.moe_kernel is None for method in experts):
        raise RuntimeError("vLLM has not packed all experts again: restart it")
    sharing: dict[int, list[Any]] = {}
    for module in modules:
        if hasattr(module, "cpu_linear"):
            sharing.setdefault(id(module.weight), []).append(module)
    for group in sharing.values():
        for module in group if len(group) > 1 else ():
            module.quant_method.process_weights_after_loading(module)
