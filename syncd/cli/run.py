"""``syncd run``: serve a job in the foreground."""

from __future__ import annotations

import logging
import resource
from pathlib import Path
from typing import Any

import click

from syncd.cli import options
from syncd.daemon.config import DaemonConfig
from syncd.daemon.hang import HangGuard
from syncd.daemon.notify import ServiceManager
from syncd.daemon.service import stopped_by_signals
from syncd.daemon.services import Services

log = logging.getLogger(__name__)


@click.command("run", epilog="Example: syncd run /shared/jobs/qwen-grpo --keep 3")
@options.job
@click.option(
    "--tick",
    type=click.FloatRange(min=0, min_open=True, max=60),
    default=DaemonConfig().tick,
    show_default=True,
    metavar="SECONDS",
    help="How often the job is looked at when no event says that something changed.",
)
@click.option(
    "--memory-dir",
    type=click.Path(path_type=Path, file_okay=False),
    default=None,
    help="A second job directory to serve, on a memory filesystem of this host.",
)
@click.option(
    "--exit-when-idle",
    is_flag=True,
    default=DaemonConfig().exit_when_idle,
    help="End once all trainers and explorers that were there are gone, and all is published.",
)
@click.option(
    "--remote-timeout",
    type=click.FloatRange(min=0),
    default=DaemonConfig().remote_timeout,
    show_default=True,
    metavar="SECONDS",
    help="How long a step without weights and without a remote path is waited for.",
)
@click.option(
    "--hang-time",
    type=click.FloatRange(min=0, min_open=True),
    default=DaemonConfig().hang_time,
    show_default=True,
    metavar="SECONDS",
    help="Without an answer of storage for so long this process ends, for another to take over.",
)
@click.option(
    "--shared-group",
    default=None,
    metavar="GROUP",
    help="A group of trainers, explorers and daemon, which what is made here is given to.",
)
@options.digest
@options.dtype
@options.max_shard_size
@options.copy_threads
@options.policy
def command(job: Path, digest: str, **given: Any) -> None:
    """Serve JOB until SIGTERM: merge, publish, signal, prune.

    A second daemon on the same job stands by, and takes over when the first one dies.
    """
    # A save of a thousand ranks is a thousand open files.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    log.debug("up to %d open files instead of %d", hard, soft)
    config = DaemonConfig(digests=digest == "on", **given)
    manager = ServiceManager.of_environment()
    with HangGuard(config.hang_time, manager) as guard:
        services = Services(job, config, manager=manager, guard=guard)
        with stopped_by_signals(services.stop):
            services.run()
