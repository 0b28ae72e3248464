from hypothesis import given
from hypothesis import strategies as st

from syncd.daemon.decide import newest


def test_the_newest_are_kept() -> None:
    assert newest([5, 1, 3], 2) == {3, 5}


def test_fewer_than_wanted_are_all_kept() -> None:
    assert newest([4], 3) == {4}
    assert newest([], 3) == frozenset()


@given(st.sets(st.integers(1, 50)), st.integers(1, 9))
def test_nothing_that_goes_is_newer_than_what_is_kept(found: set[int], count: int) -> None:
    stays = newest(found, count)
    assert stays <= found
    assert len(stays) == min(count, len(found))
    assert all(gone < min(stays) for gone in found - stays)
