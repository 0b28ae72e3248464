"""The bytes of a planned tensor, one after the other, whatever they are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, Literal

from syncd.checkpoint.source_reader import SourceReader
from syncd.checkpoint.tiling import Part, Run, Weave, leaves
from syncd.protocol.errors import SyncdError

#: Formats of ``memoryview.cast`` by their size in bytes.
_FORMATS: Final[dict[int, Literal["Q", "I", "H", "B"]]] = {8: "Q", 4: "I", 2: "H", 1: "B"}
#: Up to so many elements a row are moved column by column, which Python does faster then.
_FEW_COLUMNS: Final = 32


class TensorStream:
    """Reads the bytes of parts in order, into buffers of any size.

    Needs no memory of its own beyond the largest buffer that it is given. A weave is read by
    tiles: as many whole rows as fit, each source in one piece.

    Args:
        reader: of the sources.
        parts: what is read.
    """

    def __init__(self, reader: SourceReader, parts: Iterable[Part]) -> None:
        self._reader = reader
        self._leaves = leaves(parts)
        self._leaf: Part = Run(0, 0, 0)
        self._done = 0  # bytes of it

    def read_into(self, view: memoryview) -> None:
        """Fill ``view`` with the next bytes; there are as many.

        Raises:
            SaveNotReadyError: a source became shorter.
            ShardFormatError: a record is not its CRC-32.
        """
        while view:
            if self._done == self._leaf.length:
                self._leaf, self._done = next(self._leaves), 0
            if isinstance(self._leaf, Run):
                source, offset, length = self._leaf
                count = min(len(view), length - self._done)
                self._reader.read_into(source, offset + self._done, view[:count])
            else:
                count = self._weave(self._leaf, view)
            self._done += count
            view = view[count:]

    def _weave(self, weave: Weave, view: memoryview) -> int:
        """Read the next rows that fit, or what comes next of one that does not; says how much."""
        width = weave.length // weave.turns
        row, within = divmod(self._done, width)
        rows = 0 if within else min(len(view) // width, weave.turns - row)
        begin = 0  # of the part's bytes in a row
        for part in weave.parts:
            assert isinstance(part, Run)  # noqa: S101 - leaves() gives no others
            source, offset, length = part
            own = length // weave.turns
            if rows:
                tile = memoryview(bytearray(rows * own))
                self._reader.read_into(source, offset + row * own, tile)
                _scatter(tile, own, view[: rows * width], begin, width)
            elif within < begin + own:
                skipped = max(0, within - begin)
                count = min(own - skipped, len(view))
                self._reader.read_into(source, offset + row * own + skipped, view[:count])
                return count
            begin += own
        return rows * width


class ComparedStream:
    """A stream of bytes that must be the same in other places.

    Args:
        stream: what is read.
        copies: the same bytes.
        differs: the error for one of the copies, by its number, that differs at an offset.
        cancel: called for each copy: there can be thousands. It raises to stop.
    """

    def __init__(
        self,
        stream: TensorStream,
        copies: Sequence[TensorStream],
        differs: Callable[[int, int], SyncdError],
        cancel: Callable[[], None],
    ) -> None:
        self._cancel = cancel
        self._stream = stream
        self._copies = copies
        self._differs = differs
        self._done = 0

    def read_into(self, view: memoryview) -> None:
        """Fill ``view`` with the next bytes; there are as many.

        Raises:
            SyncdError: a copy differs; and as :meth:`TensorStream.read_into`.
        """
        self._stream.read_into(view)
        other = memoryview(bytearray(len(view)))
        for number, copy in enumerate(self._copies):
            self._cancel()
            copy.read_into(other)
            if other != view:
                at = next(at for at in range(len(view)) if other[at] != view[at])
                raise self._differs(number, self._done + at)
        self._done += len(view)


def _scatter(tile: memoryview, own: int, view: memoryview, begin: int, width: int) -> None:
    """Put rows of ``own`` bytes each at ``begin`` into rows of ``width`` bytes each."""
    unit = next(size for size in _FORMATS if not (own % size or begin % size or width % size))
    columns = own // unit
    if columns <= _FEW_COLUMNS:
        letter = _FORMATS[unit]
        source, target = tile.cast(letter), view.cast(letter)
        first, step = begin // unit, width // unit
        for column in range(columns):
            target[first + column :: step] = source[column::columns]
        return
    at = begin
    for start in range(0, len(tile), own):
        view[at : at + own] = tile[start : start + own]
        at += width
