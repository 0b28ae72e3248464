"""Pinned host memory, which devices read and write without the CPU.

Imports torch, so import this inside functions only.
"""

from __future__ import annotations

import logging
import mmap
import weakref
from typing import Any, Final

import torch
from torch import Tensor

log = logging.getLogger(__name__)

#: Blocks from this size on are mapped directly. Torch's allocator of pinned memory would round them
#: up to a power of two: a third more on average.
_LARGE: Final = 1024 * 1024
_PORTABLE: Final = 1  # cudaHostRegisterPortable: pinned for every device of the process


class HostMemory:
    """A block of host memory; for copies from or to a device other than the CPU it is pinned.

    Hold this object during every copy to or from it: a tensor that views it keeps its content, but
    the memory is pinned only while this object lives. If pinning fails, a warning is logged and the
    memory is ordinary: copies are right, and slower.

    Args:
        size: bytes.
        device: the other end of the copies.

    Attributes:
        content: the whole block, uint8, of shape ``(size,)``.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        if device.type == "cuda" and size >= _LARGE:
            self.content = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
            self._pin()
        else:
            pinned = size > 0 and device.type not in {"cpu", "mps", "meta"}
            self.content = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)

    def _pin(self) -> None:
        address = self.content.data_ptr()
        cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call] # torch leaves it untyped
        error = int(cuda.cudaHostRegister(address, self.content.nbytes, _PORTABLE))
        if error:
            log.warning(
                "CUDA does not pin %d bytes of host memory (error %d): copies take "
                "longer; check the limits of locked memory",
                self.content.nbytes,
                error,
            )
            _forget_last_error()
            return
        # The memory is still mapped when it is called, because the finalizer holds it.
        weakref.finalize(self, _unpin, self.content).atexit = False  # the driver is gone by then


def wait_for_copies(devices: set[torch.device]) -> None:
    """Wait for the work on the current streams of these devices."""
    for device in devices:
        if device.type != "cpu":
            torch.accelerator.current_stream(device).synchronize()


def _unpin(content: Tensor) -> None:
    cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call] # torch leaves it untyped
    cuda.cudaHostUnregister(content.data_ptr())


def _forget_last_error() -> None:
    """CUDA reports a refusal again at the next kernel launch: launch one here to clear it."""
    try:
        torch.ones(1, device="cuda")
    except RuntimeError as error:
        log.debug("as expected: %s", error)
