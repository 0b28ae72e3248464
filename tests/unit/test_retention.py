from hypothesis import given
from hypothesis import strategies as st

from syncd.daemon.decide import newest


@given(st.sets(st.integers(1, 50)), st.integers(1, 9))
def test_nothing_that_goes_is_newer_than_what_is_kept(found: set[int], count: int) -> None:
    stays = newest(found, count)
    assert stays <= found
    assert len(stays) == min(count, len(found))
    assert all(gone < min(stays) for gone in found - stays)
