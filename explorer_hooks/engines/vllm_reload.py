"""Reload a model inside vLLM's workers."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterable
from typing import Any

log = logging.getLogger(__name__)


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
