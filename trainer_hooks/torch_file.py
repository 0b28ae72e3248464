"""``torch.save`` as the merge likes it best: every CRC-32, and large tensors where pages begin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import IO, Any, Final, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.serialization import config

from syncd.storage.fsio import Draft

_PAGE: Final = 4096
#: Padding to pages is then less than a hundredth of the file.
_LARGE: Final = 256 * 1024


def save_state_dict(state: Mapping[str, Any], draft: Draft) -> None:
    """``torch.save``; where a write is refused, that error and not torch's about its zip.

    Receipts bind the CRC-32 of the records. Where blocks can be shared between files (XFS, btrfs,
    NFS 4.2), records that begin at pages make the merge share them instead of copying.

    Raises:
        OSError: the storage refused a write.
    """
    sink = _Sink(draft)
    settings: dict[str, object] = {"save.compute_crc32": True}
    if _is_large(state) and hasattr(config.save, "storage_alignment"):  # older ones have none
        settings["save.storage_alignment"] = _PAGE
    try:
        with config.patch(settings):  # type: ignore[attr-defined]  # put there at run time
            # Of a file object torch.save uses write and flush alone.
            torch.save(dict(state), cast("IO[bytes]", sink))
    except RuntimeError as error:
        if sink.refused is not None:
            raise sink.refused from error
        raise


def _is_large(state: Mapping[str, Any]) -> bool:
    """Whether the tensors are so large that padding them to pages costs next to nothing."""
    tensors = [
        value.to_local() if isinstance(value, DTensor) else value
        for value in state.values()
        if isinstance(value, Tensor)
    ]
    return sum(tensor.nbytes for tensor in tensors) >= _LARGE * max(1, len(tensors))


class _Sink:
    """The file object that torch.save writes to; it keeps what storage refused."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self.refused: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        try:
            return self._draft.write(data)
        except OSError as error:
            self.refused = error
            raise

    def flush(self) -> None:
        """Nothing is buffered here."""
