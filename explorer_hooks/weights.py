"""Read single tensors of a version, or parts of tensors, without reading the other tensors."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Final, NamedTuple

import torch
from torch import Tensor

from explorer_hooks.given_names import NamedPiece, around, names_of
from explorer_hooks.reader import LeasedVersion
from syncd.checkpoint.boxes import Box, extents, holds, whole
from syncd.checkpoint.safetensors_file import SafetensorsFile
from syncd.checkpoint.safetensors_header import HeaderEntry
from syncd.checkpoint.tensor_rules import ITEMSIZE, shown
from syncd.closing import Closing
from syncd.coordination.tensors import bytes_of, check_header, fill, new_tensor, torch_dtype
from syncd.coordination.torch_modes import without_modes
from syncd.protocol.errors import InvalidSettingsError, VerificationError
from syncd.protocol.records import Names

__all__ = ["Box", "WeightsReader"]


def slices(box: Box) -> tuple[slice, ...]:
    """The index of a part in its tensor."""
    return tuple(map(slice, box.offsets, box.ends))


class Span(NamedTuple):
    """Bytes at an offset in a file, and memory of their size. The WeightsReader closes the file."""

    file: SafetensorsFile
    offset: int
    into: memoryview

    def read(self) -> None:
        """Read the bytes. If the file has become shorter, raise VerificationError."""
        fill(self.file, self.into, self.offset)


class _OtherNames(NamedTuple):
    """The hub's names of a version's tensors, or the trainer's names if the version has the hub's.

    Attributes:
        pieces: other name → the parts of the version's tensors.
        of: name in the version → other names. If several tensors are joined under one other name,
            only the first of them lists this name.
    """

    pieces: Mapping[str, Sequence[NamedPiece]]
    of: Mapping[str, Sequence[str]]


_NO_OTHERS: Final = _OtherNames({}, {})


class WeightsReader(Closing):
    """Reads the tensors of a leased version. A ``with`` block closes the files at its end.

    Promised: each file is opened once, when its first tensor is requested. Its header is then
    compared with the manifest. Only the requested bytes are read. Tensors are on the CPU,
    contiguous, and stay valid after the reader is closed. You can request a tensor by the trainer's
    or by the hub's name. If necessary, the reader joins or cuts the version's tensors.

    Not promised: thread safety, or that the bytes match the manifest's digests. Only
    ``version.verify()`` checks the digests.

    Args:
        version: a version of kind ``full`` or ``adapter``, leased until the reader is closed.
        mmap: True to map the files and copy nothing; by default each tensor is read into its own
            memory. Mapped bytes are read at the first access, so the version must stay leased while
            a tensor is in use. Writing into a tensor changes no file. Use ``mmap`` only for local
            filesystems: if a mapped file is lost or truncated, the kernel kills the process
            (SIGBUS).
    """

    def __init__(self, version: LeasedVersion, *, mmap: bool = False) -> None:
        self._version = version
        self._maps = mmap
        self._told = {entry.name: entry for entry in version.manifest.tensors}
        self._open: dict[str, _OpenFile] = {}

    def close(self) -> None:
        """Close the files. You can call this twice."""
        while self._open:
            self._open.popitem()[1].file.close()

    def open(self, names: Iterable[str]) -> None:
        """Open the files that contain these tensors, and compare the files with the manifest.

        Raises:
            Exception: see :meth:`get_weight`.
        """
        for name in names:
            self._find(name)

    def names(self) -> tuple[str, ...]:
        """The names of all tensors of the version, in the manifest's order."""
        return tuple(self._told)

    def get_weight(self, name: str) -> Tensor:
        """Read one tensor by its name in the version, or else by its other name.

        Raises:
            InvalidSettingsError: the version has no tensor of that name.
            VerificationError, ShardFormatError: the tensor's file differs from the manifest.
            EngineMismatchError: the installed torch lacks the tensor's dtype.
            OSError: storage failed.
        """
        if name not in self._told and (pieces := self._other_names.pieces.get(name)):
            return self._join(pieces)
        return self._whole(name)

    @without_modes()
    def _whole(self, name: str) -> Tensor:
        opened, entry = self._find(name)
        if opened.memory is not None and entry.end > entry.begin:
            dtype = torch_dtype(entry.dtype)
            count = (entry.end - entry.begin) // dtype.itemsize
            flat = torch.frombuffer(opened.memory, dtype=dtype, count=count, offset=entry.begin)
            return flat.view(entry.shape)
        return self._read(entry, whole(entry.shape))

    @without_modes()
    def get_slice(self, name: str, box: Box) -> Tensor:
        """Read a part of a tensor. Only the bytes of that part are read.

        ``name`` is the tensor's name in the version. ``box`` has the first index and the size of
        the part along each dimension.

        Raises:
            InvalidSettingsError: the version has no such tensor, or the tensor has no such part.
            Exception: for the other errors see :meth:`get_weight`.
        """
        opened, entry = self._find(name)
        if not holds(entry.shape, box):
            raise InvalidSettingsError(
                f"{shown(name)} is of shape {list(entry.shape)} and has no part of shape "
                f"{list(box.shape)} at {list(box.offsets)}"
            )
        if opened.memory is not None:
            return self.get_weight(name)[slices(box)].contiguous()
        return self._read(entry, box)

    def state_dict_iterator(self, names: Names | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and content of each tensor, in the order of the files.

        Each tensor is read only when the iterator reaches it, and is not kept. ``names`` is
        ``trainer`` or ``hub``; None keeps the version's names.

        Raises:
            Exception: see :meth:`get_weight`.
        """
        given = self._version.manifest.names
        others = _NO_OTHERS if names in {None, given} else self._other_names
        for file in dict.fromkeys(entry.file for entry in self._told.values()):
            for entry in self._opened(file).file.entries:
                if entry.name not in others.of:
                    yield entry.name, self._whole(entry.name)
                # A trainer's name of one tensor can be the hub's name of another tensor.
                for name in others.of.get(entry.name, ()):
                    yield name, self._join(others.pieces[name])

    def spans(self, name: str, box: Box, into: memoryview) -> Iterator[Span]:
        """List the reads that fill memory with a part of a tensor, in C order. Nothing is read yet.

        ``name`` is the tensor's name in the version. ``into`` must have exactly the size of ``box``
        in bytes.
        """
        opened, entry = self._find(name)
        size, at = ITEMSIZE[entry.dtype], 0
        for first, length in extents(whole(entry.shape), box):
            end = at + length * size
            yield Span(opened.file, entry.begin + first * size, into[at:end])
            at = end

    def _read(self, entry: HeaderEntry, box: Box) -> Tensor:
        tensor = new_tensor(box.shape, entry.dtype)
        for span in self.spans(entry.name, box, bytes_of(tensor)):
            span.read()
        return tensor

    @cached_property
    def _other_names(self) -> _OtherNames:
        names = names_of(self._version)
        pieces: dict[str, list[NamedPiece]] = {}
        of: dict[str, list[str]] = {}
        for tensor in self._told.values():
            for piece in names.pieces_of(tensor):
                others = of.setdefault(piece.own, [])
                if piece.other not in pieces:
                    others.append(piece.other)
                pieces.setdefault(piece.other, []).append(piece)
        return _OtherNames(pieces, of)

    def _join(self, pieces: Sequence[NamedPiece]) -> Tensor:
        shape = around(piece.other_box.ends for piece in pieces)
        joined = new_tensor(shape, self._told[pieces[0].own].dtype)
        for piece in pieces:
            place = piece.seen_from_own(joined[slices(piece.other_box)])
            place.copy_(self.get_slice(piece.own, piece.own_box))
        return joined

    def _find(self, name: str) -> tuple[_OpenFile, HeaderEntry]:
        told = self._told.get(name)
        if told is None:
            raise InvalidSettingsError(
                f"v{self._version.sequence} (step {self._version.step}) has no tensor {shown(name)}"
            )
        opened = self._opened(told.file)
        entry = opened.entries.get(name)
        if entry is None:
            raise VerificationError(
                f"{opened.file.path} lacks {shown(name)}, which the manifest lists",
                sequence=self._version.sequence,
            )
        return opened, entry

    def _opened(self, name: str) -> _OpenFile:
        found = self._open.get(name)
        if found is None:
            file = self._version.open_file(name)
            try:
                check_header(self._version, file, self._told)
                entries = {entry.name: entry for entry in file.entries}
                # A private map, so that writing into a tensor changes no file.
                memory = (
                    mmap.mmap(file.fd, file.size, access=mmap.ACCESS_COPY) if self._maps else None
                )
            except BaseException:
                file.close()
                raise
            found = self._open[name] = _OpenFile(file, entries, memory)
        return found


class _OpenFile(NamedTuple):
    """An open file. ``memory`` is its map; None if it is not mapped."""

    file: SafetensorsFile
    entries: dict[str, HeaderEntry]
    memory: mmap.mmap | None
