"""``syncd doctor``: test a job's storage."""

from __future__ import annotations

import json
import socket
import textwrap
from collections import Counter
from pathlib import Path
from typing import Annotated, Final

import click
from annotated_types import Ge, Le
from rich.console import Console
from rich.text import Text

from syncd.cli import options
from syncd.cli.signals import cleaned_up
from syncd.daemon.config import Count, Seconds
from syncd.doctor.examination import Deadlines, Examination, helper, join
from syncd.doctor.finding import Finding, Severity
from syncd.protocol.errors import UnfitStorageError
from syncd.protocol.names import printable
from syncd.storage.job import Job

_STYLES: Final = {Severity.OK: "green", Severity.WARN: "yellow", Severity.FAIL: "bold red"}
_LIMITS: Final = Deadlines()
#: The column in which the text begins, after the verdict and the name.
_INDENT: Final = 18


@options.as_command("doctor /shared/jobs/qwen-grpo --peer 0")
def command(
    job: Path,
    *,
    peer: Annotated[
        Count | None,
        Ge(0),
        Le(1),
        "--peer HOST_NUMBER",
        "Test between two hosts: give 0 on this host, and at the same time 1 on the other host.",
    ] = None,
    wait: Annotated[Seconds, Ge(1), "How long to wait for the other host."] = _LIMITS.meeting,
    limit: Annotated[
        Seconds,
        Ge(1),
        Le(600),
        "How long to wait until another process sees a change. A change that is not seen within "
        "this time counts as not visible.",
    ] = _LIMITS.look,
    as_json: options.Json = False,
) -> None:
    """Test the storage of JOB with processes on one host, or on two hosts.

    JOB is a job directory, or an empty directory for a new job. The command needs no daemon,
    disturbs none, takes less than a minute if the storage works, and removes the files that it
    creates below .syncd/doctor.

    Exits with 19 if a test fails, because syncd cannot work correctly on such storage. Warnings do
    not change the exit code.
    """
    examined = Job.at(job.resolve())
    root = examined.layout.root
    console = Console(stderr=as_json)
    with cleaned_up(), console.status("looking at the job") as status:

        def report(finding: Finding) -> None:
            if not as_json:
                console.print(_text(finding, console.width), soft_wrap=True)

        limits = Deadlines(look=limit, meeting=wait)
        if peer == 1:
            status.update("waiting for the other host")
            findings = join(examined, limits)
            for finding in findings:
                report(finding)
        else:
            examination = Examination(examined, limits, report, status.update)
            findings = examination.run(helper if peer is None else None)
    failed = [finding.name for finding in findings if finding.verdict is Severity.FAIL]
    counts = Counter(finding.verdict for finding in findings)
    if as_json:
        answer = {
            "job": str(root),
            "host": socket.gethostname(),
            "verdict": max(counts, key=list(Severity).index, default=Severity.OK).value,
            "findings": [finding.model_dump(mode="json") for finding in findings],
        }
        click.echo(json.dumps(answer, indent=2))
    else:
        click.echo(", ".join(f"{counts[verdict]} {verdict.value}" for verdict in Severity))
    if failed:
        raise UnfitStorageError(
            f"{printable(root)}: syncd cannot work correctly on this storage. Failed tests: "
            f"{', '.join(failed)}"
        )


def _text(finding: Finding, width: int) -> Text:
    paragraphs = [printable(finding.words)]
    if finding.advice:
        paragraphs.append(f"→ {printable(finding.advice)}")
    lines = [
        line
        for paragraph in paragraphs
        for line in textwrap.wrap(paragraph, max(40, width - _INDENT), break_on_hyphens=False)
    ]
    verdict = finding.verdict.value
    head = f"{verdict:<4}  {finding.name:<11}"
    text = Text(f"{head:<{_INDENT}}" + f"\n{'':<{_INDENT}}".join(lines))
    text.stylize(_STYLES[finding.verdict], 0, len(verdict))
    return text
