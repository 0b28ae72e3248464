"""Memory of the host that devices can copy into, and from, without anybody's help.

Imports torch: imported where it is used alone.
"""

from __future__ import annotations

import logging
import mmap
import weakref
from typing import Any, Final

import torch
from torch import Tensor

log = logging.getLogger(__name__)

#: From here on a block is made of pages of its own. Torch's allocator of pinned memory would round
#: it up to a power of two, a third more on average.
_LARGE: Final = 1024 * 1024
_PORTABLE: Final = 1  # cudaHostRegisterPortable: pinned for every device of the process


class HostMemory:
    """A block of host memory; for copies from or to a device other than the CPU it is pinned.

    Hold it for as long as anything is copied into it, or from it: what is in it stays as long as a
    tensor that views it, but it is pinned only while this object lives. Where pinning is refused,
    that is logged, and the memory is ordinary: copies are right, and slower.

    Args:
        size: bytes.
        device: that will be copied from, or to.

    Attributes:
        content: all of it, uint8, of shape ``(size,)``.
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
        # It is called with the memory still mapped: the finalizer holds it.
        weakref.finalize(self, _unpin, self.content).atexit = False  # the driver is gone by then


def wait_for_copies(devices: set[torch.device]) -> None:
    """Wait for what was put on the current streams of these devices."""
    for device in devices:
        if device.type != "cpu":
            torch.accelerator.current_stream(device).synchronize()


def _unpin(content: Tensor) -> None:
    cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call] # torch leaves it untyped
    cuda.cudaHostUnregister(content.data_ptr())


def _forget_last_error() -> None:
    """CUDA remembers a refusal, and blames the next launch of a kernel for it: one of ours."""
    try:
        torch.ones(1, device="cuda")
    except RuntimeError as error:
        log.debug("as expected: %s", error)
