"""The result of a probe: a verdict, words and advice."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, get_args

#: The remedy if this user may not change another user's files.
SHARE: Final = (
    "run all processes as one user, or share the job with a group that all users are in "
    "(--shared-group, umask 002)"
)
#: The remedy if it is unknown why something failed.
CHECK: Final = "check this host's kernel log, and whether the server can be reached"


#: ``warn``: nothing is lost, but an operator should know. ``fail``: a promise of syncd cannot hold.
Verdict = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """The result of one probe. ``docs/doctor.md`` explains each name.

    ``advice`` is empty if no remedy is needed.
    """

    name: str
    verdict: Verdict
    words: str
    advice: str = ""


def judge(name: str, words: str, *problems: tuple[object, Verdict, str, str]) -> Finding:
    """The finding of the first problem whose condition is true, else ``ok`` with ``words``.

    A problem has a condition, a verdict, words and advice.
    """
    for is_so, verdict, problem, advice in problems:
        if is_so:
            return Finding(name, verdict, problem, advice)
    return Finding(name, "ok", words)


def worst(findings: Iterable[Finding]) -> Finding:
    """The first of the worst findings."""
    return max(findings, key=lambda finding: get_args(Verdict).index(finding.verdict))
