"""``syncd run``: serve a job in the foreground."""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from syncd.cli import log_lines, options
from syncd.cli.signals import stopped_by_signals
from syncd.daemon.config import RunConfig
from syncd.daemon.configuration import Reloader, load, misspelt
from syncd.daemon.hang import HangGuard
from syncd.daemon.meter import MeterOf, unmetered
from syncd.daemon.notify import ServiceManager
from syncd.daemon.root_services import RootServices
from syncd.daemon.services import Services
from syncd.protocol.events import Event

log = logging.getLogger(__name__)

_DEFAULTS = RunConfig()


@click.command("run", epilog="Example: syncd run /shared/jobs/qwen-grpo --keep 3")
@click.argument("job", required=False, type=click.Path(path_type=Path, file_okay=False))
@options.config_file
@click.option(
    "--tick",
    type=click.FloatRange(min=0, min_open=True, max=60),
    default=_DEFAULTS.tick,
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
    "--root",
    type=click.Path(path_type=Path, file_okay=False),
    default=None,
    help="Instead of JOB: serve all jobs in this folder, as they come and go.",
)
@click.option(
    "--concurrent-merges",
    type=click.IntRange(min=1),
    default=_DEFAULTS.concurrent_merges,
    show_default=True,
    help="With --root: of how many jobs saves are merged at a time.",
)
@click.option(
    "--exit-when-idle/--no-exit-when-idle",
    default=_DEFAULTS.exit_when_idle,
    help="End once all trainers and explorers that were there are gone, and all is published.",
)
@click.option(
    "--remote-timeout",
    type=click.FloatRange(min=0),
    default=_DEFAULTS.remote_timeout,
    show_default=True,
    metavar="SECONDS",
    help="How long a step without weights and without a remote path is waited for.",
)
@click.option(
    "--dcp-prefix",
    default=None,
    help="What the model's names begin with, of torch.distributed.checkpoint.  [default: find out]",
)
@click.option(
    "--hang-time",
    type=click.FloatRange(min=0, min_open=True),
    default=_DEFAULTS.hang_time,
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
@click.option(
    "--metrics-port",
    type=click.IntRange(min=0, max=65535),
    default=_DEFAULTS.metrics_port,
    show_default=True,
    help="Where on 127.0.0.1 Prometheus finds metrics; 0 for nowhere.",
)
@click.option(
    "--metrics-textfile",
    type=click.Path(path_type=Path, dir_okay=False),
    default=None,
    help="A file of this host that the node exporter reads metrics from; it ends with .prom.",
)
@options.log_format
@options.log_level
@click.pass_context
def command(ctx: click.Context, /, config: Path | None, **_options: Any) -> None:
    """Serve JOB, or all jobs in the folder --root, until SIGTERM: merge, publish, signal, prune.

    A second daemon on the same job stands by, and takes over when the first one dies.

    What is not said here is taken from the environment (SYNCD_KEEP for --keep), then from the
    configuration file, which SIGHUP lets the daemon read again: see 'syncd config --help'.
    """
    said = options.given(ctx)
    configuration = Reloader(
        lambda: load(config, os.environ, said),
        applied=lambda now: log_lines.set_up(now.log_format, now.log_level),
    )
    for name, meant in misspelt(os.environ).items():
        extra = Event.CONFIG_UNHEARD(key=name, value=os.environ[name], in_force=None)
        log.warning("%s is not read; did you mean %s?", name, meant, extra=extra)
    # A save of a thousand ranks is a thousand open files.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    log.debug("up to %d open files instead of %d", hard, soft)
    with ExitStack() as stack:
        services = _services(configuration, stack)
        # Without a file there is nothing to read again: SIGHUP ends the process, as ever.
        reload = services.reload if config is not None else None
        stack.enter_context(stopped_by_signals(services.stop, reload=reload))
        ended = services.run()
    if not ended:
        # A thread that storage holds would keep the interpreter from ending, for ever.
        logging.shutdown()
        os._exit(0)


def _services(configuration: Reloader, stack: ExitStack) -> Services | RootServices:
    """The daemons, and what is beside them while the stack is open."""
    config, root = configuration.current.config, configuration.current.root
    manager = ServiceManager.of_environment()
    guard = HangGuard(config.hang_time, manager, together=root is None)
    stack.enter_context(guard)
    read_again = configuration.again
    each_tick: Callable[[], None] = _nothing
    meter_of: MeterOf = unmetered
    forget: Callable[[Path], None] = _nothing
    if config.metrics_port or config.metrics_textfile is not None:
        # Imported here: nobody else needs them, and a daemon without metrics is smaller.
        from syncd.daemon.metrics import Metrics  # noqa: PLC0415
        from syncd.daemon.metrics_export import Exporter  # noqa: PLC0415

        metrics = Metrics()
        exporter = Exporter(metrics, port=config.metrics_port, textfile=config.metrics_textfile)
        stack.enter_context(exporter)
        read_again = _noting(configuration, lambda: metrics.reloaded.set(configuration.whole))
        each_tick, meter_of, forget = exporter.tick, metrics.of_job, metrics.forget_job
    if root is None:
        return Services(
            configuration.current.job,
            config,
            read_again=read_again,
            each_tick=each_tick,
            meter_of=meter_of,
            manager=manager,
            guard=guard,
        )
    return RootServices(
        root,
        config,
        read_again=read_again,
        each_tick=each_tick,
        meter_of=meter_of,
        forget=forget,
        manager=manager,
        guard=guard,
    )


def _nothing(*_: object) -> None:
    """Nobody listens."""


def _noting(configuration: Reloader, note: Callable[[], None]) -> Callable[[], RunConfig | None]:
    def again() -> RunConfig | None:
        config = configuration.again()
        note()
        return config

    return again
