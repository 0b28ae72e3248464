"""Blocks that the product refuses, by what its error says."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

import pytest

from syncd.protocol import errors

E = TypeVar("E", bound=errors.SyncdError)


def _refusal(kind: type[E]) -> Callable[[str], AbstractContextManager[pytest.ExceptionInfo[E]]]:
    return lambda match: pytest.raises(kind, match=match)


engine_broken = _refusal(errors.EngineBrokenError)
invalid = _refusal(errors.InvalidSettingsError)
malformed = _refusal(errors.ShardFormatError)
no_checkpoint = _refusal(errors.CheckpointError)
save_fails = _refusal(errors.SaveFailedError)
too_late = _refusal(errors.WaitTimeoutError)
uncovered = _refusal(errors.CoverageError)
unfit = _refusal(errors.EngineMismatchError)
unverified = _refusal(errors.VerificationError)
