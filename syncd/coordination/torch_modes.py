"""Keeps the modes that a caller has set for torch out of syncd's own work.

This module imports torch: import it inside functions only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._C import (
    _len_torch_function_stack,
    _pop_torch_function_stack,
    _push_on_torch_function_stack,
)


@contextmanager
def without_modes() -> Iterator[None]:
    """In this block, or decorated function, this thread makes ordinary tensors, on the CPU.

    They can be changed outside of the block, whether or not the caller is in ``inference_mode``,
    has a default device, or a ``TorchFunctionMode``. No gradients are recorded. Do not call user
    code in the block that may rely on the default device.
    """
    modes = [_pop_torch_function_stack() for _ in range(_len_torch_function_stack())]
    try:
        # Leaving inference_mode switches gradients on.
        with torch.inference_mode(False), torch.no_grad():
            yield
    finally:
        for mode in reversed(modes):
            _push_on_torch_function_stack(mode)
