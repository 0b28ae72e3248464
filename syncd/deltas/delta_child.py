"""The child process that makes a delta: it compares two versions block by block.

The child opens no files. It reads from descriptors that its parent
(:class:`~syncd.deltas.making.DeltaChild`) opened, and writes only to standard output. It compares
the digest of each tensor with the manifest.
"""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

import xxhash

from syncd.deltas.delta_folder import BLOCK, DENSEST, blocks_of
from syncd.deltas.delta_wire import ALIVE, CHANGED, DIFFERS, DONE, MESSAGE, PLAN, REFUSED, TENSOR
from syncd.deltas.ends import NoDeltaError

if TYPE_CHECKING:
    from syncd.deltas import encoding

#: First, about one block in this many is compared, to stop early if too many elements differ.
_SAMPLE: Final = 20
_WIDEST: Final = 8


class _Pair(NamedTuple):
    """A tensor in both versions; see :data:`TENSOR`."""

    number: int
    width: int
    elements: int
    base_fd: int
    base_offset: int
    target_fd: int
    target_offset: int
    base_digest: bytes
    target_digest: bytes


def run() -> None:
    """Read the plan from standard input, compare, and write the answers to standard output."""
    # Ignore signals to a whole service or from a terminal: the parent handles them.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    requests, answers = io.FileIO(0, "r"), io.FileIO(1, "w")
    try:
        try:
            _Comparison(requests, answers).run()
        except BrokenPipeError:
            raise
        except (NoDeltaError, OSError, ImportError, MemoryError) as error:
            why = (str(error) or type(error).__name__).encode("utf-8", "backslashreplace")
            _write(answers, MESSAGE.pack(REFUSED, 0, 0, 0, len(why), 0, 0) + why)
    except BrokenPipeError:
        pass  # the parent has ended


class _Comparison:
    def __init__(self, requests: io.FileIO, answers: io.FileIO) -> None:
        # Imported here, so that the child can report a missing package to its parent.
        from syncd.deltas import encoding  # noqa: PLC0415

        self._codec = encoding
        self._encoder = encoding.Encoder()
        self._answers = answers
        count, self._total = PLAN.unpack(_read(requests, PLAN.size))
        plan = _read(requests, count * TENSOR.size)
        self._pairs = [_Pair(*fields) for fields in TENSOR.iter_unpack(plan)]
        self._old = memoryview(bytearray(_WIDEST * BLOCK))
        self._new = memoryview(bytearray(_WIDEST * BLOCK))
        self._changed = 0
        self._done = 0

    def run(self) -> None:
        self._look_at_some()
        for pair in self._pairs:
            self._compare(pair)
        self._tell(DONE)

    def _look_at_some(self) -> None:
        """Compare a sample of blocks; raise NoDeltaError if too many elements differ."""
        seen = changed = 0
        for pair, block in self._sample():
            old, new = self._load(pair, block)
            seen += len(new) // pair.width
            changed += self._codec.count_changed(*self._as_elements(old, new, pair.width))
            self._tell(ALIVE)
        if changed > DENSEST * seen:
            raise _dense(changed, seen)

    def _sample(self) -> Iterator[tuple[_Pair, int]]:
        elements = 0
        for pair in self._pairs:
            for block in range(blocks_of(pair.elements)):
                before = elements // (_SAMPLE * BLOCK)
                elements += min(BLOCK, pair.elements - block * BLOCK)
                if elements // (_SAMPLE * BLOCK) > before:
                    yield pair, block

    def _compare(self, pair: _Pair) -> None:
        before, after = xxhash.xxh3_128(), xxhash.xxh3_128()
        for block in range(blocks_of(pair.elements)):
            old, new = self._load(pair, block)
            before.update(old)
            after.update(new)
            self._done += len(new)
            encoded, count = self._encoder.encode(*self._as_elements(old, new, pair.width))
            self._changed += count
            if self._changed > DENSEST * self._total:
                raise _dense(self._changed, self._total)
            if count:
                digest = xxhash.xxh3_64_intdigest(encoded)
                self._tell(CHANGED, pair.number, block, count, digest, encoded)
            else:
                self._tell(ALIVE)
        digests = before.digest(), after.digest()
        for which, told in enumerate((pair.base_digest, pair.target_digest)):
            if digests[which] != told:
                self._tell(DIFFERS, pair.number, which)
                raise SystemExit

    def _load(self, pair: _Pair, block: int) -> tuple[memoryview, memoryview]:
        begin = block * BLOCK
        size = min(BLOCK, pair.elements - begin) * pair.width
        old, new = self._old[:size], self._new[:size]
        _fill(pair.base_fd, old, pair.base_offset + begin * pair.width)
        _fill(pair.target_fd, new, pair.target_offset + begin * pair.width)
        return old, new

    def _as_elements(
        self, old: memoryview, new: memoryview, width: int
    ) -> tuple[encoding.Elements, encoding.Elements]:
        return self._codec.as_elements(old, width), self._codec.as_elements(new, width)

    def _tell(
        self,
        kind: int,
        number: int = 0,
        block: int = 0,
        count: int = 0,
        digest: int = 0,
        encoded: bytes = b"",
    ) -> None:
        head = MESSAGE.pack(kind, self._done, number, block, len(encoded), count, digest)
        _write(self._answers, head + encoded)


def _dense(changed: int, seen: int) -> NoDeltaError:
    return NoDeltaError(
        f"{changed} of {seen} elements differ: if more than {DENSEST:.0%} differ, a delta would "
        "save little"
    )


def _fill(fd: int, view: memoryview, offset: int) -> None:
    while view:
        count = os.preadv(fd, [view], offset)
        if count == 0:
            raise NoDeltaError("a file of weights became shorter while it was read")
        view = view[count:]
        offset += count


def _read(pipe: io.FileIO, count: int) -> bytes:
    parts = []
    while count:
        part = pipe.read(count)
        if not part:
            raise BrokenPipeError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _write(pipe: io.FileIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[pipe.write(view) or 0 :]
