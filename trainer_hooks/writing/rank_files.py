"""One rank's files of a save: written in the order of :mod:`.writer`, and deleted if it fails."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from syncd.checkpoint.merging.plan import Ties
from syncd.checkpoint.save import ADAPTER
from syncd.deltas.delta_index import SavedPiece
from syncd.protocol.errors import SaveFailedError
from syncd.protocol.names import (
    CRITIC,
    FSDP_CONFIG,
    FULL,
    FULL_STATE_DICT,
    HUGGINGFACE,
    LORA_ADAPTER,
    MANIFEST,
    RECEIPTS,
    RETIRED,
    SAVING,
    TEMPORARY,
    delta_name,
    extra_state_name,
    failure_name,
    full_receipt_name,
    is_full_receipt_name,
    is_weights_name,
    master_name,
    optimizer_name,
    part_name,
    receipt_name,
    shard_name,
)
from syncd.protocol.records import NonFinite, Receipt, ReceiptFile, SaveId, encode
from syncd.storage.errnos import GONE, Ignoring
from syncd.storage.fsio import Draft
from syncd.storage.job import Job, make_step_folder
from trainer_hooks.state.small_files import Files
from trainer_hooks.writing.parts import (
    WholePart,
    link_or_copy,
    make_mark,
    write_files,
    write_part,
    write_small,
)

log = logging.getLogger(__name__)


class RankContents(NamedTuple):
    """Everything that one rank writes in one save. Its tensors, on the host, must not change.

    Only rank 0 has ``hugging_face`` and ``adapter_files``, and calls ``model_files``: functions
    that make small files.

    Attributes:
        model: the rank's part of the state dict; None if the rank writes no shard.
        whole: whole tensors, in place of ``model``: the rank's own, all of them, or an adapter.
        whole_name: the name of their file in ``actor/``.
        confirm: on rank 0, called when all ranks have written their weights; an error of it fails
            the save before it is announced.
        trained: for a full checkpoint, this rank's part of the model to resume from, if the save
            publishes other weights (an adapter, a merged model, or cast weights).
        trained_name: a function of world size and rank.
        hugging_face: the full state dict, for ``huggingface/``.
        links_hugging_face: whether to link the file of ``whole`` into ``huggingface/``.
        written_by: a function that writes the rank's shard itself, in place of ``model``. If
            storage fails for a moment, it is called again and must start over.
        sync_dtype: the dtype to which published weights were cast; None if no tensor changed.
        fp32: for a delta, the tensors that the cast keeps in fp32 (see ``Receipt``).
        completes: True if the weights are announced already, so that only the rest is written.
        base: the save_id of a delta's base; None for a full save.
        pieces: makes the pieces of a delta; adds the names of tensors with NaN or Inf to the list,
            if the caller does not know them.
        needs_base: closed when this rank's weights are written, because then ``pieces`` no longer
            reads the copy of the base.
        tied: the tied tensors, which a delta leaves out.
    """

    model: Mapping[str, Any] | None = None
    optimizer: Mapping[str, Any] | None = None
    extra: Mapping[str, Any] | None = None
    model_files: Callable[[], Files] = dict
    fsdp_version: int | None = None
    is_full: bool = False
    whole: WholePart | None = None
    whole_name: str = FULL_STATE_DICT
    confirm: Callable[[], object] = lambda: None
    adapter_files: Callable[[], Files] = dict
    trained: Mapping[str, Any] | None = None
    trained_name: Callable[[int, int], str] = shard_name
    critic: Mapping[str, Any] | None = None
    critic_optimizer: Mapping[str, Any] | None = None
    hugging_face: WholePart | None = None
    links_hugging_face: bool = False
    written_by: Callable[[], object] | None = None
    sync_dtype: str | None = None
    fp32: tuple[str, ...] = ()
    completes: bool = False
    base: str | None = None
    pieces: Callable[[list[str]], Iterator[SavedPiece]] | None = None
    needs_base: AbstractContextManager[object] = nullcontext()
    tied: Ties = False


@dataclass
class RankFiles:
    """One rank's files of one save, and what this rank knows of them.

    After an OSError, a method can be called again. Only ``discard`` and ``unprotect`` log errors
    instead.

    Attributes:
        weights_stay: True if the weights are perhaps announced, so they must not be deleted.
        rest_stays: True if the other files for resuming must not be deleted, or do not exist.
        trained: the name of this rank's file of the trained model.
        contents: what the receipt describes.
        of_base: the small files of a delta's base, which are not written.
    """

    job: Job
    rank: int
    world_size: int
    save_id: SaveId
    weights_stay: bool = False
    rest_stays: bool = False
    trained: str | None = None
    contents: RankContents = field(default_factory=RankContents)
    of_base: tuple[ReceiptFile, ...] = ()

    def __post_init__(self) -> None:
        step = self.save_id.step
        self.storage = self.job.storage
        self.folder, self.actor = self.job.layout.step(step), self.job.layout.actor(step)
        self.receipts = self.actor / RECEIPTS

    def name(self, name_of: Callable[[int, int], str]) -> str:
        """The name of this rank's file."""
        return name_of(self.world_size, self.rank)

    def receipt(self, name: str) -> Receipt | None:
        """A receipt; None if the file is missing or not a receipt."""
        return self.job.read(Receipt, self.receipts / name)

    def written(self, name: str) -> SaveId | None:
        """The save that a receipt belongs to, or None."""
        receipt = self.receipt(name)
        return None if receipt is None else SaveId.parse(receipt.save_id)

    def failed(self, rank: int) -> SaveId | None:
        """The save that a rank failed to write, or that rank 0 gave up, or None."""
        with Ignoring(GONE):
            content = self.storage.read(self.receipts / failure_name(rank))
            return SaveId.parse(content.decode(errors="replace").strip())
        return None

    def say_failed(self) -> None:
        """Record that this rank failed."""
        # There may be no folder yet. If another rank replaces the new, empty folder at this moment,
        # writing the record fails, and must be tried again.
        make_step_folder(self.job, self.save_id.step)
        self.storage.make_folder(self.receipts, below=self.folder)
        self.storage.replace(self.receipts / failure_name(self.rank), f"{self.save_id}\n".encode())

    def add_saving(self) -> None:
        """Create the step's folders, and ``.saving``, so that the pruner leaves the step alone."""
        make_step_folder(self.job, self.save_id.step, mark=SAVING)
        # Level by level: with a cached handle, a client could continue in a renamed folder.
        for made in (self.actor, self.receipts):
            self.storage.make_folder(made, below=self.folder)
        make_mark(self.storage, self.folder / SAVING)

    def remove_full_mark(self) -> None:
        """Delete ``.full_checkpoint``, so that no trainer resumes from files that will be replaced.

        If there are no full receipts, another trainer made the mark. It is kept then, because
        Trinity deletes a step without a mark.
        """
        if any(map(is_full_receipt_name, self.storage.names(self.receipts))):
            self.storage.unlink_if_there(self.folder / FULL)
            if self.rank == 0:
                # The old full weights would look like the new checkpoint's.
                folder = self.actor / HUGGINGFACE
                weights = filter(is_weights_name, self.storage.names(folder))
                self._unlink_all(folder, *weights, MANIFEST)
        # Even if the mark is gone: the process that deleted it may not have synced the folder.
        self.storage.sync_folder(self.folder)

    def remove_receipts(self) -> None:
        """Delete this rank's receipts of the previous save."""
        self._unlink_all(self.receipts, receipt_name(self.rank))
        self.remove_full_receipt()
        self.storage.sync_folder(self.receipts)

    def remove_full_receipt(self) -> None:
        """Delete the records of an earlier attempt to complete this save."""
        names = full_receipt_name(self.rank), failure_name(self.rank)
        self._unlink_all(self.receipts, *names)

    def write_weights(self, contents: RankContents) -> list[ReceiptFile]:
        """Write this rank's part of the weights."""
        shard = self.actor / self.name(shard_name)
        files = write_files(self.storage, self.actor / LORA_ADAPTER, contents.adapter_files())
        found: list[str] = []
        if contents.model is not None:
            # Imports torch, which who writes only whole files does not need.
            from trainer_hooks.state.host_buffers import nonfinite_names  # noqa: PLC0415

            found += nonfinite_names(contents.model)
        if contents.pieces is not None:
            file = self._write_delta(contents.pieces(found))
            files.append(file.model_copy(update={"nonfinite": NonFinite.of(found)}))
        elif contents.whole is not None:
            files.append(write_part(self.job, self.actor, contents.whole_name, contents.whole))
        elif contents.model is not None:
            from trainer_hooks.writing.torch_files import write_tensors  # noqa: PLC0415 - likewise

            file = write_tensors(self.storage, shard, contents.model)
            files.append(file.model_copy(update={"nonfinite": NonFinite.of(found)}))
        elif contents.written_by is not None:
            from trainer_hooks.writing.torch_files import shard_written_by  # noqa: PLC0415 - too

            files.append(shard_written_by(self.storage, shard, contents.written_by))
        for file in files:
            if file.nonfinite is not None and file.nonfinite.count:
                log.warning(
                    "rank %d: %s of step %d has %s",
                    self.rank,
                    file.name,
                    self.save_id.step,
                    file.nonfinite,
                )
        return files

    def _write_delta(self, pieces: Iterator[SavedPiece]) -> ReceiptFile:
        from syncd.deltas.delta_file import write_delta  # noqa: PLC0415 - imports NumPy and zstd

        path = self.actor / self.name(delta_name)
        with Draft(self.storage, path, room=self.job.layout.drafts) as draft:
            digest = write_delta(draft.write, pieces)
            draft.commit()
        return ReceiptFile(name=path.name, size=draft.size, digest=digest, over="index")

    def write_configs(self, contents: RankContents, small: Files) -> list[ReceiptFile]:
        """Write ``fsdp_config.json`` and ``huggingface/``, on rank 0."""
        config: dict[str, int] = {"world_size": self.world_size}
        if contents.fsdp_version is not None:
            config["FSDP_version"] = contents.fsdp_version
        write_small(self.storage, self.actor / FSDP_CONFIG, json.dumps(config).encode())
        return write_files(self.storage, self.actor / HUGGINGFACE, small)

    def vouch(self, name: str, files: list[ReceiptFile]) -> None:
        """Write a receipt of durable files. After an OSError, other ranks may see it."""
        contents = self.contents
        receipt = Receipt(
            save_id=str(self.save_id),
            step=self.save_id.step,
            rank=self.rank,
            world_size=self.world_size,
            files=tuple(files),
            sync_dtype=contents.sync_dtype,
            fp32=contents.fp32,
            base=contents.base if name == receipt_name(self.rank) else None,
            tied=contents.tied if isinstance(contents.tied, Mapping) else None,
            of_base=self.of_base,
        )
        self.storage.replace(self.receipts / name, encode(receipt))

    def is_vouched(self, name: str) -> bool:
        """True if other ranks see this rank's receipt, or may see it, because storage fails."""
        try:
            return self.written(name) == self.save_id
        except OSError:
            return True

    def begin_rest(self) -> list[ReceiptFile]:
        """Protect an announced save from the pruner; return this rank's receipt entries.

        Raises:
            SaveFailedError: the weights were deleted or replaced.
        """
        try:
            self._mark(SAVING)
            receipt = self.receipt(receipt_name(self.rank))
        except FileNotFoundError:
            receipt = None
        if receipt is None or receipt.save_id != str(self.save_id):
            raise SaveFailedError(
                f"the weights of step {self.save_id.step} are not in {self.folder} any more. Save "
                "the step again"
            )
        return list(receipt.files)

    def write_rest(self, contents: RankContents) -> list[ReceiptFile]:
        """Write the other files for resuming; return their entries, without ``huggingface/``."""
        from trainer_hooks.writing.torch_files import write_tensors  # noqa: PLC0415 - likewise

        rest: list[ReceiptFile] = []
        for name_of, part in (
            (contents.trained_name, contents.trained),
            (optimizer_name, contents.optimizer),
            (extra_state_name, contents.extra),
        ):
            if part is not None:
                rest.append(write_tensors(self.storage, self.actor / self.name(name_of), part))
        if contents.critic is not None:
            rest += self._write_critic(contents.critic, contents.critic_optimizer)
        self._write_hugging_face(contents)
        return rest

    def add_full_mark(self) -> None:
        """Create ``.full_checkpoint``, so that training can resume. Delete ``.retired``."""
        # Left by an earlier full checkpoint of this step.
        self.storage.unlink_if_there(self.folder / RETIRED)
        self._mark(FULL)

    def _write_critic(
        self, model: Mapping[str, Any], optimizer: Mapping[str, Any] | None
    ) -> list[ReceiptFile]:
        """Return entries whose names begin with ``critic/``."""
        from trainer_hooks.writing.torch_files import write_tensors  # noqa: PLC0415 - likewise

        critic = self.folder / CRITIC
        self.storage.make_folder(critic, below=self.folder)
        parts = [(shard_name, model)]
        if optimizer is not None:
            parts.append((optimizer_name, optimizer))
        files = [
            write_tensors(self.storage, critic / self.name(name_of), state)
            for name_of, state in parts
        ]
        return [file.model_copy(update={"name": f"{CRITIC}/{file.name}"}) for file in files]

    def _write_hugging_face(self, contents: RankContents) -> None:
        """Write full weights for users; the daemon never publishes them."""
        folder = self.actor / HUGGINGFACE
        if contents.hugging_face is not None:
            self.storage.make_folder(folder, below=self.folder)
            write_part(self.job, self.actor / HUGGINGFACE, FULL_STATE_DICT, contents.hugging_face)
        elif contents.links_hugging_face:
            self.storage.make_folder(folder, below=self.folder)
            link_or_copy(self.storage, self.actor / FULL_STATE_DICT, folder / FULL_STATE_DICT)

    def add_hugging_face(self, weights: WholePart) -> None:
        """Add the full weights to a complete full checkpoint."""
        self._mark(SAVING)
        self.storage.make_folder(self.actor / HUGGINGFACE, below=self.folder)
        write_part(self.job, self.actor / HUGGINGFACE, FULL_STATE_DICT, weights)
        self.storage.unlink_if_there(self.folder / SAVING)

    def are_weights_there(self) -> bool:
        """True if an announced save still has the weights of all ranks; checks only file names."""
        receipt = self.receipt(receipt_name(0))
        if receipt is None or receipt.save_id != str(self.save_id):
            return False
        ranks = range(self.world_size)
        names, receipts = map(self.storage.names, (self.actor, self.receipts))
        if any(file.name == ADAPTER for file in receipt.files):
            weights_are = self.storage.exists(self.actor / ADAPTER)
        else:
            name_of = shard_name if receipt.base is None else delta_name
            shards = {name_of(self.world_size, rank) for rank in ranks}
            weights_are = shards <= set(names) or FULL_STATE_DICT in names
        return weights_are and {receipt_name(rank) for rank in ranks} <= set(receipts)

    def remove_temporaries(self, *folders: Path) -> None:
        """Delete this rank's temporary files, left by a kill."""
        parts = (shard_name, master_name, optimizer_name, extra_state_name)
        ours = tuple(f"{TEMPORARY}{self.name(name_of)}-" for name_of in parts)
        for folder in folders:
            self._unlink_all(folder, *(n for n in self.storage.names(folder) if n.startswith(ours)))

    def discard(self) -> None:
        """Delete this rank's unannounced files, beginning with the receipts.

        If a save has only weights, and the folder has this rank's optimizer file, the shard is
        kept: both belong to another trainer's full checkpoint (e.g. verl's), perhaps the only one
        to resume from. The daemon does not publish that shard, because its receipt is
        deleted.
        """
        actor, critic = self.actor, self.folder / CRITIC
        shard, optimizer = self.name(shard_name), self.name(optimizer_name)
        paths: list[Path] = []
        if not self.weights_stay:
            paths += [self.receipts / receipt_name(self.rank), actor / self.name(delta_name)]
            if not (self.rest_stays and self._is_there(actor / optimizer)):
                paths += [actor / shard, actor / self.name(part_name)]
            if self.rank == 0:
                paths += [actor / FULL_STATE_DICT, actor / ADAPTER]
        if not self.rest_stays:
            paths += [
                self.receipts / full_receipt_name(self.rank),
                actor / optimizer,
                actor / self.name(extra_state_name),
                critic / shard,
                critic / optimizer,
            ]
            if self.trained is not None:
                paths.append(actor / self.trained)
        for path in paths:
            self._remove(path)

    def unprotect(self) -> None:
        """Delete ``.saving``, so that the pruner may delete the remaining files."""
        self._remove(self.folder / SAVING)

    def _mark(self, name: str) -> None:
        make_mark(self.storage, self.folder / name)
        self.storage.sync_folder(self.folder)

    def _unlink_all(self, folder: Path, *names: str) -> None:
        for name in names:
            self.storage.unlink_if_there(folder / name)

    def _is_there(self, path: Path) -> bool:
        try:
            return self.storage.exists(path)
        except OSError as error:
            log.warning(
                "cannot check whether %s exists, so syncd treats it as existing: %s", path, error
            )
            return True

    def _remove(self, path: Path) -> None:
        try:
            self.storage.unlink_if_there(path)
        except OSError as error:
            log.warning("cannot remove %s, a file of a failed save: %s", path, error)
