"""A probe's finding: its measurements, verdict and words. Pure."""

from __future__ import annotations

from enum import Enum

from pydantic import BaseModel, ConfigDict

#: A number, a word, or None if it could not be measured; and lists of these by name.
Measured = bool | int | float | str | None | list[str] | dict[str, float | str | None]


class Severity(Enum):
    """The severity of a finding."""

    OK = "ok"
    #: Nothing is lost, but an operator should know.
    WARN = "warn"
    #: A promise of syncd cannot hold.
    FAIL = "fail"


class Finding(BaseModel):
    """The result of one probe.

    Attributes:
        name: the probe's, as in ``docs/doctor.md``.
        verdict: the severity.
        words: the observation, for people.
        advice: the remedy; empty if none is needed.
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
    """An operator should know."""
    return Finding(name=name, verdict=Severity.WARN, words=words, advice=advice, measured=measured)


def fail(name: str, words: str, advice: str, **measured: Measured) -> Finding:
    """A promise cannot hold."""
    return Finding(name=name, verdict=Severity.FAIL, words=words, advice=advice, measured=measured)


def worst(findings: list[Finding]) -> Severity:
    """The worst of the verdicts."""
    found = {finding.verdict for finding in findings}
    return next((v for v in (Severity.FAIL, Severity.WARN) if v in found), Severity.OK)
