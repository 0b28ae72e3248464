"""``syncd doctor``: what a job's storage really does."""

from __future__ import annotations

import json
import signal
import socket
import textwrap
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Final, Self

import click
from rich.console import Console
from rich.status import Status
from rich.text import Text

from syncd.cli import options
from syncd.doctor.examination import Examination, Limits, Watching, join
from syncd.doctor.finding import Finding, Verdict, worst
from syncd.protocol.errors import UnfitStorageError
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import printable
from syncd.storage.fsio import Storage

_STYLES: Final = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "bold red"}
_LIMITS: Final = Limits()
#: Of the words, on a line that begins with verdict and name.
_INDENT: Final = 18


@click.command("doctor", epilog="Example: syncd doctor /shared/jobs/qwen-grpo --peer 0")
@options.job
@click.option(
    "--peer",
    type=click.IntRange(min=0, max=1),
    default=None,
    metavar="HOST_NUMBER",
    help="0 here and 1 on another host, at the same time: measure between the two.",
)
@click.option(
    "--wait",
    type=click.FloatRange(min=1),
    default=_LIMITS.meeting,
    show_default=True,
    metavar="SECONDS",
    help="How long the other host is waited for.",
)
@click.option(
    "--limit",
    type=click.FloatRange(min=1, max=600),
    default=_LIMITS.look,
    show_default=True,
    metavar="SECONDS",
    help="How long a change is looked for that does not show.",
)
@options.as_json
def command(job: Path, peer: int | None, wait: float, limit: float, *, as_json: bool) -> None:
    """Measure what the storage of JOB really does, between processes of this host or of two.

    JOB is a job directory, or an empty one that is to become one. Only files below .syncd/doctor
    are made, and they go again. Takes less than a minute on storage that works; needs no daemon,
    and disturbs none.

    Exits with 19 where a promise of syncd's cannot hold; a warning is no failure.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    root = job.resolve()
    storage, layout = Storage(root), JobLayout(root)
    limits = Limits(look=limit, meeting=wait)
    with _Shown(quiet=as_json) as shown:
        if peer == 1:
            findings = join(storage, layout, shown, limits)
        else:
            examination = Examination(storage, layout, shown, limits)
            findings = examination.alone() if peer is None else examination.with_peer()
    failed = [finding.name for finding in findings if finding.verdict is Verdict.FAIL]
    if as_json:
        click.echo(json.dumps(_as_json(root, findings), indent=2))
    else:
        counts = Counter(finding.verdict for finding in findings)
        click.echo(", ".join(f"{counts[verdict]} {verdict.value}" for verdict in Verdict))
    if failed:
        raise UnfitStorageError(
            f"{printable(root)}: promises of syncd's cannot hold here: {', '.join(failed)}"
        )


def _as_json(root: Path, findings: list[Finding]) -> dict[str, object]:
    return {
        "job": str(root),
        "host": socket.gethostname(),
        "verdict": worst(findings).value,
        "findings": [finding.model_dump(mode="json") for finding in findings],
    }


def _leave(number: int, _frame: FrameType | None) -> None:
    """Leave through the finally blocks, which remove what was made."""
    raise SystemExit(128 + number)


class _Shown(Watching):
    """Prints each finding as it comes, and on a terminal what is being looked at.

    Args:
        quiet: whether findings are printed elsewhere.
    """

    def __init__(self, *, quiet: bool) -> None:
        self._out = Console()
        self._quiet = quiet
        # One console where both go to one terminal, or each would write over the other.
        shares = self._out.is_terminal and not quiet
        self._status = Status("", console=self._out if shares else Console(stderr=True))

    def begins(self, what: str) -> None:
        self._status.update(f"looking at {what}")

    def found(self, finding: Finding) -> None:
        if self._quiet:
            return
        verdict = finding.verdict.value
        lines = self._wrapped(printable(finding.words))
        if finding.advice:
            lines += self._wrapped(f"→ {printable(finding.advice)}")
        for number, line in enumerate(lines):
            head = f"{verdict:<4}  {finding.name:<11} " if number == 0 else " " * _INDENT
            text = Text(f"{head} {line}")
            text.stylize(_STYLES[finding.verdict], 0, len(verdict))
            self._out.print(text, soft_wrap=True)

    def _wrapped(self, text: str) -> list[str]:
        return textwrap.wrap(text, max(40, self._out.width - _INDENT - 1), break_on_hyphens=False)

    def __enter__(self) -> Self:
        self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()
