"""``syncd doctor``: test a job's storage."""

from __future__ import annotations

import json
import socket
import textwrap
from collections import Counter
from pathlib import Path
from typing import Final, Self

import click
from rich.console import Console
from rich.status import Status
from rich.text import Text

from syncd.cli import options
from syncd.cli.signals import cleaned_up
from syncd.doctor.examination import Deadlines, Examination, Watching, join
from syncd.doctor.finding import Finding, Severity, worst
from syncd.protocol.errors import UnfitStorageError
from syncd.protocol.names import printable
from syncd.storage.job import Job

_STYLES: Final = {Severity.OK: "green", Severity.WARN: "yellow", Severity.FAIL: "bold red"}
_LIMITS: Final = Deadlines()
#: The column in which the text begins, after the verdict and the name.
_INDENT: Final = 18


@click.command("doctor", epilog="Example: syncd doctor /shared/jobs/qwen-grpo --peer 0")
@options.job
@click.option(
    "--peer",
    type=options.CountRange(min=0, max=1),
    default=None,
    metavar="HOST_NUMBER",
    help="Test between two hosts: give 0 on this host, and at the same time 1 on the other host.",
)
@click.option(
    "--wait",
    type=options.SecondsRange(min=1),
    default=_LIMITS.meeting,
    show_default=True,
    help="How long to wait for the other host.",
)
@click.option(
    "--limit",
    type=options.SecondsRange(min=1, max=600),
    default=_LIMITS.look,
    show_default=True,
    help=(
        "How long to wait until another process sees a change. A change that is not seen within "
        "this time counts as not visible."
    ),
)
@options.as_json
def command(job: Path, peer: int | None, wait: float, limit: float, *, as_json: bool) -> None:
    """Test the storage of JOB with processes on one host, or on two hosts.

    JOB is a job directory, or an empty directory for a new job. The command creates files
    only below .syncd/doctor, and removes them at the end. It takes less than a minute if the
    storage works. It needs no daemon, and does not disturb a running daemon.

    Exits with 19 if a test fails: syncd cannot work correctly on such storage. Warnings do not
    change the exit code.
    """
    root = job.resolve()
    examined = Job.at(root)
    limits = Deadlines(look=limit, meeting=wait)
    with cleaned_up(), _Shown(quiet=as_json) as shown:
        if peer == 1:
            findings = join(examined, shown, limits)
        else:
            examination = Examination(examined, shown, limits)
            findings = examination.alone() if peer is None else examination.with_peer()
    failed = [finding.name for finding in findings if finding.verdict is Severity.FAIL]
    if as_json:
        click.echo(json.dumps(_as_json(root, findings), indent=2))
    else:
        counts = Counter(finding.verdict for finding in findings)
        click.echo(", ".join(f"{counts[verdict]} {verdict.value}" for verdict in Severity))
    if failed:
        raise UnfitStorageError(
            f"{printable(root)}: syncd cannot work correctly on this storage. Failed tests: "
            f"{', '.join(failed)}"
        )


def _as_json(root: Path, findings: list[Finding]) -> dict[str, object]:
    return {
        "job": str(root),
        "host": socket.gethostname(),
        "verdict": worst(findings).value,
        "findings": [finding.model_dump(mode="json") for finding in findings],
    }


class _Shown(Watching):
    """Prints each finding at once; on a terminal, also shows the current test."""

    def __init__(self, *, quiet: bool) -> None:
        self._out = Console()
        self._quiet = quiet
        # One console if both go to one terminal, because two consoles would overwrite each other.
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
