"""``syncd run``: serve a job in the foreground."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import click

from syncd.cli import log_lines, options, sinks
from syncd.cli.signals import stopped_by_signals
from syncd.daemon.config import KEYS, RunConfig
from syncd.daemon.configuration import (
    ConfigReloader,
    Configuration,
    GivenValue,
    load,
    misspelt,
)
from syncd.daemon.host.services import JobSupervisor, RootSupervisor
from syncd.daemon.signs import HangGuard, ServiceManager
from syncd.daemon.telling.journal import MeterOf, unmetered
from syncd.deltas.needs import missing_extra
from syncd.protocol.errors import InvalidSettingsError
from syncd.protocol.events import Misspelt, RootServed
from syncd.protocol.names import printable
from syncd.storage.fsio import Storage
from syncd.storage.job import no_folder
from syncd.torch_extra import require_torch

log = logging.getLogger(__name__)


@options.as_command("run /shared/jobs/qwen-grpo --keep 3", [key for key in KEYS if key != "job"])
@click.pass_context
def command(
    ctx: click.Context,
    /,
    job: Path | None = None,  # of the command line; a configuration can name one, too
    *,
    config: options.ConfigFile = None,
    as_json: Annotated[bool, "--json", "The same as --log-format json."] = False,
    make: Annotated[bool, "Make the folder JOB, but none above it, if it is missing."] = False,
    **_options: Any,
) -> None:
    """Serve JOB, or all jobs in the folder --root, until SIGTERM: merge, publish, signal, prune.

    A second daemon on the same job stands by, and takes over when the first one dies.

    A setting that is not given as an option comes from the environment (SYNCD_KEEP for --keep), or
    else from the configuration file, which the daemon reads again on SIGHUP. See 'syncd config
    --help'.
    """
    said = options.given(ctx)
    if as_json:
        said["log_format"] = GivenValue("json", "--json", is_local=True)
    configuration = ConfigReloader(
        lambda: _load(config, said),
        applied=lambda now: log_lines.set_up(now.log_format, now.log_level),
    )
    for name, meant in misspelt(os.environ).items():
        Misspelt(name, os.environ[name], None, meant).tell(log)
    if make:
        job = configuration.current.job
        try:
            Storage().make_folder(job, below=job.parent)
        except FileNotFoundError as error:
            raise no_folder(job.parent) from error
    with ExitStack() as stack:
        services = _services(configuration, stack)
        # Without a configuration file, SIGHUP keeps its default effect: it ends the process.
        reload = services.reload if config is not None else None
        stack.enter_context(stopped_by_signals(services.stop, reload=reload))
        ended = services.run()
    if not ended:
        # A thread that waits for storage would keep the interpreter from ending, forever.
        sinks.end()
        os._exit(0)


def _load(file: Path | None, said: dict[str, GivenValue]) -> Configuration:
    """Load the configuration, and check that this host supports the settings."""
    configuration = load(file, os.environ, said)
    if configuration.config.cast is not None:
        require_torch(f"cast, set by {printable(configuration.sources['cast'])},")
    if configuration.config.deltas == "on" and (why := missing_extra()) is not None:
        source = printable(configuration.sources["deltas"])
        raise InvalidSettingsError(f'deltas = "on", set by {source}, cannot be used: {why}')
    return configuration


def _services(configuration: ConfigReloader, stack: ExitStack) -> JobSupervisor | RootSupervisor:
    """Make the daemons; their hang guard and metrics run until the stack is closed."""
    config, root = configuration.current.config, configuration.current.root
    manager = ServiceManager.of_environment()
    guard = HangGuard(config.hang_time, manager, together=root is None, last_words=sinks.end)
    stack.enter_context(guard)
    read_again = configuration.again
    each_tick: Callable[[], None] = _nothing
    meter_of: MeterOf = unmetered
    forget: Callable[[Path], None] = _nothing
    if config.metrics_port or config.metrics_textfile is not None:
        # Of an inference server's processes: in its folder these metrics would become its own.
        for name in ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir"):
            os.environ.pop(name, None)
        # Imported here, so that a daemon without metrics needs less memory.
        from syncd.daemon.telling.metrics import Exporter, Metrics  # noqa: PLC0415

        metrics = Metrics()
        exporter = Exporter(metrics, port=config.metrics_port, textfile=config.metrics_textfile)
        stack.enter_context(exporter)

        def read_again_and_note() -> RunConfig | None:
            read = configuration.again()
            metrics.reloaded.set(configuration.whole)
            return read

        read_again = read_again_and_note
        each_tick, meter_of, forget = exporter.tick, metrics.of_job, metrics.forget_job
    if root is None:
        return JobSupervisor(
            configuration.current.job, config, guard, read_again, each_tick, meter_of
        )
    services = RootSupervisor(root, config, guard, read_again, each_tick, meter_of, forget)
    RootServed(root).tell(log)
    return services


def _nothing(*_: object) -> None:
    """Do nothing."""
