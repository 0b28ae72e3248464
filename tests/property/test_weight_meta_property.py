import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncd.checkpoint.tensor_rules import ITEMSIZE
from syncd.coordination.broadcast.weight_meta import (
    ALIGNED,
    HEADER,
    META_LIMIT,
    Header,
    Image,
    WeightMeta,
    WeightSpec,
)
from syncd.protocol.errors import BroadcastError

SIZES = st.one_of(st.integers(0, 3), st.integers(0, 40))
DTYPES = st.sampled_from(sorted(ITEMSIZE))


@st.composite
def metas(draw: st.DrawFn) -> WeightMeta:
    shapes = draw(st.lists(st.lists(SIZES, max_size=2).map(tuple), min_size=1, max_size=12))
    return WeightMeta(
        tuple(WeightSpec(f"layer.{n}", draw(DTYPES), shape) for n, shape in enumerate(shapes))
    )


any_metas = given(metas(), st.integers(ALIGNED, 100_000))


@any_metas
def test_every_byte_of_every_tensor_travels_once_and_in_order(
    meta: WeightMeta, bucket_bytes: int
) -> None:
    image = Image.of(meta, bucket_bytes)
    found = [0] * len(meta.tensors)
    for bucket in image.buckets:
        assert 0 < bucket.size <= bucket_bytes
        end = 0
        for piece in bucket.pieces:
            assert piece.size > 0
            assert piece.at % ALIGNED == 0
            assert end <= piece.at < end + ALIGNED
            end = piece.at + piece.size
            assert image.offsets[piece.tensor] + piece.first == bucket.begin + piece.at
            assert piece.first == found[piece.tensor]
            found[piece.tensor] += piece.size
        assert end == bucket.size
    assert found == [one.nbytes for one in meta.tensors]


@any_metas
def test_tensors_lie_one_after_the_other_at_aligned_places(
    meta: WeightMeta, bucket_bytes: int
) -> None:
    """As host memory is laid out that is received into, whatever the size of buckets."""
    image = Image.of(meta, bucket_bytes)
    at = 0
    for offset, tensor in zip(image.offsets, meta.tensors, strict=True):
        assert offset == at
        at += -(-tensor.nbytes // ALIGNED) * ALIGNED
    assert image.size == at
    for before, after in zip(image.buckets, image.buckets[1:], strict=False):
        assert before.begin + before.size <= after.begin


@any_metas
def test_a_large_tensor_shares_no_bucket_and_small_ones_take_a_quarter_of_one(
    meta: WeightMeta, bucket_bytes: int
) -> None:
    alone = bucket_bytes // ALIGNED * ALIGNED // 16
    for bucket in Image.of(meta, bucket_bytes).buckets:
        if len(bucket.pieces) > 1:
            assert bucket.size <= max(bucket_bytes // 4, ALIGNED)
            assert all(meta.tensors[piece.tensor].nbytes < alone for piece in bucket.pieces)


def test_small_tensors_are_few_buckets() -> None:
    """A model of many tensors is not as many broadcasts."""
    small = tuple(WeightSpec(f"norm.{n}", "BF16", (1024,)) for n in range(1000))
    assert len(Image.of(WeightMeta(small), 1024 * 1024).buckets) == 8


@given(metas(), st.integers(0, 2**40), st.booleans())
def test_what_is_announced_is_understood(meta: WeightMeta, bucket_bytes: int, has: bool) -> None:
    assert WeightMeta.decode(meta.encode()) == meta
    header = Header.of(meta, bucket_bytes, has_digests=has)
    assert len(header.encode()) == HEADER
    assert Header.decode(header.encode()) == header
    assert header.digest == WeightMeta.decode(meta.encode()).digest


@given(metas(), metas())
def test_metas_of_one_digest_are_the_same(one: WeightMeta, other: WeightMeta) -> None:
    assert (one.digest == other.digest) == (one == other)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | DTYPES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=12,
)


@given(JSON | st.lists(st.tuples(st.text(max_size=3), DTYPES, st.lists(st.integers()))))
def test_anything_else_is_refused_and_nothing_else_happens(value: Any) -> None:
    try:
        meta = WeightMeta.decode(json.dumps(value).encode())
    except BroadcastError:
        return
    assert json.loads(meta.encode()) == json.loads(json.dumps(value))


@given(st.binary(max_size=200))
def test_bytes_that_are_no_meta_are_refused(content: bytes) -> None:
    with pytest.raises(BroadcastError):
        WeightMeta.decode(content)


@given(st.binary(min_size=HEADER, max_size=HEADER))
def test_bytes_that_are_no_header_are_refused(content: bytes) -> None:
    with pytest.raises(BroadcastError):
        Header.decode(content)


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000,
        b"[]",
        b'[["a","F32",[1]],["a","F32",[2]]]',
        b'[["a","F32",[-1]]]',
        b'[["a","F32",[1e3]]]',
        b'[["a","F32",[true]]]',
        b'[["a","Q4",[1]]]',
        b'[["a",["F32"],[1]]]',
        b'[["a\\ud800","F32",[1]]]',
        b'[["a","F32",[4611686018427387904]],["b","F32",[4611686018427387904]]]',
        b'["abc"]',
        b'"abc"',
    ],
)
def test_a_meta_that_no_tensors_have_is_refused(content: bytes) -> None:
    with pytest.raises(BroadcastError):
        WeightMeta.decode(content)


def test_a_header_of_impossible_sizes_is_refused() -> None:
    header = Header.of(WeightMeta((WeightSpec("a", "F32", (1,)),)), 0, has_digests=True)
    assert header.bucket_bytes == ALIGNED
    for changed in ({"meta_bytes": 0}, {"meta_bytes": META_LIMIT + 1}, {"bucket_bytes": 1}):
        with pytest.raises(BroadcastError):
            Header.decode(header._replace(**changed).encode())
