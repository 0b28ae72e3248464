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
from syncd.daemon.configuration import (
    ConfigReloader,
    Configuration,
    GivenValue,
    load,
    misspelt,
)
from syncd.daemon.hang import HangGuard
from syncd.daemon.host.services import RootServices, Services
from syncd.daemon.notify import ServiceManager
from syncd.daemon.telling.meter import MeterOf, unmetered
from syncd.deltas.making import why_not_here
from syncd.protocol.errors import InvalidSettingsError
from syncd.protocol.events import Event
from syncd.protocol.names import printable
from syncd.torch_extra import require_torch

log = logging.getLogger(__name__)

_DEFAULTS = RunConfig()


@click.command("run", epilog="Example: syncd run /shared/jobs/qwen-grpo --keep 3")
@click.argument("job", required=False, type=click.Path(path_type=Path, file_okay=False))
@options.config_file
@click.option(
    "--tick",
    type=options.SecondsRange(min=0, min_open=True, max=60),
    default=_DEFAULTS.tick,
    show_default=True,
    help="How often to check the job for changes that no file event has reported.",
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
    help="Instead of JOB: serve all jobs in this folder, including jobs created later.",
)
@click.option(
    "--concurrent-merges",
    type=options.CountRange(min=1),
    default=_DEFAULTS.concurrent_merges,
    show_default=True,
    help="With --root: how many jobs can merge saves at the same time.",
)
@click.option(
    "--exit-when-idle/--no-exit-when-idle",
    default=_DEFAULTS.exit_when_idle,
    help="Exit once all trainers and explorers have ended, and all saves are published.",
)
@click.option(
    "--refuse-nonfinite/--no-refuse-nonfinite",
    default=_DEFAULTS.refuse_nonfinite,
    help=(
        "Quarantine a save in which the trainer found NaN or Inf. Without this option, only warn."
    ),
)
@click.option(
    "--dcp-prefix",
    default=None,
    help=(
        "For a torch.distributed.checkpoint save: the beginning of the names of the model's "
        "tensors, such as 'model.'.  [default: detect]"
    ),
)
@click.option(
    "--hang-time",
    type=options.SecondsRange(min=0, min_open=True),
    default=_DEFAULTS.hang_time,
    show_default=True,
    help="Exit if storage does not answer for this long, so that another daemon can take over.",
)
@click.option(
    "--shared-group",
    default=None,
    metavar="GROUP",
    help="Give new files to this group. Trainers, explorers and the daemon must all belong to it.",
)
@options.digest
@options.dtype
@click.option(
    "--names",
    type=click.Choice(["hub", "trainer"]),
    default=None,
    help=(
        "The names of tensors in versions: as on the Hugging Face hub, or as in the trainer's "
        "module.  [default: as in the newest version. In a new job: as on the hub, if all "
        "explorers accept hub names]"
    ),
)
@options.max_shard_size
@options.policy
@click.option(
    "--metrics-port",
    type=options.CountRange(min=0, max=65535),
    default=_DEFAULTS.metrics_port,
    show_default=True,
    help="Serve Prometheus metrics on this port of 127.0.0.1; 0 for none.",
)
@click.option(
    "--metrics-textfile",
    type=click.Path(path_type=Path, dir_okay=False),
    default=None,
    help="Write metrics to this file for the node exporter; its name must end with .prom.",
)
@options.log_format
@options.log_level
@click.option("--json", "as_json", is_flag=True, help="The same as --log-format json.")
@click.pass_context
def command(ctx: click.Context, /, config: Path | None, *, as_json: bool, **_options: Any) -> None:
    """Serve JOB, or all jobs in the folder --root, until SIGTERM: merge, publish, signal, prune.

    A second daemon on the same job stands by, and takes over when the first daemon dies.

    If a setting is not given as an option, it comes from the environment (SYNCD_KEEP for --keep).
    If the environment lacks the setting too, it comes from the configuration file. On SIGHUP the
    daemon reads the configuration file again. See 'syncd config --help'.
    """
    said = options.given(ctx)
    if as_json:
        said["log_format"] = GivenValue("json", "--json", is_local=True)
    configuration = ConfigReloader(
        lambda: _load(config, said),
        applied=lambda now: log_lines.set_up(now.log_format, now.log_level),
    )
    for name, meant in misspelt(os.environ).items():
        extra = Event.CONFIG_UNHEARD(key=name, value=os.environ[name], in_force=None)
        log.warning("ignoring %s; did you mean %s?", name, meant, extra=extra)
    # A save of a thousand ranks needs a thousand open files.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    log.debug("the limit of open files is now %d; it was %d", hard, soft)
    with ExitStack() as stack:
        services = _services(configuration, stack)
        # Without a configuration file, SIGHUP keeps its default effect: it ends the process.
        reload = services.reload if config is not None else None
        stack.enter_context(stopped_by_signals(services.stop, reload=reload))
        ended = services.run()
    if not ended:
        # A thread that waits for storage would keep the interpreter from ending, forever.
        logging.shutdown()
        os._exit(0)


def _load(file: Path | None, said: dict[str, GivenValue]) -> Configuration:
    """Load the configuration, and check that this host supports the settings."""
    configuration = load(file, os.environ, said)
    if configuration.config.cast is not None:
        require_torch(f"cast, set by {printable(configuration.sources['cast'])},")
    if configuration.config.deltas == "on" and (why := why_not_here()) is not None:
        source = printable(configuration.sources["deltas"])
        raise InvalidSettingsError(f'deltas = "on", set by {source}, cannot be used: {why}')
    return configuration


def _services(configuration: ConfigReloader, stack: ExitStack) -> Services | RootServices:
    """Make the daemons; their hang guard and metrics run until the stack is closed."""
    config, root = configuration.current.config, configuration.current.root
    manager = ServiceManager.of_environment()
    guard = HangGuard(config.hang_time, manager, together=root is None)
    stack.enter_context(guard)
    read_again = configuration.again
    each_tick: Callable[[], None] = _nothing
    meter_of: MeterOf = unmetered
    forget: Callable[[Path], None] = _nothing
    if config.metrics_port or config.metrics_textfile is not None:
        # Imported here, so that a daemon without metrics needs less memory.
        from syncd.daemon.telling.metrics import Metrics  # noqa: PLC0415
        from syncd.daemon.telling.metrics_export import Exporter  # noqa: PLC0415

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
    log.info(
        "serving all jobs in %s, also those that are made there later",
        root,
        extra=Event.ROOT_SERVED(root=root),
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
    """Do nothing."""


def _noting(
    configuration: ConfigReloader, note: Callable[[], None]
) -> Callable[[], RunConfig | None]:
    def again() -> RunConfig | None:
        config = configuration.again()
        note()
        return config

    return again
