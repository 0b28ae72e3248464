"""A trainer of several ranks without torch, and what its versions hold: for hosts without it.

The order of a save is that of ``trainer_hooks.writing``, whose own tests are elsewhere; what is
tested with this is all that comes after.
"""

from __future__ import annotations

import json
import secrets
import struct
from collections.abc import Mapping
from pathlib import Path

import xxhash

from syncd.checkpoint.torch_files.torch_zip import central_directory_digest
from syncd.coordination.leased_version import LeasedVersion
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import (
    FSDP_CONFIG,
    HUGGINGFACE,
    RECEIPTS,
    SAVING,
    receipt_name,
    shard_name,
)
from syncd.protocol.records import Receipt, ReceiptFile, SaveId, encode
from syncd.storage.fsio import Storage
from syncd.storage.job import Job
from syncd.storage.step_folders import make_step_folder, point
from tests.shards import chunk, shard, sharded, tensor

_CONFIG = b'{"model_type": "tiny"}'


class TrainerByHand:
    """Saves whose weights all are one number, so that a mixture of two saves shows.

    Args:
        job: the job directory, as the trainer's host has it.
        megabytes: of float32 in all tensors together.
        tensors: how many there are.
        ranks: how many files the tensors are cut into, each in equal parts.
        run: of all its save ids.
    """

    def __init__(
        self,
        job: Path,
        *,
        megabytes: float = 0.1,
        tensors: int = 4,
        ranks: int = 2,
        run: str | None = None,
    ) -> None:
        self._storage = Storage(job)
        self._layout = JobLayout(job)
        self._part = int(megabytes * 1e6 / 4 / tensors / ranks)
        self._tensors = tensors
        self._ranks = ranks
        self._run = run or f"hand{secrets.token_hex(2)}"
        self._saves = 0

    def save(self, step: int, number: float | None = None) -> None:
        """Write a whole save, rank by rank, and let the pointer name it.

        ``number`` is what all weights are: the step, where nothing else is said.
        """
        layout, storage = self._layout, self._storage
        save_id = SaveId(self._run, step, self._saves)
        self._saves += 1
        for rank in range(self._ranks):
            self.save_rank(save_id, rank, float(step) if number is None else number)
        point(Job(storage, layout), layout.state_pointer, step)
        storage.unlink_if_there(layout.step(step) / SAVING)

    def save_rank(self, save_id: SaveId, rank: int, number: float) -> None:
        """Write one rank's part, with its receipt."""
        storage, step = self._storage, save_id.step
        folder, actor = self._layout.step(step), self._layout.actor(step)
        make_step_folder(Job(storage, self._layout), step, mark=SAVING)
        for made in (actor / RECEIPTS, actor / HUGGINGFACE):
            storage.make_folder(made, below=folder)
        if not storage.exists(folder / SAVING):  # the step was saved before
            storage.close(storage.create(folder / SAVING))
        receipt = actor / RECEIPTS / receipt_name(rank)
        storage.unlink_if_there(receipt)
        storage.sync_folder(receipt.parent)
        path = actor / shard_name(self._ranks, rank)
        storage.replace(path, self.shard(rank, number))
        size, digest = central_directory_digest(storage, path)
        files = [ReceiptFile(name=path.name, size=size, digest=digest, over="central-directory")]
        if rank == 0:
            told = json.dumps({"world_size": self._ranks}).encode()
            storage.replace(actor / FSDP_CONFIG, told)
            config = f"{HUGGINGFACE}/config.json"
            storage.replace(actor / config, _CONFIG)
            digest = xxhash.xxh3_128_hexdigest(_CONFIG)
            files.append(ReceiptFile(name=config, size=len(_CONFIG), digest=digest, over="content"))
        record = Receipt(
            save_id=str(save_id),
            step=step,
            rank=rank,
            world_size=self._ranks,
            files=tuple(files),
        )
        storage.replace(receipt, encode(record))

    def shard(self, rank: int, number: float) -> bytes:
        """The bytes of one rank's file, as ``torch.save`` would write them."""
        part, whole = self._part, (self._part * self._ranks,)
        state: Mapping[str, object] = {
            f"part.{key}": sharded(
                chunk(tensor((part,), (1,), key=str(key)), (rank * part,), (part,)), shape=whole
            )
            for key in range(self._tensors)
        }
        data = struct.pack("<f", number) * part
        return shard(state, **{f"data/{key}": data for key in range(self._tensors)})


def numbers(version: LeasedVersion) -> set[float]:
    """The numbers that a version's tensors are made of, each of one alone.

    Raises:
        AssertionError: a tensor is a mixture.
    """
    found = set()
    for file in version.open_weights():
        for entry in file.entries:
            data = file.storage.pread_all(file.fd, entry.end - entry.begin, entry.begin)
            assert data == data[:4] * (len(data) // 4), f"{entry.name} is a mixture of saves"
            found.add(struct.unpack("<f", data[:4])[0])
    return found
