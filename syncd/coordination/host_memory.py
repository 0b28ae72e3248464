"""Pinned host memory, which devices read and write without the CPU.

This module imports torch: import it inside functions only.
"""

from __future__ import annotations

import logging
import mmap
import weakref
from typing import Any, Final

import torch
from torch import Tensor

from syncd.coordination.torch_modes import without_modes

log = logging.getLogger(__name__)

#: Blocks of at least this size are mapped directly, because torch's allocator of pinned memory
#: would round their size up to a power of two, which is a third more on average.
_LARGE: Final = 1024 * 1024
_PORTABLE: Final = 1  # cudaHostRegisterPortable: pinned for every device of the process


class HostMemory:
    """A block of host memory for copies to and from a device; pinned if the device is not a CPU.

    Keep a reference to this object during every copy to or from the block: a view of the block
    keeps the content alive, but the memory is pinned only while this object exists. If CUDA cannot
    pin a block of at least 1 MiB, the object logs a warning, and copies are slower.

    Attributes:
        content: the whole block, uint8, of shape ``(size,)``.
    """

    @without_modes()
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
                "CUDA cannot pin %d bytes of host memory (error %d), so copies take "
                "longer. Check the limits of locked memory",
                self.content.nbytes,
                error,
            )
            _forget_last_error()
            return
        # The finalizer holds the memory, so it is still mapped during _unpin.
        weakref.finalize(self, _unpin, self.content).atexit = False  # CUDA has ended by then


def wait_for_copies(devices: set[torch.device]) -> None:
    """Wait for the work on the current streams of these devices."""
    for device in devices:
        if device.type != "cpu":
            torch.accelerator.current_stream(device).synchronize()


def _unpin(content: Tensor) -> None:
    cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call] # torch leaves it untyped
    cuda.cudaHostUnregister(content.data_ptr())


def _forget_last_error() -> None:
    """Launch a kernel, because CUDA reports a refused pinning again at the next launch."""
    try:
        torch.ones(1, device="cuda")
    except RuntimeError as error:
        log.debug("CUDA reported the failure of cudaHostRegister once more, as expected: %s", error)
