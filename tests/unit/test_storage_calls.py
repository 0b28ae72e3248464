"""The number of storage calls: on a network filesystem each is a round trip, a sync far more."""

from pathlib import Path

import pytest

from tests.storage_calls import WORK, summary

#: The most that each may make; whoever needs fewer lowers it, and whoever needs more says why.
MOST = {
    "merge": {"syncs": 6, "changes": 15, "looks": 209},  # one for a map of names
    "publish": {
        "syncs": 23,
        "changes": 88,
        "looks": 129,
    },  # ten for a merge beside the loop, which looks at its save again, and comes sooner; one
    # each for a map, deltas and the trainer's heartbeat, four for a look at configs; ten for what
    # the daemon alone writes, and its format
    "pull": {"syncs": 2, "changes": 9, "looks": 28},  # one for the job's identity
    "delta": {"syncs": 15, "changes": 48, "looks": 26},  # two for outcomes that are due just then
}


@pytest.mark.parametrize("name", WORK)
def test_no_more_storage_calls_are_made(tmp_path: Path, name: str) -> None:
    calls = WORK[name](tmp_path)
    found = summary(calls)
    assert all(found.values())  # they are seen
    assert all(found[kind] <= MOST[name][kind] for kind in found), (found, calls)
