"""One rank's files of a save, and rank 0's announcement once all ranks are done.

The order is the protocol's (``docs/protocol.md``, "When a save is complete"): ``.saving``, the old
receipt away, the shard under a temporary name, fsync, rename, receipt; then, on rank 0, the
receipts of all ranks, the pointers, and ``.saving`` away.
"""

from __future__ import annotations

import json
import logging
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import xxhash

from syncd.checkpoint.torch_zip import central_directory_digest
from syncd.protocol.errors import RecordError, SaveFailedError
from syncd.protocol.layout import (
    FSDP_CONFIG,
    FULL,
    HUGGINGFACE,
    RECEIPTS,
    SAVING,
    TEMPORARY,
    JobLayout,
    extra_state_name,
    failure_name,
    full_receipt_name,
    optimizer_name,
    receipt_name,
    shard_name,
)
from syncd.protocol.records import Receipt, ReceiptFile, SaveId, encode, parse
from syncd.storage.errnos import PASSING, is_gone
from syncd.storage.fsio import Draft, Storage
from syncd.storage.steps import make_step_folder, point
from trainer_hooks.torch_file import save_state_dict

log = logging.getLogger(__name__)

_POLL: Final = 0.05

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Contents:
    """What one rank writes in one save; every tensor is in host memory and nobody changes it.

    Attributes:
        model: the rank's part of the state dict.
        optimizer, extra: for a full checkpoint; None otherwise.
        model_files: rank 0 only: writes config and tokenizer into the folder it is given.
        fsdp_version: for ``fsdp_config.json``.
    """

    model: Mapping[str, Any]
    optimizer: Mapping[str, Any] | None = None
    extra: Mapping[str, Any] | None = None
    model_files: tuple[Callable[[Path], object], ...] = ()
    fsdp_version: int | None = None
    is_full: bool = False


class RankWriter:
    """Writes the saves of one rank.

    Promised: the pointer names a step only when every rank's files of one save are whole and
    durable; a save that is cut off at any point is never announced. Not promised: that a save which
    was overtaken by a newer one of the same step is announced.

    Args:
        storage: the shared storage.
        layout: the job.
        rank: this rank.
        world_size: how many there are.
        save_timeout: seconds that rank 0 waits for the other ranks' receipts.
        pauses: seconds before each further attempt at what storage refused for the moment.
    """

    def __init__(
        self,
        storage: Storage,
        layout: JobLayout,
        rank: int,
        world_size: int,
        *,
        save_timeout: float,
        pauses: tuple[float, ...] = (0.2, 2.0),
    ) -> None:
        self._storage = storage
        self._layout = layout
        self._rank = rank
        self._world_size = world_size
        self._timeout = save_timeout
        self._pauses = pauses
        self._stopped = threading.Event()

    def save(self, save_id: SaveId, contents: Contents) -> int:
        """Write this rank's files; on rank 0 also wait for the others and move the pointers.

        Returns:
            The bytes that this rank has written.

        Raises:
            SaveFailedError: the save did not become whole; the pointer was not moved.
        """
        try:
            files = self.again(save_id, lambda: self._write(save_id, contents))
            if contents.is_full:
                # By itself: what is whole may be announced by now, and must not be taken back.
                files = self.again(save_id, lambda: self._write_full(save_id, contents, files))
            written = sum(file.size for file in files)
            if self._rank == 0:
                self.again(save_id, lambda: self._announce(save_id, contents.is_full))
        except OSError as error:
            self._say_failed(save_id)
            raise SaveFailedError(
                f"rank {self._rank} could not write the save of step {save_id.step}: {error}; "
                "what of it was not announced is never served, and the version before it stays"
            ) from error
        except BaseException:
            self._say_failed(save_id)  # a tokenizer that cannot be saved, say
            raise
        return written

    def stop_waiting(self) -> None:
        """Let rank 0 give up the saves that other ranks have not finished."""
        self._stopped.set()

    def _say_failed(self, save_id: SaveId) -> None:
        """Tell rank 0 not to wait for this rank; where that cannot be said, it waits in vain."""
        try:
            receipts = self._layout.actor(save_id.step) / RECEIPTS
            self._storage.replace(receipts / failure_name(self._rank), f"{save_id}\n".encode())
        except OSError as error:
            log.warning("rank %d cannot tell the others that it failed: %s", self._rank, error)

    def again(self, save_id: SaveId, work: Callable[[], T]) -> T:
        """Do something that storage may refuse for a moment, from its start, a few times.

        A folder that the pruner took away under us is made again. What an fsync has refused is
        written again, under a new name: a second fsync of the same file would say that all is well.
        """
        for pause in self._pauses:
            try:
                return work()
            except OSError as error:
                if error.errno not in PASSING or self._stopped.wait(0 if is_gone(error) else pause):
                    raise
                log.warning("step %d: trying again: %s", save_id.step, error)
        return work()

    def _write(self, save_id: SaveId, contents: Contents) -> list[ReceiptFile]:
        step, rank, world_size = save_id.step, self._rank, self._world_size
        actor = self._layout.actor(step)
        receipts = actor / RECEIPTS
        # One by one: a client that remembers a folder by its handle could go on inside one that
        # the pruner has set aside.
        make_step_folder(self._storage, self._layout, step)
        for folder in (actor, receipts):
            self._storage.make_folder(folder, below=self._layout.step(step))
        self._mark(self._layout.step(step) / SAVING)
        # What is about to be replaced is not whole any more: nobody may resume from it.
        self._storage.unlink_if_there(self._layout.step(step) / FULL)
        # Also where it was gone: whoever removed it may not have come to this.
        self._storage.sync_folder(self._layout.step(step))
        for name in (receipt_name(rank), full_receipt_name(rank), failure_name(rank)):
            self._storage.unlink_if_there(receipts / name)
        self._storage.sync_folder(receipts)
        self._remove_leftovers(actor)
        files = [self._write_tensors(actor / shard_name(world_size, rank), contents.model)]
        if rank == 0:
            config: dict[str, int] = {"world_size": world_size}
            if contents.fsdp_version is not None:
                config["FSDP_version"] = contents.fsdp_version
            self._storage.replace(actor / FSDP_CONFIG, json.dumps(config).encode())
            files.extend(self._write_model_files(actor / HUGGINGFACE, contents.model_files))
        self._write_receipt(receipts / receipt_name(rank), save_id, files)
        return files

    def _write_full(
        self, save_id: SaveId, contents: Contents, files: list[ReceiptFile]
    ) -> list[ReceiptFile]:
        """What is needed to resume, beside the model's part."""
        actor = self._layout.actor(save_id.step)
        files = [*files]
        for name, part in (
            (optimizer_name(self._world_size, self._rank), contents.optimizer),
            (extra_state_name(self._world_size, self._rank), contents.extra),
        ):
            if part is not None:
                files.append(self._write_tensors(actor / name, part))
        self._write_receipt(actor / RECEIPTS / full_receipt_name(self._rank), save_id, files)
        return files

    def _mark(self, path: Path) -> None:
        try:
            self._storage.close(self._storage.create(path))
        except FileExistsError:
            pass

    def _remove_leftovers(self, actor: Path) -> None:
        """What this rank left half written when it was killed in an earlier save of this step."""
        ours = tuple(
            f"{TEMPORARY}{name_of(self._world_size, self._rank)}-"
            for name_of in (shard_name, optimizer_name, extra_state_name)
        )
        for found in self._storage.names(actor):
            if found.startswith(ours):
                self._storage.unlink_if_there(actor / found)

    def _write_tensors(self, path: Path, state: Mapping[str, Any]) -> ReceiptFile:
        with Draft(self._storage, path) as draft:
            save_state_dict(state, draft)
            draft.finish()
            size, digest = central_directory_digest(self._storage, draft.temporary)
            draft.commit()
        return ReceiptFile(name=path.name, size=size, digest=digest, over="central-directory")

    def _write_model_files(
        self, folder: Path, writers: Iterable[Callable[[Path], object]]
    ) -> list[ReceiptFile]:
        """Config and tokenizer: libraries write them in place, so elsewhere first."""
        files: list[ReceiptFile] = []
        with tempfile.TemporaryDirectory(prefix="syncd-") as scratch:
            for write in writers:
                write(Path(scratch))
            for source in sorted(path for path in Path(scratch).rglob("*") if path.is_file()):
                content = source.read_bytes()
                name = source.relative_to(scratch).as_posix()
                self._storage.make_folder((folder / name).parent, below=folder.parent)
                self._storage.replace(folder / name, content)
                files.append(
                    ReceiptFile(
                        name=f"{HUGGINGFACE}/{name}",
                        size=len(content),
                        digest=xxhash.xxh3_128_hexdigest(content),
                        over="content",
                    )
                )
        return files

    def _write_receipt(self, path: Path, save_id: SaveId, files: list[ReceiptFile]) -> None:
        receipt = Receipt(
            save_id=str(save_id),
            step=save_id.step,
            rank=self._rank,
            world_size=self._world_size,
            files=tuple(files),
        )
        self._storage.replace(path, encode(receipt))

    def _announce(self, save_id: SaveId, is_full: bool) -> None:
        """Move the pointers, each as soon as what it names is whole on every rank."""
        folder = self._layout.step(save_id.step)
        deadline = time.monotonic() + self._timeout
        if not self._all_wrote(save_id, receipt_name, deadline):
            return
        point(self._storage, self._layout, self._layout.state_pointer, save_id.step)
        if is_full:
            if not self._all_wrote(save_id, full_receipt_name, deadline):
                return
            self._mark(folder / FULL)
            self._storage.sync_folder(folder)
            point(self._storage, self._layout, self._layout.checkpoint_pointer, save_id.step)
        self._storage.unlink_if_there(folder / SAVING)

    def _all_wrote(self, save_id: SaveId, name_of: Callable[[int], str], deadline: float) -> bool:
        """Wait until all ranks have written their receipts of this save.

        Returns:
            False where some rank is at a newer save of this step already.
        """
        receipts = self._layout.actor(save_id.step) / RECEIPTS
        for rank in range(self._world_size):
            while (found := self._receipt(receipts / name_of(rank))) != save_id:
                if found is not None and found.is_newer_than(save_id):
                    log.info("save %s was overtaken by %s", save_id, found)
                    return False
                missing = f"rank {rank} of {self._world_size} has not written its part of the save"
                if self._failed(receipts / failure_name(rank)) == save_id:
                    raise SaveFailedError(f"{missing} of step {save_id.step}: it failed there")
                if time.monotonic() >= deadline:
                    raise SaveFailedError(
                        f"{missing} of step {save_id.step} within {self._timeout:g} s; it was not "
                        "announced"
                    )
                # Another host writes it, over storage that sends no events.
                if self._stopped.wait(_POLL):
                    raise SaveFailedError(f"{missing} of step {save_id.step}, and training ended")
        return True

    def _receipt(self, path: Path) -> SaveId | None:
        try:
            return SaveId.parse(parse(Receipt, self._storage.read(path), path).save_id)
        except RecordError as error:
            log.warning("%s", error)
            return None
        except OSError as error:
            if is_gone(error):
                return None
            raise

    def _failed(self, path: Path) -> SaveId | None:
        try:
            return SaveId.parse(self._storage.read(path).decode(errors="replace").strip())
        except OSError as error:
            if is_gone(error):
                return None
            raise
