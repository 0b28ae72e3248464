"""``RankContents``: everything that one rank writes in one save."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from syncd.protocol.names import shard_name
from trainer_hooks.state.host_part import HostPart
from trainer_hooks.writing.spool import Spool


class RankContents(NamedTuple):
    """Everything that one rank writes in one save. Its tensors, on the host, must not change.

    Only rank 0 has ``full_model``, ``hugging_face`` and the functions that write small files into a
    given folder (``model_files``, ``adapter_files``).

    Attributes:
        model: the rank's part of the state dict; None if the rank writes no shard.
        part: the rank's whole tensors, in place of ``model``.
        confirm: on rank 0, called when all ranks have written their weights; an error of it fails
            the save before it is announced.
        full_model: the full state dict or an adapter in one file.
        trained: for a full checkpoint, this rank's part of the model to resume from, if the save
            publishes other weights (an adapter, a merged model, or cast weights).
        trained_name: a function of world size and rank.
        hugging_face: the full state dict, for ``huggingface/``.
        links_hugging_face: whether to link ``full_model`` into ``huggingface/``.
        written_by: a function that writes the rank's shard itself, in place of ``model``. If
            storage fails for a moment, it is called again and must start over.
        sync_dtype: the dtype to which published weights were cast; None if no tensor changed.
        completes: True if the weights are announced already, so that only the rest is written.
    """

    model: Mapping[str, Any] | None = None
    part: HostPart | None = None
    confirm: Callable[[], object] = lambda: None
    optimizer: Mapping[str, Any] | None = None
    extra: Mapping[str, Any] | None = None
    model_files: tuple[Callable[[Path], object], ...] = ()
    fsdp_version: int | None = None
    is_full: bool = False
    full_model: Spool | None = None
    adapter_files: tuple[Callable[[Path], object], ...] = ()
    trained: Mapping[str, Any] | None = None
    trained_name: Callable[[int, int], str] = shard_name
    critic: Mapping[str, Any] | None = None
    critic_optimizer: Mapping[str, Any] | None = None
    hugging_face: Spool | None = None
    links_hugging_face: bool = False
    written_by: Callable[[], object] | None = None
    sync_dtype: str | None = None
    completes: bool = False
