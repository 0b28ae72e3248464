"""Changes of bytes at a place, and what an error says of them."""

from collections.abc import Callable

from hypothesis import strategies as st

from syncd.protocol.errors import CheckpointError

EDGES = (0, 1, 0x7F, 0x80, 0xFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
Edit = Callable[[bytes, int], bytes]


def _flip(value: int) -> Edit:
    return lambda data, at: data[:at] + bytes([data[at] ^ value]) + data[at + 1 :]


def _insert(new: bytes) -> Edit:
    return lambda data, at: data[:at] + new + data[at:]


def _write(new: bytes) -> Edit:
    return lambda data, at: data[:at] + new + data[at + len(new) :]


def _delete(count: int) -> Edit:
    return lambda data, at: data[:at] + data[at + count :]


def _again(count: int) -> Edit:
    return lambda data, at: data[: at + count] + data[at:]


def _cut(data: bytes, at: int) -> bytes:
    return data[:at]


NUMBERS = st.builds(
    lambda value, size: (value % 2 ** (8 * size)).to_bytes(size, "little"),
    st.sampled_from(EDGES),
    st.sampled_from([1, 2, 4, 8]),
)
EDITS: st.SearchStrategy[Edit] = st.one_of(
    st.builds(_flip, st.integers(1, 255)),
    st.builds(_insert, st.binary(min_size=1, max_size=9) | NUMBERS),
    st.builds(_write, NUMBERS),
    st.builds(_delete, st.integers(1, 64)),
    st.builds(_again, st.integers(1, 64)),
    st.just(_cut),
)


def says(error: CheckpointError, where: object) -> None:
    """An error for people: of which file, in few words, on one line."""
    text = str(error)
    assert text.startswith(str(where))
    assert len(text) < 1000
    assert text.isprintable()
