"""Declares what torchvision wants of its build: on a CPU without its libraries it has none."""

import torch

for name in ("nms", "qnms"):
    torch.library.define(
        f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    )
