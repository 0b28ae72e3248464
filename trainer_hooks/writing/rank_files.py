"""Writes one rank's files of a save, in the order of :mod:`~trainer_hooks.writing.writer`."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from syncd.checkpoint.save import ADAPTER
from syncd.protocol.errors import SaveFailedError
from syncd.protocol.names import (
    CRITIC,
    FSDP_CONFIG,
    FULL,
    FULL_STATE_DICT,
    HUGGINGFACE,
    LORA_ADAPTER,
    MANIFEST,
    RETIRED,
    SAVING,
    extra_state_name,
    failure_name,
    full_receipt_name,
    is_full_receipt_name,
    is_weights_name,
    optimizer_name,
    receipt_name,
    shard_name,
)
from syncd.protocol.records import NonFinite, Receipt, ReceiptFile, SaveId
from syncd.storage.job import Job
from syncd.storage.step_folders import make_step_folder
from trainer_hooks.writing.contents import RankContents
from trainer_hooks.writing.notes import Notes
from trainer_hooks.writing.parts import (
    link_or_copy,
    make_mark,
    shard_written_by,
    write_model_files,
    write_small,
    write_tensors,
)
from trainer_hooks.writing.spool import Spool

log = logging.getLogger(__name__)


class RankFiles:
    """Writes one rank's files. After an OSError, a method can be called again."""

    def __init__(self, job: Job, rank: int, world_size: int) -> None:
        self._job = job
        self._rank = rank
        self._world_size = world_size

    def add_saving(self, save_id: SaveId) -> None:
        """Create the step's folders, and ``.saving``, so that the pruner leaves the step alone."""
        folder, actor, notes = self._places(save_id)
        make_step_folder(self._job, save_id.step, mark=SAVING)
        # Level by level: with a cached handle, a client could continue in a renamed folder.
        for made in (actor, notes.folder):
            self._job.storage.make_folder(made, below=folder)
        make_mark(self._job.storage, folder / SAVING)

    def remove_full_mark(self, save_id: SaveId) -> None:
        """Delete ``.full_checkpoint``, so that no trainer resumes from files that will be replaced.

        If there are no full receipts, another trainer made the mark. It is kept then, because
        Trinity deletes a step without a mark.
        """
        folder, actor, notes = self._places(save_id)
        if any(map(is_full_receipt_name, self._job.storage.names(notes.folder))):
            self._job.storage.unlink_if_there(folder / FULL)
            if self._rank == 0:
                self._drop_hugging_face(actor / HUGGINGFACE)
        # Even if the mark is gone: the process that deleted it may not have synced the folder.
        self._job.storage.sync_folder(folder)

    def remove_receipts(self, save_id: SaveId) -> None:
        """Delete this rank's receipts of the previous save."""
        _, _, notes = self._places(save_id)
        names = receipt_name(self._rank), full_receipt_name(self._rank), failure_name(self._rank)
        self._unlink_all(notes.folder, *names)
        self._job.storage.sync_folder(notes.folder)

    def remove_full_receipt(self, save_id: SaveId) -> None:
        """Delete the records of an earlier attempt to complete this save."""
        _, _, notes = self._places(save_id)
        self._unlink_all(notes.folder, full_receipt_name(self._rank), failure_name(self._rank))

    def write_weights(
        self, save_id: SaveId, contents: RankContents, nonfinite: NonFinite
    ) -> list[ReceiptFile]:
        """Write this rank's part of the weights."""
        _, actor, _ = self._places(save_id)
        shard = actor / shard_name(self._world_size, self._rank)
        files: list[ReceiptFile] = []
        if contents.adapter_files:
            adapter = actor / LORA_ADAPTER
            files += write_model_files(self._job.storage, adapter, contents.adapter_files)
        if contents.full_model is not None:
            files.append(contents.full_model.commit())
        elif contents.model is not None:
            file = write_tensors(self._job.storage, shard, contents.model)
            files.append(file.model_copy(update={"nonfinite": nonfinite}))
        elif contents.written_by is not None:
            files.append(shard_written_by(self._job.storage, shard, contents.written_by))
        for file in files:
            if file.nonfinite is not None and file.nonfinite.count:
                log.warning(
                    "rank %d: %s of step %d has %s",
                    self._rank,
                    file.name,
                    save_id.step,
                    file.nonfinite,
                )
        return files

    def write_configs(self, save_id: SaveId, contents: RankContents) -> list[ReceiptFile]:
        """Write ``fsdp_config.json`` and ``huggingface/``, on rank 0."""
        _, actor, _ = self._places(save_id)
        config: dict[str, int] = {"world_size": self._world_size}
        if contents.fsdp_version is not None:
            config["FSDP_version"] = contents.fsdp_version
        write_small(self._job.storage, actor / FSDP_CONFIG, json.dumps(config).encode())
        return write_model_files(self._job.storage, actor / HUGGINGFACE, contents.model_files)

    def vouch(
        self, save_id: SaveId, name: str, files: list[ReceiptFile], sync_dtype: str | None
    ) -> None:
        """Write a receipt. After an OSError, other ranks may see the receipt nevertheless."""
        _, _, notes = self._places(save_id)
        receipt = Receipt(
            save_id=str(save_id),
            step=save_id.step,
            rank=self._rank,
            world_size=self._world_size,
            files=tuple(files),
            sync_dtype=sync_dtype,
        )
        notes.write_receipt(name, receipt)

    def is_vouched(self, save_id: SaveId, name: str) -> bool:
        """True if other ranks see this rank's receipt, or may see it, because storage fails."""
        _, _, notes = self._places(save_id)
        try:
            return notes.written(name) == save_id
        except OSError:
            return True

    def begin_rest(self, save_id: SaveId) -> list[ReceiptFile]:
        """Protect an announced save from the pruner; return this rank's receipt entries.

        Raises:
            SaveFailedError: the weights were deleted or replaced.
        """
        folder, _, notes = self._places(save_id)
        try:
            make_mark(self._job.storage, folder / SAVING)
            self._job.storage.sync_folder(folder)
            receipt = notes.receipt(receipt_name(self._rank))
        except FileNotFoundError:
            receipt = None
        if receipt is None or receipt.save_id != str(save_id):
            raise SaveFailedError(
                f"the weights of step {save_id.step} are not in {folder} any more. Save the step "
                "again"
            )
        return list(receipt.files)

    def write_rest(self, save_id: SaveId, contents: RankContents) -> list[ReceiptFile]:
        """Write the other files for resuming; return their entries, without ``huggingface/``."""
        rank, world_size = self._rank, self._world_size
        _, actor, _ = self._places(save_id)
        rest: list[ReceiptFile] = []
        for name, part in (
            (contents.trained_name(world_size, rank), contents.trained),
            (optimizer_name(world_size, rank), contents.optimizer),
            (extra_state_name(world_size, rank), contents.extra),
        ):
            if part is not None:
                rest.append(write_tensors(self._job.storage, actor / name, part))
        if contents.critic is not None:
            rest += self._write_critic(save_id, contents.critic, contents.critic_optimizer)
        self._write_hugging_face(save_id, contents)
        return rest

    def add_full_mark(self, save_id: SaveId) -> None:
        """Create ``.full_checkpoint``, so that training can resume. Delete ``.retired``."""
        folder = self._job.layout.step(save_id.step)
        # Left by an earlier full checkpoint of this step.
        self._job.storage.unlink_if_there(folder / RETIRED)
        make_mark(self._job.storage, folder / FULL)
        self._job.storage.sync_folder(folder)

    def _write_critic(
        self, save_id: SaveId, model: Mapping[str, Any], optimizer: Mapping[str, Any] | None
    ) -> list[ReceiptFile]:
        """Return entries whose names begin with ``critic/``."""
        folder = self._job.layout.step(save_id.step)
        critic = folder / CRITIC
        self._job.storage.make_folder(critic, below=folder)
        parts = [(shard_name(self._world_size, self._rank), model)]
        if optimizer is not None:
            parts.append((optimizer_name(self._world_size, self._rank), optimizer))
        files = [write_tensors(self._job.storage, critic / name, state) for name, state in parts]
        return [file.model_copy(update={"name": f"{CRITIC}/{file.name}"}) for file in files]

    def _write_hugging_face(self, save_id: SaveId, contents: RankContents) -> None:
        """Write full weights for users; the daemon never publishes them."""
        folder, actor, _ = self._places(save_id)
        if contents.hugging_face is not None:
            self._job.storage.make_folder(actor / HUGGINGFACE, below=folder)
            contents.hugging_face.commit()
        elif contents.links_hugging_face:
            self._job.storage.make_folder(actor / HUGGINGFACE, below=folder)
            target = actor / HUGGINGFACE / FULL_STATE_DICT
            link_or_copy(self._job.storage, actor / FULL_STATE_DICT, target)

    def _drop_hugging_face(self, folder: Path) -> None:
        """Delete the old full weights, which would look like the new checkpoint's."""
        weights = filter(is_weights_name, self._job.storage.names(folder))
        self._unlink_all(folder, *weights, MANIFEST)

    def add_hugging_face(self, save_id: SaveId, weights: Spool) -> None:
        """Add the full weights to a complete full checkpoint."""
        folder, actor, _ = self._places(save_id)
        make_mark(self._job.storage, folder / SAVING)
        self._job.storage.sync_folder(folder)
        self._job.storage.make_folder(actor / HUGGINGFACE, below=folder)
        weights.commit()
        self._job.storage.unlink_if_there(folder / SAVING)

    def are_weights_there(self, save_id: SaveId) -> bool:
        """True if an announced save still has the weights of all ranks; checks only file names."""
        _, actor, notes = self._places(save_id)
        receipt = notes.receipt(receipt_name(0))
        if receipt is None or receipt.save_id != str(save_id):
            return False
        ranks = range(self._world_size)
        names, receipts = (
            set(self._job.storage.names(actor)),
            set(self._job.storage.names(notes.folder)),
        )
        shards = {shard_name(self._world_size, rank) for rank in ranks}
        if any(file.name == ADAPTER for file in receipt.files):
            weights_are = self._job.storage.exists(actor / ADAPTER)
        else:
            weights_are = shards <= names or FULL_STATE_DICT in names
        return weights_are and {receipt_name(rank) for rank in ranks} <= receipts

    def _places(self, save_id: SaveId) -> tuple[Path, Path, Notes]:
        step = save_id.step
        actor = self._job.layout.actor(step)
        return self._job.layout.step(step), actor, Notes(self._job, actor)

    def _unlink_all(self, folder: Path, *names: str) -> None:
        for name in names:
            self._job.storage.unlink_if_there(folder / name)
