"""Ways to copy a merge's bytes: the reasons for the choices in docs/performance.md.

Repeat with ``python -m benchmarks.copying`` as root, because it mounts ext4 and XFS from files.
With ``--dir`` it measures one folder, and needs no root.

The input is four shards. Their pieces of 2 KB to 9 MB alternate in the output, as with FSDP. Each
way copies all pieces into new files, in this process. It is compared with ``cat`` of the shards
into one file. Before each run :func:`settle` prepares the machine.
"""

import ctypes
import errno
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

import xxhash

from benchmarks.machine import Report, median_ratio, parser, settle, turns, whole_rounds

_CAT: Final = "cat shards > file"
_SHARDS: Final = 4
_PAGE: Final = 4096
#: The sizes of a rank's pieces in bytes: norms and biases, then parts of weights.
_SIZES: Final = (2_048, 589_824, 98_304, 98_304, 589_824, 3_440_640, 3_440_640, 9_437_184)
_KIB: Final = 1024


class Piece(NamedTuple):
    """A range of a shard, and its place in the output, in bytes."""

    shard: int
    offset: int
    length: int
    to: int


#: The pieces of each output file.
Layout = list[list[Piece]]
#: Copies the pieces of one output file from open shards.
Copy = Callable[[Sequence[int], int, Sequence[Piece]], None]


@dataclass(frozen=True, slots=True)
class Way:
    """A way to copy the pieces, into ``files`` files at the same time."""

    name: str
    copy: Copy
    files: int = 1
    aligned: bool = False
    preallocate: bool = False


def _buffered(size: int, *, writes: bool = True) -> Copy:
    """Read, compute the digest, and write."""

    def copy(shards: Sequence[int], out: int, pieces: Sequence[Piece]) -> None:
        view = memoryview(bytearray(size))
        hasher = xxhash.xxh3_128()
        for piece in pieces:
            done = 0
            while done < piece.length:
                part = view[: piece.length - done]
                count = os.preadv(shards[piece.shard], [part], piece.offset + done)
                hasher.update(part[:count])
                if writes:
                    os.pwrite(out, part[:count], piece.to + done)
                done += count

    return copy


def _gathered(size: int, *, digest: bool) -> Copy:
    """As :func:`_buffered`, but write only full buffers."""

    def copy(shards: Sequence[int], out: int, pieces: Sequence[Piece]) -> None:
        view = memoryview(bytearray(size))
        hasher = xxhash.xxh3_128()
        filled, at = 0, pieces[0].to
        for piece in pieces:
            done = 0
            while done < piece.length:
                part = view[filled : filled + piece.length - done]
                count = os.preadv(shards[piece.shard], [part], piece.offset + done)
                if digest:
                    hasher.update(part[:count])
                filled += count
                done += count
                if filled == size:
                    os.pwrite(out, view, at)
                    at += size
                    filled = 0
        os.pwrite(out, view[:filled], at)

    return copy


def _in_kernel(call: Callable[[int, int, int, int, int], int]) -> Copy:
    def copy(shards: Sequence[int], out: int, pieces: Sequence[Piece]) -> None:
        for shard, offset, length, to in pieces:
            done = 0
            while done < length:
                done += call(shards[shard], out, length - done, offset + done, to + done)

    return copy


def _sendfile(source: int, out: int, count: int, at: int, to: int) -> int:
    os.lseek(out, to, os.SEEK_SET)
    return os.sendfile(out, source, at, count)


def _clone_and_digest(size: int) -> Copy:
    """Let the kernel copy or share the blocks; read only to compute the digest."""
    kernel, digest = _in_kernel(os.copy_file_range), _buffered(size, writes=False)

    def copy(shards: Sequence[int], out: int, pieces: Sequence[Piece]) -> None:
        kernel(shards, out, pieces)
        digest(shards, out, pieces)

    return copy


_RANGE: Final = _in_kernel(os.copy_file_range)
_SEND: Final = _in_kernel(_sendfile)
_PLAIN: Final = _gathered(256 * _KIB, digest=False)
_WAYS: Final = (
    Way("copy_file_range", _RANGE),
    Way("copy_file_range, 2 files by 2 threads", _RANGE, files=2),
    Way("copy_file_range, 4 files by 4 threads", _RANGE, files=4),
    Way("copy_file_range, preallocated", _RANGE, preallocate=True),
    Way("copy_file_range, aligned to 4 KiB", _RANGE, aligned=True),
    Way("sendfile", _SEND),
    Way("sendfile, 2 files by 2 threads", _SEND, files=2),
    *(
        Way(f"preadv + pwrite, {size} KiB", _gathered(size * _KIB, digest=False))
        for size in (64, 256, 1024, 8192)
    ),
    Way("preadv + pwrite, 256 KiB, 2 files", _PLAIN, files=2),
    Way("preadv + pwrite, 256 KiB, 4 files", _PLAIN, files=4),
    Way("preadv + pwrite, 256 KiB, preallocated", _PLAIN, preallocate=True),
    *(
        Way(f"preadv + xxh3 + pwrite, {size} KiB", _gathered(size * _KIB, digest=True))
        for size in (64, 256, 1024, 8192)
    ),
    Way("the same, 256 KiB, not gathered", _buffered(256 * _KIB)),
    *(
        Way(
            f"the same, {size} KiB, {files} files",
            _gathered(size * _KIB, digest=True),
            files=files,
        )
        for files in (2, 4)
        for size in (256, 1024)
    ),
    Way("copy_file_range, then preadv + xxh3, 256 KiB", _clone_and_digest(256 * _KIB)),
    Way("the same, aligned to 4 KiB", _clone_and_digest(256 * _KIB), aligned=True),
)


def _write_shards(folder: Path, size: int, *, aligned: bool) -> tuple[list[Path], list[Piece]]:
    block = os.urandom(max(_SIZES))
    pieces: list[Piece] = []
    paths = [folder / f"{'aligned' if aligned else 'plain'}-{rank}" for rank in range(_SHARDS)]
    with ExitStack() as stack:
        files = [stack.enter_context(path.open("wb")) for path in paths]
        to = 0
        for length in cycle(_SIZES):
            if to >= size:
                break
            for rank, file in enumerate(files):
                # torch pads to 64 bytes or storage_alignment, after a header for each record.
                step = _PAGE if aligned else 64
                file.seek(-(-(file.tell() + 100) // step) * step)
                own = length // _PAGE * _PAGE if aligned else length
                if own:
                    pieces.append(Piece(rank, file.tell(), own, to))
                    to += own
                file.write(block[:own])
    return paths, pieces


def _split(pieces: Sequence[Piece], count: int) -> Layout:
    total = sum(piece.length for piece in pieces)
    found: Layout = [[]]
    begin = 0
    for piece in pieces:
        if piece.to - begin >= total / count:
            begin = piece.to
            found.append([])
        found[-1].append(piece._replace(to=piece.to - begin))
    return found


def _preallocate(fd: int, size: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _run(way: Way, shards: Sequence[Path], layout: Layout, out: Path, *, durable: bool) -> float:
    begun = time.perf_counter()
    sources = [os.open(path, os.O_RDONLY) for path in shards]

    def one(number: int) -> None:
        pieces = layout[number]
        fd = os.open(out / str(number), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            if way.preallocate:
                _preallocate(fd, pieces[-1].to + pieces[-1].length)
            way.copy(sources, fd, pieces)
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)

    with ThreadPoolExecutor(len(layout)) as pool:
        for done in [pool.submit(one, number) for number in range(len(layout))]:
            done.result()
    for fd in sources:
        os.close(fd)
    return time.perf_counter() - begun


def _cat(shards: Sequence[Path], out: Path, *, durable: bool) -> float:
    begun = time.perf_counter()
    with (out / "cat").open("wb") as file:
        subprocess.run(("cat", *map(str, shards)), stdout=file, check=True)
    if durable:
        subprocess.run(("sync", str(out / "cat")), check=True)
    return time.perf_counter() - begun


def _measure(
    folder: Path, size: int, rounds: int, seconds: dict[str, list[float]], *, durable: bool
) -> None:
    """Add each way's seconds to ``seconds``, except ways that the filesystem lacks."""
    inputs = {aligned: _write_shards(folder, size, aligned=aligned) for aligned in (False, True)}
    out = folder / "out"
    ways = dict(zip((_CAT, *(way.name for way in _WAYS)), (None, *_WAYS), strict=True))
    for number in range(rounds):
        for name in turns(ways, number):
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir()
            way = ways[name]
            shards, pieces = inputs[way is not None and way.aligned]
            settle(shards, 2 * size)
            if way is None:
                took = _cat(shards, out, durable=durable)
            else:
                try:
                    took = _run(way, shards, _split(pieces, way.files), out, durable=durable)
                except OSError as error:
                    if error.errno not in (errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL):
                        raise
                    continue
            seconds.setdefault(name, []).append(took)
            print(f"{folder}: {number + 1} of {rounds}: {name}: {took:.3f} s", file=sys.stderr)
    shutil.rmtree(out)
    for paths, _ in inputs.values():
        for path in paths:
            path.unlink()


def _print_measured(
    report: Report, folder: Path, where: str, size: int, rounds: int, *, durable: bool
) -> None:
    seconds: dict[str, list[float]] = {}
    try:
        _measure(folder, size, rounds, seconds, durable=durable)
    finally:
        if whole := whole_rounds(seconds):
            cat = whole[_CAT]
            report.whole_table(
                f"{where}{', fsync' if durable else ''}: 4 shards of {size / 1e9:.2f} GB in all, "
                f"{len(cat)} rounds",
                ("way", "x cat", "s"),
                [
                    (name, f"{median_ratio(found, cat):.2f}", f"{median(found):.2f}")
                    for name, found in whole.items()
                ],
            )


@contextmanager
def _mounted(work: Path, kind: str) -> Iterator[Path]:
    target = work / kind
    target.mkdir()
    if kind == "tmpfs":
        subprocess.run(("mount", "-t", "tmpfs", "none", str(target)), check=True)
    else:
        image = work / f"{kind}.img"
        with image.open("wb") as file:
            file.truncate(32 * 2**30)
        subprocess.run((f"mkfs.{kind}", "-q", str(image)), check=True)
        subprocess.run(("mount", "-o", "loop", str(image), str(target)), check=True)
    try:
        yield target
    finally:
        subprocess.run(("umount", str(target)), check=True)


def main() -> None:
    options = parser(__doc__, gigabytes=1.0, rounds=5)
    options.set_defaults(dir=None)
    options.add_argument(
        "--fs", nargs="*", default=["ext4", "xfs", "tmpfs"], help="which to mount; as root"
    )
    options.add_argument("--no-fsync", action="store_true", help="without the rounds with fsync")
    given = options.parse_args()
    size = round(given.gigabytes * 1e9)
    modes = (False,) if given.no_fsync else (False, True)
    with tempfile.TemporaryDirectory(prefix="syncd-copying-", dir=given.dir) as made:
        work = Path(made)
        report = Report(work)
        if given.dir is not None:
            for durable in modes:
                _print_measured(report, work, "here", size, given.rounds, durable=durable)
        else:
            for kind in given.fs:
                with _mounted(work, kind) as folder:
                    for durable in modes[: 1 if kind == "tmpfs" else 2]:
                        _print_measured(report, folder, kind, size, given.rounds, durable=durable)


if __name__ == "__main__":
    main()
