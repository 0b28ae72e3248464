"""Blocks that the product refuses, by what its error says."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

import pytest

from syncd.protocol import errors

E = TypeVar("E", bound=errors.SyncdError)


def _refusal(kind: type[E]) -> Callable[[str], AbstractContextManager[pytest.ExceptionInfo[E]]]:
    return lambda match: pytest.raises(kind, match=match)


invalid = _refusal(errors.InvalidSettingsError)
no_checkpoint = _refusal(errors.CheckpointError)
save_fails = _refusal(errors.SaveFailedError)
uncovered = _refusal(errors.CoverageError)
unfit = _refusal(errors.EngineMismatchError)
