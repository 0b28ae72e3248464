from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncd.daemon.decide import keep_newest, kept


def test_the_newest_are_kept() -> None:
    assert kept([5, 1, 3], [keep_newest(2)]) == {3, 5}


def test_fewer_than_wanted_are_all_kept() -> None:
    assert kept([4], [keep_newest(3)]) == {4}
    assert kept([], [keep_newest(3)]) == frozenset()


def test_what_one_rule_keeps_stays_whatever_the_others_say() -> None:
    assert kept(range(1, 6), [keep_newest(1), lambda found: frozenset(found[:2])]) == {1, 2, 5}


def test_without_a_rule_nothing_is_kept() -> None:
    assert kept([1, 2], []) == frozenset()


def test_keeping_none_is_refused() -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        keep_newest(0)


@given(st.sets(st.integers(1, 50)), st.integers(1, 9))
def test_nothing_that_goes_is_newer_than_what_is_kept(found: set[int], count: int) -> None:
    stays = kept(found, [keep_newest(count)])
    assert stays <= found
    assert len(stays) == min(count, len(found))
    assert all(gone < min(stays) for gone in found - stays)
