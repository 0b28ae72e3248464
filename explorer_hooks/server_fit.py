"""Compare a version with the model that a server serves, because the server cannot compare."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from explorer_hooks.engines.fitting import TensorSpec, differences, named, refuse, tensor_specs
from explorer_hooks.given_names import SAME_NAMES, GivenNames, names_of
from explorer_hooks.reader import LeasedVersion
from syncd.checkpoint.model_folder import INDEX, says_tied
from syncd.checkpoint.safetensors_file import SafetensorsFile
from syncd.checkpoint.tensor_rules import is_output_embedding, shown
from syncd.checkpoint.version import WEIGHTS
from syncd.protocol.errors import (
    CheckpointError,
    EngineMismatchError,
    InvalidSettingsError,
    ShardFormatError,
)
from syncd.protocol.names import MODEL_CONFIG
from syncd.protocol.records import Manifest
from syncd.storage.fsio import LONG_RECORD_LIMIT, Storage

log = logging.getLogger(__name__)

_FLOATING: Final = frozenset({"F64", "F32", "F16", "BF16"})


def check_names(version: LeasedVersion, whose: str) -> None:
    """Refuse a version without the hub's names, which the server needs."""
    names = names_of(version)
    if names.given == "hub":
        return
    if names.name_map.refused is not None:
        raise EngineMismatchError(
            f"the tensors of {named(version)} have the names of the trainer's module, but {whose} "
            f"needs the hub's names, which are unknown: {names.name_map.refused}"
        )
    for tensor in version.manifest.tensors:
        for piece in names.pieces_of(tensor)[:1]:
            raise EngineMismatchError(
                f"{whose} needs the hub's names, but the tensors of {named(version)} have those of "
                f"the trainer's module. A load would skip {shown(tensor.name)}, whose hub name is "
                f"{shown(piece.other)}. Let the daemon publish them: syncd run --names hub"
            )


class Fits:
    """Compares versions with the model of a server. EngineMismatchError lists the differences.

    Args:
        of: the manifest of a version that the server serves, or the server's model folder; None if
            the model is unknown, so that everything fits.
        casts: True if floating dtypes may differ, because the server casts them, as vLLM does.
        whose: the name of the server, for messages.

    Raises:
        InvalidSettingsError: the folder holds no readable model.
    """

    _ties = False
    _wanted: dict[str, TensorSpec] | None = None

    def __init__(
        self,
        of: Manifest | str | Path | None = None,
        *,
        casts: bool = False,
        whose: str = "the server",
    ) -> None:
        self._casts = casts
        self._whose = whose
        if isinstance(of, Manifest):
            self.learn(of)
        elif of is not None:
            self._read(of)

    @property
    def is_known(self) -> bool:
        """True if there is a model to compare with."""
        return self._wanted is not None

    def learn(self, manifest: Manifest) -> None:
        """Compare with this full model from now on, if the server's model is unknown."""
        if not self.is_known:
            self._wanted = self._alike(tensor_specs(manifest))

    def read_if_here(self, named: str) -> None:
        """Compare with the model path that a server reports, if it can be read on this host.

        A relative path is not read, because it can be a name on the hub.
        """
        if Path(named).is_absolute() and os.path.isdir(named):
            try:
                self._read(named)
            except InvalidSettingsError as error:
                log.warning("%s: %s", self._whose, error)

    def check(self, version: LeasedVersion) -> None:
        """Compare every name, dtype and shape of a full model; accept other kinds."""
        if self.is_known and version.kind == "full":
            self.check_tensors(tensor_specs(version.manifest), named(version), names_of(version))

    def check_tensors(
        self, given: Mapping[str, TensorSpec], what: str, names: GivenNames = SAME_NAMES
    ) -> None:
        """Compare the names, dtypes and shapes of tensors with the server's model."""
        if self._wanted is not None:
            alike, wanted = names.by_hub(self._alike(given)), names.by_hub(self._wanted)
            refuse(what, self._whose, differences(alike, wanted, self._whose, names.shown))

    def has_names_of(self, version: LeasedVersion) -> bool:
        """True if server and version have equal tensor names, except a tied output embedding."""
        given = self._alike(tensor_specs(version.manifest))
        return self._wanted is not None and given.keys() == self._wanted.keys()

    def _read(self, of: str | Path) -> None:
        folder = Path(of).absolute()
        tensors = model_tensors(folder)
        self._ties = _ties(folder)
        self._wanted = self._alike(tensors)

    def _alike(self, tensors: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
        """The tensors to compare, without a tied output embedding, which may be missing."""
        return {
            name: TensorSpec("floating", spec.shape)
            if self._casts and spec.dtype in _FLOATING
            else spec
            for name, spec in tensors.items()
            if not (self._ties and is_output_embedding(name))
        }


def model_tensors(folder: Path) -> dict[str, TensorSpec]:
    """List the tensors of a Hugging Face model folder, from the headers of its safetensors files.

    Files that the folder's index does not list are ignored. Links are followed, because the hub's
    cache has links.
    """
    storage = Storage()
    try:
        names = {name for name in storage.names(folder) if name.endswith(WEIGHTS)}
        if INDEX in storage.names(folder):
            index = json.loads(storage.read((folder / INDEX).resolve(), LONG_RECORD_LIMIT))
            told = index.get("weight_map") if isinstance(index, dict) else None
            if not isinstance(told, dict):
                raise ShardFormatError(f"{INDEX} has no weight_map")
            names = set(map(str, told.values()))
        found: dict[str, TensorSpec] = {}
        for name in sorted(names):
            with SafetensorsFile.open(storage, (folder / name).resolve()) as opened:
                found |= {e.name: TensorSpec(e.dtype, tuple(e.shape)) for e in opened.entries}
    except (OSError, ValueError, CheckpointError) as error:
        raise InvalidSettingsError(f"{folder} is not a model folder: {error}") from error
    if not found:
        raise InvalidSettingsError(f"{folder} has no *.safetensors file to compare versions with")
    return found


def _ties(folder: Path) -> bool:
    try:
        return says_tied(json.loads((folder / MODEL_CONFIG).read_bytes()))
    except (OSError, ValueError):
        return False
