import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from syncd.checkpoint.boxes import Box, whole
from syncd.checkpoint.tensor_rules import ITEMSIZE
from syncd.deltas.delta_index import LENGTH, SavedPiece, read_index
from syncd.deltas.limits import BLOCK, DeltaError
from tests.delta_files import STORAGE, applied, written
from tests.programs import completed
from tests.rank_programs import ROOT

DTYPES = sorted(ITEMSIZE)
DIGEST = xxhash.xxh3_128_hexdigest(b"")


def index_at(path: Path, digest: str) -> list[Any]:
    return read_index(STORAGE, path, path.stat().st_size, digest)


def piece(
    name: str, dtype: str, box: Box, new: bytes, old: bytes | None, *, is_replica: bool = False
) -> SavedPiece:
    def of(content: bytes) -> Any:
        return lambda begin, end: memoryview(content)[begin:end]

    return SavedPiece(name, dtype, box, of(new), None if old is None else of(old), is_replica)


def several_blocks() -> list[SavedPiece]:
    new = bytearray(16 * BLOCK)
    new[::1000] = b"1" * len(new[::1000])
    return [piece("t", "BF16", whole((8, BLOCK)), bytes(new), bytes(len(new)))]


@st.composite
def parts(draw: st.DrawFn) -> tuple[str, Box, bytes, bytes | None]:
    """dtype, box, new and old bytes: any bits, so also NaN payloads and negative zeros."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.sampled_from([(), (7,), (900,), (0, 4), (300, 2, 3)]))
    box = Box((5,) * len(shape), shape)
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    old, other = generator.integers(0, 256, (2, box.size * ITEMSIZE[dtype]), np.uint8)
    keep = generator.random(old.shape) >= draw(st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0]))
    new = np.where(keep, old, other)
    return dtype, box, new.tobytes(), old.tobytes() if draw(st.booleans()) else None


@given(st.lists(parts(), max_size=6))
def test_every_piece_of_a_delta_comes_out_bit_for_bit(
    drawn: list[tuple[str, Box, bytes, bytes | None]],
) -> None:
    pieces = [
        piece(f"t{at}", dtype, box, new, old) for at, (dtype, box, new, old) in enumerate(drawn)
    ]
    with TemporaryDirectory() as folder:
        path = Path(folder, "delta")
        digest = written(path, pieces)
        read = index_at(path, digest)
        assert [(one.name, one.dtype, one.box) for one in read] == [one[:3] for one in pieces]
        olds = {
            f"t{at}": bytes(len(new)) if old is None else old
            for at, (_, _, new, old) in enumerate(drawn)
        }
        news = {f"t{at}": new for at, (_, _, new, _) in enumerate(drawn)}
        assert applied(path, digest, olds) == news
        raw = {f"t{at}" for at, (_, _, _, old) in enumerate(drawn) if old is None}
        assert raw.isdisjoint(one.name for one in read if one.needs_base)


@pytest.mark.parametrize("dtype", ["BF16", "F32", "F8_E4M3"])
def test_a_piece_of_several_blocks_is_written_by_blocks(tmp_path: Path, dtype: str) -> None:
    generator = np.random.default_rng(3)
    width, elements = ITEMSIZE[dtype], 2 * BLOCK + 7
    old = generator.integers(0, 256, elements * width, np.uint8)
    new = old.copy()
    new[5 * width] ^= 1
    new[-1] ^= 128  # in the last, short block; the middle one has no entry
    box = Box((11,), (elements,))
    path = tmp_path / "delta"
    digest = written(path, [piece("t", dtype, box, new.tobytes(), old.tobytes())])
    (read,) = index_at(path, digest)
    assert [(block.number, block.changed) for block in read.blocks] == [(0, 1), (2, 1)]
    assert path.stat().st_size < 600
    assert applied(path, digest, {"t": old.tobytes()}) == {"t": new.tobytes()}


def test_every_flipped_byte_of_a_delta_is_found_and_any_of_the_base(tmp_path: Path) -> None:
    old = np.random.default_rng(1).integers(0, 256, 900, np.uint8).tobytes()
    new = bytearray(old)
    new[10:40:2] = bytes(15)
    pieces = [
        piece("sparse", "BF16", Box((0,), (450,)), bytes(new), old),
        piece("raw", "F8_E4M3", Box((2, 0), (2, 3)), b"abcdef", None),
        piece("same", "I64", Box((), ()), b"12345678", b"12345678"),
        piece("elsewhere", "F32", Box((0,), (4,)), b"n" * 16, b"o" * 16, is_replica=True),
    ]
    path = tmp_path / "delta"
    digest = written(path, pieces)
    olds = {"sparse": old, "raw": bytes(6), "same": b"12345678"}
    good = path.read_bytes()
    assert applied(path, digest, olds)["sparse"] == bytes(new)
    for at in range(len(good)):
        for flip in (1, 128):
            bad = bytearray(good)
            bad[at] ^= flip
            path.write_bytes(bad)
            with pytest.raises(DeltaError):
                applied(path, digest, olds)
    path.write_bytes(good)
    for name in ("sparse", "same"):
        bad = bytearray(olds[name])
        bad[5] ^= 4
        with pytest.raises(DeltaError, match=name):
            applied(path, digest, olds | {name: bytes(bad)})


def stored(path: Path, index: object, blocks: bytes = b"") -> str:
    """Write a delta with any index; return the index's digest."""
    content = json.dumps(index).encode()
    path.write_bytes(blocks + content + LENGTH.pack(len(content)))
    return xxhash.xxh3_128_hexdigest(content)


def one_piece(**fields: Any) -> dict[str, Any]:
    usual = {"name": "t", "dtype": "BF16", "box": [[0], [2 * BLOCK]], "digest": DIGEST}
    return {"protocol": 1, "pieces": [usual | fields]}


def entry(number: int = 0, length: int = 5, count: int = 1) -> list[Any]:
    return [number, length, count, "0" * 16]


HOSTILE = {
    "a newer protocol": {"protocol": 2, "pieces": []},
    "an unknown dtype": one_piece(dtype="Q7"),
    "a negative offset": one_piece(box=[[-1], [4]]),
    "a negative size": one_piece(box=[[0], [-4]]),
    "two negative sizes": one_piece(box=[[0, 0], [-4, -4]]),
    "a block of no elements": one_piece(box=[[0], [0]], blocks=[entry()]),
    "offsets of another length": one_piece(box=[[0, 0], [4]]),
    "an end beyond 63 bits": one_piece(box=[[2**63 - 1], [4]]),
    "more elements than 63 bits": one_piece(box=[[0, 0], [2**40, 2**40]]),
    "too many dimensions": one_piece(box=[[0] * 65, [1] * 65]),
    "a name with a control character": one_piece(name="a\nb"),
    "the same offsets twice": {
        "pieces": one_piece()["pieces"] + one_piece(box=[[0], [7]])["pieces"]
    },
    "the same block twice": one_piece(blocks=[entry(), entry()]),
    "a block outside": one_piece(blocks=[entry(2)]),
    "a count of 0": one_piece(blocks=[entry(count=0)]),
    "a count above the block's": one_piece(blocks=[entry(count=BLOCK + 1)]),
    "a length of 1": one_piece(blocks=[entry(length=1)]),
    "a length above the block's": one_piece(blocks=[entry(length=2 * BLOCK + 2)]),
    "a digest of another kind": one_piece(blocks=[[0, 5, 1, "x"]]),
    "a replica with blocks": one_piece(is_replica=True, blocks=[entry()]),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_index_is_refused(tmp_path: Path, what: str) -> None:
    path, index = tmp_path / "delta", HOSTILE[what]
    # The blocks that it lists are in the file, so that it is refused only for its own fault.
    length = sum(block[1] for one in index["pieces"] for block in one.get("blocks", []))
    digest = stored(path, index, bytes(length))
    with pytest.raises(DeltaError):
        index_at(path, digest)


def test_an_index_that_the_hostile_ones_resemble_is_accepted(tmp_path: Path) -> None:
    path, index = tmp_path / "delta", one_piece(blocks=[entry()])
    digest = stored(path, index, bytes(5))
    assert len(index_at(path, digest)) == 1
    stored(path, index, bytes(6))
    with pytest.raises(DeltaError, match="as long as"):
        index_at(path, digest)


def test_an_index_above_the_limit_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "delta"
    with path.open("wb") as file:
        file.truncate(2**40)
        file.seek(0, 2)
        file.write(LENGTH.pack(2**39))
    with pytest.raises(DeltaError, match="too long"):
        index_at(path, DIGEST)


@pytest.mark.parametrize("size", [0, 7, 100])
def test_a_file_that_is_too_short_or_of_another_size_is_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / "delta"
    digest = stored(path, {"pieces": []})
    if size < 100:
        path.write_bytes(bytes(size))
    with pytest.raises(DeltaError, match="bytes"):
        read_index(STORAGE, path, size, digest)


@given(st.binary(max_size=300), st.integers(0, 300))
def test_any_bytes_are_read_or_refused(content: bytes, length: int) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder, "delta")
        path.write_bytes(content + LENGTH.pack(length))
        index = content[len(content) - length :] if length <= len(content) else b""
        try:
            index_at(path, xxhash.xxh3_128_hexdigest(index))
        except DeltaError:
            pass


def test_a_thread_that_outlives_its_program_writes_the_same_delta(tmp_path: Path) -> None:
    """It trains on, but no other thread can be started any more."""
    program = """
        import sys, threading
        from concurrent.futures import ThreadPoolExecutor
        from pathlib import Path
        from tests.property.test_delta_files_property import several_blocks, written

        def train():
            try:
                while True:
                    ThreadPoolExecutor(1).submit(int)
            except RuntimeError:
                print(written(Path(sys.argv[1]), several_blocks()))

        threading.Thread(target=train).start()
    """
    path = tmp_path / "delta"
    command = [sys.executable, "-c", dedent(program), path]
    digest = completed(command, cwd=ROOT, check=True).stdout.strip()
    assert digest == written(tmp_path / "same", several_blocks())
    assert path.read_bytes() == (tmp_path / "same").read_bytes()
