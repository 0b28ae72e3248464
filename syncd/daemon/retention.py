"""Which versions stay published. Pure: rules that compose, each a function of the sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

#: Given all published sequences, lowest first: those that must stay.
KeepRule = Callable[[Sequence[int]], frozenset[int]]


def keep_newest(count: int) -> KeepRule:
    """Keep the newest ``count`` versions.

    Raises:
        ValueError: ``count`` is below 1; LATEST itself always stays.
    """
    if count < 1:
        raise ValueError(f"keep_newest({count}): at least LATEST stays")
    return lambda sequences: frozenset(sequences[-count:])


def kept(sequences: Iterable[int], rules: Iterable[KeepRule]) -> frozenset[int]:
    """What at least one rule keeps."""
    ordered = sorted(sequences)
    return frozenset().union(*(rule(ordered) for rule in rules))
