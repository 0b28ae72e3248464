"""``torch.save`` as the merge likes it best: every CRC-32, and large tensors where pages begin."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import IO, Any, Final, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.serialization import get_crc32_options, set_crc32_options

from syncd.checkpoint.safetensors_header import PAGE
from syncd.storage.fsio import Draft

#: Padding to pages, half of one on average, is then less than a hundredth of the file.
_LARGE: Final = 256 * 1024


def save_state_dict(state: Mapping[str, Any], draft: Draft) -> None:
    """``torch.save``; where a write is refused, that error and not torch's about its zip.

    Receipts bind the CRC-32 of the records. Where blocks can be shared between files (XFS, btrfs,
    NFS 4.2), records that begin at pages make the merge share them instead of copying.

    Raises:
        OSError: the storage refused a write.
    """
    sink = _Sink(draft)
    try:
        with _with_crc32(), _on_pages() if _is_large(state) else nullcontext():
            # Of a file object torch.save uses write and flush alone.
            torch.save(dict(state), cast("IO[bytes]", sink))
    except RuntimeError as error:
        if sink.refused is not None:
            raise sink.refused from error
        raise


@contextmanager
def _with_crc32() -> Iterator[None]:
    """A setting of the whole process, for the time of a save."""
    before = get_crc32_options()
    set_crc32_options(compute_crc32=True)
    try:
        yield
    finally:
        set_crc32_options(compute_crc32=before)


def _on_pages() -> AbstractContextManager[object]:
    """Another one: where records begin."""
    try:
        from torch.utils.serialization import config  # noqa: PLC0415 - torch 2.6 has none
    except ImportError:
        return nullcontext()
    patched: AbstractContextManager[object] = config.patch(  # type: ignore[attr-defined]  # put there at run time
        {"save.storage_alignment": PAGE}
    )
    return patched


def _is_large(state: Mapping[str, Any]) -> bool:
    """Whether the tensors are so large that padding them to pages costs next to nothing."""
    sizes = [
        (value.to_local() if isinstance(value, DTensor) else value).nbytes
        for value in state.values()
        # What is no plain tensor, a ShardedTensor say, may not know its bytes.
        if type(value) in {Tensor, nn.Parameter, DTensor} and value.layout is torch.strided
    ]
    return sum(sizes) >= _LARGE * max(1, len(sizes))


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
