"""Products of parameters: every combination with ``--deep``, and the usual ones in each run."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def product(
    *axes: Iterable[Any], usual: Callable[..., bool]
) -> list[Any]:  # of pytest.param, whose type is not public
    """Return all combinations, for ``pytest.mark.parametrize``.

    Args:
        axes: the values of each parameter.
        usual: whether a combination runs without ``--deep``: it can fail where no other does.
    """
    return [
        pytest.param(*values, marks=() if usual(*values) else pytest.mark.deep)
        for values in itertools.product(*axes)
    ]
