"""A whole version on disk, and the places of its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from syncd.checkpoint.safetensors_file import SafetensorsFile, file_digest
from syncd.checkpoint.safetensors_header import HeaderEntry
from syncd.checkpoint.version import WEIGHTS
from syncd.deltas.limits import DeltaError
from syncd.protocol.errors import CheckpointError, SaveNotReadyError
from syncd.protocol.records import Manifest
from syncd.storage.fsio import Storage


@dataclass(frozen=True, slots=True)
class WholeVersion:
    """A published version on disk, or a copy of one."""

    folder: Path
    manifest: Manifest


#: The name of a tensor → the open file that has it, and its place in that file.
Places = Mapping[str, tuple[SafetensorsFile, HeaderEntry]]


@contextmanager
def open_weights(storage: Storage, version: WholeVersion) -> Iterator[Places]:
    """Open all weight files of a version, and check their headers.

    Raises:
        DeltaError: a file does not match the manifest.
        OSError: a file is missing, or cannot be read.
    """
    with ExitStack() as stack:
        places: dict[str, tuple[SafetensorsFile, HeaderEntry]] = {}
        digests = {file.name: file.digest for file in version.manifest.files}
        for name, tensors in version.manifest.tensors_by_file().items():
            if not name.endswith(WEIGHTS):
                continue
            try:
                file = stack.enter_context(SafetensorsFile.open(storage, version.folder / name))
            except (CheckpointError, SaveNotReadyError) as error:
                raise DeltaError(str(error)) from error
            told = {tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors.values()}
            same = told == {entry.name: (entry.dtype, entry.shape) for entry in file.entries}
            if same and (digest := digests[name]) is not None:  # the new file gets this header
                known = [bytes.fromhex(tensors[one.name].digest or "") for one in file.entries]
                same = file_digest(file.header, known) == digest
            if not same:
                raise DeltaError(f"{file.path}: its header is not what the manifest says")
            places.update((entry.name, (file, entry)) for entry in file.entries)
        yield places
