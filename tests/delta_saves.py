"""Saves that consist of a full one and deltas, and a daemon that takes them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from syncd.checkpoint.tensor_rules import ITEMSIZE
from syncd.coordination.tensors import DTYPES
from syncd.deltas.delta_file import DeltaReader
from syncd.deltas.delta_index import DeltaPiece, read_index
from syncd.deltas.encoding import Decoder
from syncd.protocol.names import RECEIPTS, receipt_name
from syncd.protocol.records import Latest, Receipt, ReceiptFile, SaveId, encode, parse
from syncd.protocol.reports import BuildSettings, DaemonReport, ExplorerReport
from syncd.storage.job import Job
from syncd.storage.sessions import Session
from tests.delta_files import STORAGE, blocks_of
from tests.merging import build, loaded


@contextmanager
def offered(root: Path) -> Iterator[Job]:
    """Be a daemon that takes deltas, and that has published nothing yet."""
    job = Job.at(root, STORAGE)
    lease_time = job.open().lease_time
    with Session(job.layout, lease_time) as session:
        report = DaemonReport(
            session=session.id, host="h", pid=1, epoch=1, state="watching", time=0.0,
            takes_deltas=True, builds=BuildSettings(max_shard_size=10**9, digests=True, tick=1),
        )  # fmt: skip
        job.storage.replace(job.layout.daemon_report, encode(report))
        yield job


@contextmanager
def follower(job: Job, name: str, *, tip: bool = True, whole: bool = False) -> Iterator[None]:
    """Be an explorer that follows deltas, and ``whole`` tips too, or reads whole versions."""
    with Session(job.layout, job.open().lease_time) as session:
        report = ExplorerReport(
            name=name, session=session.id, status="running", sequence=None, time=0.0,
            follows_deltas=tip, follows_tip=whole,
        )  # fmt: skip
        job.storage.replace(job.layout.explorer(name), encode(report))
        yield


def publish(job: Job, save_id: str, sequence: int = 1, **more: object) -> None:
    """Write LATEST as a daemon that has published this save."""
    saved = SaveId.parse(save_id)
    assert saved is not None
    latest = Latest.model_validate(
        {"sequence": sequence, "step": saved.step, "folder": f"v{sequence:06d}", "save_id": save_id}
        | more
    )
    job.storage.replace(job.layout.latest, encode(latest))


def receipts(job: Job, step: int) -> list[Receipt]:
    """Those of all ranks."""
    folder = job.layout.actor(step) / RECEIPTS

    def receipt(rank: int) -> Receipt:
        path = folder / receipt_name(rank)
        return parse(Receipt, path.read_bytes(), path)

    first = receipt(0)
    return [first, *(receipt(rank) for rank in range(1, first.world_size))]


def delta_in(receipt: Receipt) -> ReceiptFile | None:
    """The receipt's entry of the delta, if there is one."""
    return next((file for file in receipt.files if file.over == "index"), None)


def is_delta(job: Job, step: int) -> bool:
    """True if the save of a step is nothing but a delta on each rank; False if it has no deltas."""
    found = receipts(job, step)
    kinds = {file.over for one in found for file in one.files} - {"content"}
    assert (kinds == {"index"}) is all(one.base is not None for one in found)
    return kinds == {"index"}


def full(job: Job, step: int) -> dict[str, torch.Tensor]:
    """The tensors of a full save, as the daemon merges them."""
    with TemporaryDirectory() as folder:
        build(job.layout.actor(step), Path(folder, "out"))
        return loaded(Path(folder, "out"))


def rebuilt(job: Job, step: int, base: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a delta, made from those of its base."""
    made = {name: tensor.clone() for name, tensor in base.items()}
    covered = dict.fromkeys(made, 0)
    for receipt in receipts(job, step):
        file = delta_in(receipt)
        assert file is not None
        path = job.layout.actor(step) / file.name
        pieces = read_index(STORAGE, path, file.size, file.digest)
        with DeltaReader(STORAGE, path, pieces) as reader:
            for number, piece in enumerate(pieces):
                if piece.is_replica:
                    continue
                part = _part(made[piece.name], piece)
                width = ITEMSIZE[piece.dtype]
                part[:] = b"".join(reader.apply(number, blocks_of(bytes(part), width), Decoder()))
                covered[piece.name] += piece.box.size
    assert covered == {name: tensor.numel() for name, tensor in made.items()}
    return made


def _part(tensor: torch.Tensor, piece: DeltaPiece) -> memoryview:
    """The memory of a piece, which is whole rows, in a whole tensor."""
    assert DTYPES[piece.dtype] == tensor.dtype
    begin = 0
    if tensor.ndim:
        rows, *others = piece.box.offsets
        assert (*others,) == (0,) * (tensor.ndim - 1)
        assert piece.box.shape[1:] == tuple(tensor.shape[1:])
        begin = rows * prod(tensor.shape[1:]) * tensor.itemsize
    content = tensor.reshape(-1).view(torch.uint8).numpy().data
    return content[begin : begin + piece.box.size * tensor.itemsize]
