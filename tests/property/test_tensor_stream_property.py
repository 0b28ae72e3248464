import os
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from syncd.checkpoint.merging.file_copy import TensorStream
from syncd.checkpoint.merging.source_reader import SourceReader
from syncd.checkpoint.merging.tiling import Run, Tile, Weave, leaves
from syncd.checkpoint.torch_files.shard_file import ZipRecord
from tests.storages import STORAGE


class Source:
    """A file of one record."""

    has_crc = False

    def __init__(self, path: Path, content: bytes) -> None:
        path.write_bytes(content)
        self.path = path
        self.fd = os.open(path, os.O_RDONLY)
        self.records = {"data/0": ZipRecord(0, len(content), 0)}


@st.composite
def parts(draw: st.DrawFn, factor: int = 1, depth: int = 0) -> Tile:
    """A part whose runs can all be cut into ``factor`` equal slices."""
    if depth == 2 or draw(st.booleans()):
        length = factor * draw(st.integers(1, 9) | st.sampled_from([16, 64, 300]))
        return Run(draw(st.integers(0, 2)), draw(st.integers(0, 50)), length)
    turns = draw(st.integers(1, 5))
    inner = st.lists(parts(factor * turns, depth + 1), min_size=1, max_size=3)
    return Weave(turns, tuple(draw(inner)))


def expanded(part: Tile, contents: list[bytes]) -> bytes:
    """The bytes of a part by the definition of a weave."""
    if isinstance(part, Run):
        return contents[part.source][part.offset : part.offset + part.length]
    slices = [_turns(inner, part.turns, contents) for inner in part.parts]
    return b"".join(b"".join(turn) for turn in zip(*slices, strict=True))


def _turns(part: Tile, count: int, contents: list[bytes]) -> list[bytes]:
    """What a part is in each of ``count`` turns: its runs are cut, and then put together."""
    if isinstance(part, Run):
        whole, size = expanded(part, contents), part.length // count
        return [whole[at : at + size] for at in range(0, part.length, size)]
    inner = [_turns(piece, count * part.turns, contents) for piece in part.parts]
    return [
        b"".join(piece[turn * part.turns + again] for again in range(part.turns) for piece in inner)
        for turn in range(count)
    ]


@settings(max_examples=300)
@given(
    made=st.lists(parts(), min_size=1, max_size=4),
    sizes=st.lists(st.integers(1, 40) | st.sampled_from([200, 4096]), min_size=1, max_size=20),
    seed=st.randoms(use_true_random=False),
)
def test_any_parts_are_read_in_order_into_buffers_of_any_size(
    made: list[Tile], sizes: list[int], seed: object
) -> None:
    longest = 60 + sum(part.length for part in made)
    contents = [seed.randbytes(longest) for _ in range(3)]  # type: ignore[attr-defined]
    expected = b"".join(expanded(part, contents) for part in made)
    assert len(expected) == sum(part.length for part in made)
    with tempfile.TemporaryDirectory() as folder:
        sources = [Source(Path(folder) / str(n), content) for n, content in enumerate(contents)]
        try:
            reader = SourceReader(
                STORAGE, sources, checks=[None] * len(sources), cancel=lambda: None
            )
            stream = TensorStream(reader, made)
            found = bytearray()
            turn = 0
            while len(found) < len(expected):
                buffer = bytearray(min(sizes[turn % len(sizes)], len(expected) - len(found)))
                stream.read_into(memoryview(buffer))
                found += buffer
                turn += 1
        finally:
            for source in sources:
                os.close(source.fd)
    assert bytes(found) == expected


@given(made=st.lists(parts(), max_size=4))
def test_leaves_are_runs_or_weaves_of_runs_and_as_many_bytes(made: list[Tile]) -> None:
    found = list(leaves(made))
    assert sum(leaf.length for leaf in found) == sum(part.length for part in made)
    assert all(
        isinstance(leaf, Run) or all(isinstance(part, Run) for part in leaf.parts) for leaf in found
    )
