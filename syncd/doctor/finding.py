"""A probe's finding: measured, judged, and said in words. Pure."""

from __future__ import annotations

from enum import Enum

from pydantic import BaseModel, ConfigDict

#: A number, a word, or nothing where it could not be measured; and lists of these by name.
Measured = bool | int | float | str | None | list[str] | dict[str, float | str | None]


class Severity(Enum):
    """How bad it is."""

    OK = "ok"
    #: Nothing is lost by it, but someone should know.
    WARN = "warn"
    #: A promise of syncd's cannot hold.
    FAIL = "fail"


class Finding(BaseModel):
    """What one probe has found.

    Attributes:
        name: the probe's, as in ``docs/doctor.md``.
        verdict: how bad it is.
        words: what was seen, for people.
        advice: what to do about it; empty where there is nothing to do.
        measured: the numbers behind it. Times in seconds, sizes in bytes.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    verdict: Severity
    words: str
    advice: str = ""
    measured: dict[str, Measured] = {}


def ok(name: str, words: str, **measured: Measured) -> Finding:
    """Nothing is wrong."""
    return Finding(name=name, verdict=Severity.OK, words=words, measured=measured)


def warn(name: str, words: str, advice: str, **measured: Measured) -> Finding:
    """Someone should know."""
    return Finding(name=name, verdict=Severity.WARN, words=words, advice=advice, measured=measured)


def fail(name: str, words: str, advice: str, **measured: Measured) -> Finding:
    """A promise cannot hold."""
    return Finding(name=name, verdict=Severity.FAIL, words=words, advice=advice, measured=measured)


def worst(findings: list[Finding]) -> Severity:
    """The worst of the verdicts."""
    found = {finding.verdict for finding in findings}
    return next((v for v in (Severity.FAIL, Severity.WARN) if v in found), Severity.OK)
