"""Declares operators that imports want, and makes do with ordinary memory instead of pinned one."""

from collections.abc import Callable
from typing import Any

import torch

for name in ("nms", "qnms"):
    torch.library.define(
        f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    )
for name in (
    "fused_sigmoid_mul",
    "fused_qk_gemma_rmsnorm",
    "fused_qk_gemma_rmsnorm_with_gate",
    "fused_qkvzba_split_reshape_cat_contiguous",
):
    torch.library.define(f"sgl_kernel::{name}_cpu", "(Tensor x) -> Tensor")


def unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:  # noqa: ARG001
        return make(*args, **options)

    return made


for name in ("empty", "tensor", "zeros"):
    setattr(torch, name, unpinned(getattr(torch, name)))
torch.Tensor.pin_memory = lambda tensor, _=None: tensor  # type: ignore[method-assign, assignment]
