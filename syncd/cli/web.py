"""``syncd web``: show jobs on a web page."""

from __future__ import annotations

import json
import signal
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import click
from annotated_types import Ge, Le

from syncd.cli import options
from syncd.daemon.config import Count
from syncd.storage.job import no_folder
from syncd.web.jobs import Jobs
from syncd.web.server import Server


@options.as_command("web /shared/jobs/qwen-grpo --port 8460")
def command(
    jobs: tuple[Path, ...],
    *,
    port: Annotated[
        Count, Ge(0), Le(65535), "The port of the page on 127.0.0.1; 0 for any free port."
    ] = 8460,
    limit: Annotated[Count, Ge(1), "Show this many of each job's newest versions."] = 200,
    as_json: options.Json = False,
) -> None:
    """Show status and history of JOBS on a web page that updates itself, until Ctrl-C.

    JOBS mean the same as for 'syncd status'; a new job in a folder appears on the page. The command
    only reads, and only while a browser has the page open.

    The page is served only on the loopback address of this host. To see it on your own machine, run
    'ssh -L 8460:127.0.0.1:8460 HOST' there (HOST is this host), and open http://localhost:8460/.
    """
    for job in jobs:
        with suppress(OSError):  # the page shows all other errors
            try:
                job.stat()
            except (FileNotFoundError, NotADirectoryError) as error:
                raise no_folder(job) from error
    shown = Jobs(jobs or options.configured_folders(), limit)
    with Server(shown, port) as server, suppress(KeyboardInterrupt):  # the normal end
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        told = json.dumps({"address": server.address}) if as_json else ""
        click.echo(told or f"{server.address} (Ctrl-C ends it)")
        server.serve_forever()
