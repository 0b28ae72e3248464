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
    """Everything that one rank writes in one save. Its tensors, on the host, must not change.

    Attributes:
        model: the rank's part of the state dict; None if the rank writes no shard.
        optimizer, extra, critic, critic_optimizer: only for a full checkpoint.
        model_files: functions that write config and tokenizer into a given folder; rank 0 only.
        fsdp_version: the FSDP version for ``fsdp_config.json``; None without FSDP.
        full_model: the full state dict or an adapter in one file, instead of shards; rank 0 only.
        adapter_files: functions that write an adapter's config into a given folder; rank 0 only.
        trained: this rank's part of the model to resume from. Only for full checkpoints that
            publish other weights (an adapter, a merged model, or cast weights).
        trained_name: a function of world size and rank that returns the file name of ``trained``.
        hugging_face: the full state dict, for ``huggingface/``; rank 0 only.
        links_hugging_face: whether to link the file of ``full_model`` into ``huggingface/``.
        written_by: a function that writes the rank's shard into ``actor/`` itself; given instead of
            ``model``. If storage fails for a moment, it is called again and must start over.
        sync_dtype: the dtype to which the published weights were cast; None if the cast changed
            none of this rank's tensors.
        release: called when the save has ended, to free its memory for the next save.
        completes: True if the weights of this save are announced already, so that only the other
            files of the full checkpoint are written.
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
        """Delete gathered files that were not committed, and release the memory."""
        for spool in (self.full_model, self.hugging_face):
            if spool is not None:
                spool.close()
        if self.release is not None:
            self.release()
