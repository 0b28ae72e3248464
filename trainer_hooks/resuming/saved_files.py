"""The files of one kind that all ranks of a save have written."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import torch

from syncd.checkpoint.boxes import Box, whole
from syncd.checkpoint.merging.source_reader import SourceFile, SourceReader, record_checks
from syncd.checkpoint.placement import Chunks, Local, Shape
from syncd.checkpoint.safetensors_file import SafetensorsFile
from syncd.checkpoint.tensor_rules import shown
from syncd.checkpoint.torch_files.pieces import Piece, Pieces, read_pieces
from syncd.checkpoint.torch_files.shard_file import ShardFile
from syncd.coordination.tensors import DTYPES
from syncd.protocol.errors import CheckpointError, ShardFormatError
from syncd.protocol.names import FULL_STATE_DICT
from syncd.protocol.records import ReceiptFile
from syncd.storage.errnos import is_gone
from syncd.storage.fsio import Storage

#: The end of every message about a part that is missing or damaged.
ADVICE: Final = (
    "Restore the file, or resume from an older full checkpoint with load_checkpoint(..., step=N)"
)


class Held(NamedTuple):
    """The content of one file for one tensor.

    Attributes:
        dtype: the name of the dtype in safetensors.
        parts: the boxes of the tensor that the file holds, and the positions of their bytes.
    """

    dtype: str
    shape: Shape
    parts: tuple[tuple[Box, Local], ...]

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """The dtype in torch; None if this torch lacks it."""
        return DTYPES.get(self.dtype)

    @classmethod
    def of(cls, value: Local | Chunks) -> Held:
        """Convert a result of the merge's parser."""
        if isinstance(value, Chunks):
            return cls(value.dtype, value.global_shape, tuple(map(_placed, value.locals)))
        box, _ = placed = _placed(value)
        position = value.position
        return cls(value.dtype, box.shape if position is None else position.global_shape, (placed,))


def _placed(local: Local) -> tuple[Box, Local]:
    if local.position is None:
        return whole(local.local_shape), local
    return Box(local.position.offsets, local.local_shape), local


@dataclass
class OpenFile(SourceFile):
    """An open file; ``plain`` has the values that are not tensors."""

    tensors: Mapping[str, Held] = field(default_factory=dict)
    plain: dict[str, object] = field(default_factory=dict)


@dataclass
class SavedFiles:
    """The files of one kind in one folder; opening a file checks it against its receipt.

    The context manager closes the opened files. Methods raise :class:`CheckpointError` if a file is
    missing or damaged, and OSError if it cannot be read now.

    Args:
        names: the names in the folder, in rank order; or only ``model.safetensors``.
        vouched: file name → the file's entry in a receipt; None if there are no receipts.
        is_optimizer: whether the files also hold values that are not tensors.

    Attributes:
        kind: the same on all ranks, whose paths may differ.
        opened: the open files, by rank.
        taken: the names that this rank uses.
        updated: the parameters that this rank's optimizers update.
        checked: the numbers of the files of which this rank has checked all bytes.
    """

    storage: Storage
    folder: Path
    names: Sequence[str]
    vouched: Mapping[str, ReceiptFile] | None
    is_optimizer: bool = False

    def __post_init__(self) -> None:
        self.paths = tuple(self.folder / name for name in self.names)
        self.kind = f"{self.folder.name}/{self.names[:1]}"
        self.opened: dict[int, OpenFile] = {}
        self.taken: set[str] = set()
        self.updated: set[str] = set()
        self.checked: set[int] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self.opened:
            self.storage.release(self.opened.popitem()[1].fd)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: int) -> OpenFile:
        if number not in self.opened:
            self.opened[number] = self._opened(self.paths[number])
        return self.opened[number]

    def check_there(self, numbers: Sequence[int]) -> None:
        """Check that the files exist, with the sizes in their receipts."""
        for number in numbers:
            path = self.paths[number]
            receipt = self._receipt_of(path)
            status = self.storage.status(path)
            if status is None:
                raise missing(path)
            if receipt is not None and receipt.size != status.st_size:
                raise _differs(path, f"has {status.st_size} bytes instead of {receipt.size}")

    def loaded(self, number: int) -> Any:
        """Check all bytes of a small file, and return ``torch.load(weights_only=True)`` of it."""
        path = self.paths[number]
        receipt = self._receipt_of(path)
        try:
            with _being_there(path), ShardFile.open(self.storage, path) as file:
                _compare(path, receipt, file.size, file.directory_digest)
                checks = record_checks([file], check_crc=True)
                SourceReader(self.storage, [file], checks=checks, cancel=lambda: None).finish()
                with open(file.fd, "rb", closefd=False) as stream:
                    return torch.load(stream, map_location="cpu", weights_only=True)
        except ShardFormatError as error:
            raise CheckpointError(f"{error}. {ADVICE}") from error
        except (pickle.UnpicklingError, RuntimeError) as error:
            first = str(error).partition("\n")[0]
            raise CheckpointError(
                f"another program wrote {path}, not trainer_hooks. torch.load(weights_only=True) "
                f"refuses the file ({first}). {ADVICE}"
            ) from error

    def reader(self, checked: Sequence[int]) -> tuple[SourceReader, dict[int, int]]:
        """A reader of the open files, and the number of each file in the reader.

        Opens the files in ``checked``, and checks all their bytes if they have CRC-32s. Safetensors
        files, and files of a trainer that switched CRC-32 off, have none.
        """
        for number in checked:
            _ = self[number]
        numbers = sorted(self.opened)
        files = [self.opened[number] for number in numbers]
        checks = [
            check
            for number, file in zip(numbers, files, strict=True)
            for check in record_checks([file], check_crc=number in checked)
        ]
        reader = SourceReader(self.storage, files, checks=checks, cancel=lambda: None)
        return reader, {number: at for at, number in enumerate(numbers)}

    def _receipt_of(self, path: Path) -> ReceiptFile | None:
        if self.vouched is None:
            return None
        receipt = self.vouched.get(path.name)
        if receipt is None:
            raise CheckpointError(
                f"{path} is not listed in the receipts of this checkpoint, so the file is not part "
                f"of the checkpoint. {ADVICE}"
            )
        return receipt

    def _opened(self, path: Path) -> OpenFile:
        receipt = self._receipt_of(path)
        try:
            with _being_there(path):
                open_file = self._full if path.name == FULL_STATE_DICT else self._shard
                return open_file(path, receipt)
        except ShardFormatError as error:
            what = "the state of a torch.optim.Optimizer" if self.is_optimizer else "a state dict"
            raise CheckpointError(
                f"{error}. The file must contain {what}, saved by trainer_hooks. {ADVICE}"
            ) from error

    def _shard(self, path: Path, told: ReceiptFile | None) -> OpenFile:
        shard = ShardFile.open(self.storage, path)
        try:
            _compare(path, told, shard.size, shard.directory_digest)
            opened = OpenFile(path, shard.fd, shard.has_crc, shard.records)
            plain = opened.plain if self.is_optimizer else None

            def parse(data: bytes, where: str, *, intact: bool) -> dict[str, Piece | Pieces]:
                return read_pieces(data, where, intact=intact, plain=plain)

            found = shard.tensors(parse=parse)
            opened.tensors = {name: Held.of(value) for name, value in found.items()}
        except BaseException:
            shard.close()
            raise
        return opened

    def _full(self, path: Path, told: ReceiptFile | None) -> OpenFile:
        full = SafetensorsFile.open(self.storage, path)
        try:
            _compare(path, told, full.size, full.header_digest)
        except BaseException:
            full.close()
            raise
        tensors = {
            entry.name: Held.of(
                Local(entry.dtype, entry.shape, entry.begin, entry.end - entry.begin, "", None)
            )
            for entry in full.entries
        }
        return OpenFile(path, full.fd, False, {}, tensors)


#: Of what is not saved yet.
NO_FILES: Final = SavedFiles(Storage(), Path(), (), None)


def missing(path: Path) -> CheckpointError:
    """The error for a file that does not exist."""
    return CheckpointError(f"{path} is missing. {ADVICE}")


@contextmanager
def _being_there(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if is_gone(error):
            raise missing(path) from error
        raise


def _compare(path: Path, receipt: ReceiptFile | None, size: int, digest: str) -> None:
    if receipt is not None and (receipt.size, receipt.digest) != (size, digest):
        raise _differs(path, "does not have the content that the rank wrote")


def _differs(path: Path, how: str) -> CheckpointError:
    return CheckpointError(f"{path} is not the file that its receipt lists (it {how}). {ADVICE}")


def names_in(files: Mapping[int, OpenFile]) -> Iterator[str]:
    """All names in the open files."""
    for file in files.values():
        yield from file.tensors
        yield from file.plain


def few_names(names: Sequence[str]) -> str:
    """The first few names, for a message."""
    few = ", ".join(f"'{shown(name)}'" for name in names[:3])
    return few + (f" and {len(names) - 3} more" if len(names) > 3 else "")
