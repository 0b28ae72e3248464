"""``RankContents``: everything that one rank writes in one save."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from syncd.protocol.names import shard_name
from trainer_hooks.writing.spool import Spool


@dataclass(frozen=True, slots=True)
class RankContents:
    """Everything that one rank writes in one save. Its tensors are in host memory, unchanging.

    Attributes:
        model: the rank's part of the state dict; None if it writes no shard.
        optimizer, extra: for a full checkpoint; None otherwise.
        model_files: rank 0 only: writes config and tokenizer into the folder it is given.
        fsdp_version: for ``fsdp_config.json``.
        is_full: whether this is a full checkpoint.
        full_model: rank 0 only: the weights in one file, instead of shards: the full state dict, or
            an adapter.
        adapter_files: rank 0 only, for an adapter: writes its config into the given folder.
        trained: this rank's part of the model that training resumes from, if ``full_model`` is
            another one: an adapter, a merged model, or a cast one. Full checkpoints only.
        trained_name: gives the name of its file from world size and rank.
        critic, critic_optimizer: another model and its optimizer; full checkpoints only.
        hugging_face: rank 0 only: the full state dict, for ``huggingface/``.
        links_hugging_face: rank 0 only: True if that is the same file as ``full_model``.
        written_by: writes the rank's shard itself, under its name in ``actor/``, instead of
            ``model``; called again, from its start, if storage failed for a moment.
        sync_dtype: the dtype that the published weights were cast to; None if the cast changed
            none of this rank's tensors.
        release: called when the save is over: its memory may be used again.
        completes: True if the weights of this save are announced already, so that only the rest
            of the full checkpoint is written.
    """

    model: Mapping[str, Any] | None = None
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
    release: Callable[[], object] | None = None
    completes: bool = False

    def close(self) -> None:
        """Delete gathered files that are part of no save."""
        for spool in (self.full_model, self.hugging_face):
            if spool is not None:
                spool.close()
        if self.release is not None:
            self.release()
