"""A plug-in of vLLM that leaves weights unpacked on a CPU, as they are on a GPU."""

from __future__ import annotations

import importlib
from typing import Any

import torch


def register() -> None:
    """Replace vLLM's packing of a layer's weight for its CPU kernels."""

    def leave(layer: Any, remove_weight: bool) -> None:  # noqa: ARG001 # vLLM passes it
        layer.cpu_linear = torch.nn.functional.linear

    utils: Any = importlib.import_module("vllm.model_executor.layers.utils")
    utils.dispatch_cpu_unquantized_gemm = leave
