"""The result of a probe: a verdict, words and measurements."""

from __future__ import annotations

from enum import Enum
from typing import Final

from pydantic import BaseModel

#: The remedy if this user may not change another user's files.
SHARE: Final = (
    "run all processes as one user, or share the job with a group that all users are in "
    "(--shared-group, umask 002)"
)


class Severity(Enum):
    """The severity of a finding."""

    OK = "ok"
    #: Nothing is lost, but an operator should know.
    WARN = "warn"
    #: A promise of syncd cannot hold.
    FAIL = "fail"


class Finding(BaseModel, frozen=True):
    """The result of one probe. ``docs/doctor.md`` explains each name.

    ``advice`` is empty if no remedy is needed. ``measured`` has times in seconds, sizes in bytes.
    """

    name: str
    verdict: Severity
    words: str
    advice: str = ""
    measured: dict[str, float | None] = {}


def ok(name: str, words: str, **measured: float | None) -> Finding:
    """A finding without a problem."""
    return Finding(name=name, verdict=Severity.OK, words=words, measured=measured)


def warn(name: str, words: str, advice: str, **measured: float | None) -> Finding:
    """A finding with a warning."""
    return Finding(name=name, verdict=Severity.WARN, words=words, advice=advice, measured=measured)


def fail(name: str, words: str, advice: str, **measured: float | None) -> Finding:
    """A finding with a failure."""
    return Finding(name=name, verdict=Severity.FAIL, words=words, advice=advice, measured=measured)
