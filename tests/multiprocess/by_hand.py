"""A trainer of several ranks without torch, and what its versions hold: for hosts without it.

The order of a save is that of ``trainer_hooks.writing``, whose own tests are elsewhere; what is
tested with this is all that comes after.
"""

import json
import secrets
from array import array
from pathlib import Path

import xxhash

from syncd.checkpoint.safetensors_file import DIGESTS, SafetensorsFile
from syncd.checkpoint.safetensors_header import HeaderEntry, header_bytes
from syncd.checkpoint.torch_files.shard_file import central_directory_digest
from syncd.checkpoint.version import WEIGHTS
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import (
    FSDP_CONFIG,
    HUGGINGFACE,
    RECEIPTS,
    SAVING,
    part_name,
    receipt_name,
    shard_name,
)
from syncd.protocol.records import Receipt, ReceiptFile, SaveId, encode
from syncd.storage.fsio import Storage
from syncd.storage.job import Job, make_step_folder, point
from tests.shards import chunk, shard, sharded, tensor

_CONFIG = b'{"model_type": "tiny"}'
#: One element in so many is another one in the next save of an era.
_EVERY = 128


class TrainerByHand:
    """Saves that are one number each, all of them, so that a mixture of two saves shows.

    Args:
        job: the job directory, as the trainer's host has it.
        megabytes: of float32 in all tensors together.
        tensors: how many there are.
        ranks: how many files the tensors are cut into, each in equal parts.
        era: so many saves differ in few elements (:func:`elements`), at most 128; the next ones
            differ from them in all. By default all elements are the number.
        run: of all its save ids.
        named: whether each rank writes some tensors whole, as ``WeightStream`` does.
    """

    def __init__(
        self,
        job: Path,
        *,
        megabytes: float = 0.1,
        tensors: int = 4,
        ranks: int = 2,
        era: int = 1,
        run: str | None = None,
        named: bool = False,
    ) -> None:
        self._storage = Storage(job)
        self._layout = JobLayout(job)
        self._part = int(megabytes * 1e6 / 4 / tensors / ranks)
        self._tensors = tensors
        self._ranks = ranks
        self._era = era
        self._run = run or f"hand{secrets.token_hex(2)}"
        self._saves = 0
        self._named = named

    def save(self, step: int, number: float | None = None) -> None:
        """Write a whole save, rank by rank, and let the pointer name it.

        ``number`` is the save's, a whole one: the step, where nothing else is said.
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
        files = [self._write(actor, rank, number)]
        if rank == 0:
            storage.replace(actor / FSDP_CONFIG, json.dumps({"world_size": self._ranks}).encode())
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

    def _write(self, actor: Path, rank: int, number: float) -> ReceiptFile:
        name_of = part_name if self._named else shard_name
        path = actor / name_of(self._ranks, rank)
        if not self._named:
            self._storage.replace(path, self.shard(rank, number))
            size, digest = central_directory_digest(self._storage, path)
            return ReceiptFile(name=path.name, size=size, digest=digest, over="central-directory")
        keys = range(rank, self._tensors, self._ranks)
        data = elements(number, range(self._part * self._ranks), self._era)
        entries = [
            HeaderEntry(
                f"part.{key}", "F32", (len(data) // 4,), at * len(data), (at + 1) * len(data)
            )
            for at, key in enumerate(keys)
        ]
        digests = xxhash.xxh3_128_hexdigest(data) * len(keys)
        header = header_bytes(entries, {DIGESTS: digests})
        self._storage.replace(path, header + data * len(keys))
        return ReceiptFile(
            name=path.name,
            size=path.stat().st_size,
            digest=xxhash.xxh3_128_hexdigest(header),
            over="header",
        )

    def shard(self, rank: int, number: float) -> bytes:
        """The bytes of one rank's file, as ``torch.save`` would write them."""
        part, whole = self._part, (self._part * self._ranks,)
        state = {
            f"part.{key}": sharded(
                chunk(tensor((part,), (1,), key=str(key)), (rank * part,), (part,)), shape=whole
            )
            for key in range(self._tensors)
        }
        data = elements(number, range(rank * part, (rank + 1) * part), self._era)
        return shard(state, **{f"data/{key}": data for key in range(self._tensors)})


def elements(number: float, places: range, era: int = 1) -> bytes:
    """Some elements of each tensor of a save, as float32.

    An era begins with a number that it divides: all elements of that save are it. In each later
    save of the era one element in 128 becomes the number of the save, and another one each time.
    So any two saves differ in any 128 elements in a row, and those of one era differ in few.
    """
    begun = number - number % era
    found = array("f", [begun]) * len(places)
    for later in range(int(begun) + 1, int(number) + 1):
        first = (later - places.start) % _EVERY
        found[first::_EVERY] = array("f", [later]) * len(found[first::_EVERY])
    return found.tobytes()


def numbers(folder: Path, era: int = 1) -> set[float]:
    """The numbers that a version's tensors are of, each of one alone.

    Raises:
        AssertionError: a tensor is a mixture.
    """
    found = set()
    for path in folder.glob(f"*{WEIGHTS}"):
        with SafetensorsFile.open(Storage(), path) as file:
            for entry in file.entries:
                data = file.storage.pread_all(file.fd, entry.end - entry.begin, entry.begin)
                found.add(number_of(data, era))
    return found


def number_of(data: bytes, era: int = 1) -> float:
    """The number that all elements of a tensor are of, or an AssertionError."""
    number = max(array("f", data[: 4 * _EVERY]))
    assert data == elements(number, range(len(data) // 4), era), "a mixture of saves"
    return number
