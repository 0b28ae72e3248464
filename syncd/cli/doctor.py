"""``syncd doctor``: test a job's storage."""

from __future__ import annotations

import json
import socket
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import click
from annotated_types import Ge, Le
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from syncd.cli import options
from syncd.cli.signals import cleaned_up
from syncd.daemon.config import Count, Seconds
from syncd.doctor.examination import Examination
from syncd.doctor.finding import Verdict, worst
from syncd.protocol.errors import UnfitStorageError
from syncd.protocol.names import printable
from syncd.storage.job import Job

_STYLES: Final[dict[Verdict, str]] = {"ok": "green", "warn": "yellow", "fail": "bold red"}


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
    wait: Annotated[Seconds, Ge(1), "How long to wait for the other host."] = Examination.meeting,
    limit: Annotated[
        Seconds,
        Ge(1),
        Le(600),
        "How long to wait until another process sees a change.",
    ] = Examination.look,
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
    with cleaned_up(), console.status("measuring"):
        findings = Examination(examined, peer, look=limit, meeting=wait).run()
    if as_json:
        answer = {
            "job": str(root),
            "host": socket.gethostname(),
            "verdict": worst(findings).verdict,
            "findings": [*map(asdict, findings)],
        }
        click.echo(json.dumps(answer, indent=2))
    else:
        table = Table.grid("", "", Column(overflow="fold"), padding=(0, 2))
        for finding in findings:
            advice = finding.advice and f"\n→ {printable(finding.advice)}"
            words = Text(printable(finding.words) + advice)
            table.add_row(Text(finding.verdict, _STYLES[finding.verdict]), finding.name, words)
        console.print(table)
        counts = Counter(finding.verdict for finding in findings)
        click.echo(", ".join(f"{counts[verdict]} {verdict}" for verdict in _STYLES))
    if failed := ", ".join(finding.name for finding in findings if finding.verdict == "fail"):
        raise UnfitStorageError(
            f"{printable(root)}: syncd cannot work correctly on this storage. Failed tests: "
            f"{failed}"
        )
