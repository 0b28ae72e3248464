"""``syncd web``: jobs on a page in a browser."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Final

import click

from syncd.cli import options
from syncd.web.jobs import Jobs
from syncd.web.server import Server

_PORT: Final = 8460


@click.command("web", epilog="Example: syncd web /shared/jobs/qwen-grpo --port 8460")
@click.argument("jobs", nargs=-1, type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=_PORT,
    show_default=True,
    help="Where on 127.0.0.1 the page is; 0 for a port that is free.",
)
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=200,
    show_default=True,
    help="How many versions of each job, the newest.",
)
def command(jobs: tuple[Path, ...], port: int, limit: int) -> None:
    """Show what status and history know of JOBS on a page that updates itself, until Ctrl-C.

    JOBS are job directories, or folders of such, whose jobs may come and go. Without any: those
    that the configurations in /etc/syncd name.

    Only reads, and only while someone has the page open. It is on this host's loopback alone; from
    elsewhere: ssh -L 8460:127.0.0.1:8460 HOST.
    """
    shown = Jobs(jobs or options.configured_folders(), limit)
    with Server(shown, port) as server:
        click.echo(f"{server.address} (Ctrl-C ends it)")
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            pass  # how it is meant to end
