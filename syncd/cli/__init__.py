"""The ``syncd`` command; each subcommand has its own module."""

from __future__ import annotations

import atexit
import gc
import importlib
import resource
import signal
import sys
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final

import click

from syncd import __version__
from syncd.cli import log_lines, sinks
from syncd.protocol.errors import InvalidSettingsError, SyncdError
from syncd.protocol.gone import GONE
from syncd.storage.errnos import unwritable_storage

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_GROUPS: Final = {
    "Serve": {
        "run": "Serve a job: merge, publish, signal, prune.",
        "follow": "Load the versions of JOB into a running server (--engine, --command or --link).",
        "mirror": "Copy the versions of a job to an object store, or from there into another job.",
    },
    "Look": {
        "status": "Show the published versions, the explorers that serve them, and current waits.",
        "history": "Show when each version was saved, merged, live and pruned.",
        "web": "Show status and history in a browser.",
        "verify": "Read versions again and compare them with their manifests.",
    },
    "Steer": {
        "pin": "Keep a version or a step folder from being pruned.",
        "unpin": "Remove a pin: the usual pruning rules apply again.",
        "rollback": "Publish an old version again, under a new sequence.",
        "pause": "Stop publishing and pruning until 'syncd resume'.",
        "resume": "Resume publishing and pruning.",
    },
    "Offline": {
        "convert": "Merge a full checkpoint into its huggingface/ folder.",
        "merge": "Merge one checkpoint into a Hugging Face folder, without a daemon.",
        "prune": "Prune by the daemon's rules while no daemon runs.",
    },
    "Set up": {
        "doctor": "Test a job's storage, and report problems with it.",
        "config": "Check a configuration file, or show the settings that a daemon would use.",
        "unit": "Print systemd units for a job.",
        "demo": "Watch syncd work: train, merge, publish, reload and prune on this machine.",
    },
}
_COMMANDS: Final = {name: said for group in _GROUPS.values() for name, said in group.items()}
#: The entry points by which other packages, such as the hooks, add commands to syncd.
_ADDED: Final = "syncd.commands"
#: The hooks' commands: the help lists them without importing them, which would take half a second.
_OF_HOOKS: Final = frozenset({"follow"})
#: The commands that serve until they are stopped: what they say must not block them.
_SERVING: Final = frozenset({"run", "follow", "mirror", "web"})
#: The exit status of a command that Ctrl-C ended, as shells report it.
_INTERRUPTED: Final = 128 + signal.SIGINT


class _Lazy(click.Group):
    """A group that imports only the module of the requested command, so the daemon stays small."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            # The message about an unknown option or command ends with its name.
            name = error.message.rpartition(" ")[2].strip("'.")
            key = name.strip("-").replace("-", "_")
            if remedy := GONE.get(f"{ctx.invoked_subcommand} {name}", GONE.get(key)):
                raise InvalidSettingsError(f"{name} was removed: {remedy}") from error
            if error.ctx is ctx and (near := get_close_matches(name, self.list_commands(ctx))):
                raise click.UsageError(f"{error.message} Did you mean {near[0]!r}?", ctx) from error
            raise
        except KeyboardInterrupt:
            click.echo(err=True)  # below the ^C of the terminal
            ctx.exit(_INTERRUPTED)

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 # click's signature
        return [*_COMMANDS, *(_added().keys() - _OF_HOOKS)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 # click's signature
        command: click.Command | None = None
        if cmd_name in _COMMANDS.keys() - _OF_HOOKS:
            steers = cmd_name in _GROUPS["Steer"]
            module = importlib.import_module(f"syncd.cli.{'steer' if steers else cmd_name}")
            command = getattr(module, cmd_name if steers else "command")
        elif cmd_name in (added := _added()):
            command = _loaded(added[cmd_name])
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 # click's signature
        groups = {group: list(commands.items()) for group, commands in _GROUPS.items()}
        added = [_described(point) for name, point in _added().items() if name not in _OF_HOOKS]
        if added:
            groups["From other packages"] = added
        # Align the names of all groups, although each group is a separate list.
        widest = max(len(name) for commands in groups.values() for name, _ in commands)
        for group, commands in groups.items():
            with formatter.section(group):
                formatter.write_dl([(name.ljust(widest), said) for name, said in commands])


def _added() -> dict[str, EntryPoint]:
    """The commands that other packages add, by name."""
    from importlib.metadata import entry_points  # noqa: PLC0415 - it takes as long as all the rest

    ours = _COMMANDS.keys() - _OF_HOOKS
    return {point.name: point for point in entry_points(group=_ADDED) if point.name not in ours}


def _loaded(point: EntryPoint) -> Any:
    try:
        return point.load()
    except (ImportError, AttributeError) as error:
        raise InvalidSettingsError(
            f"the command {point.name} of {point.value} cannot be loaded: {error}. Install the "
            "package of this command again"
        ) from error


def _described(point: EntryPoint) -> tuple[str, str]:
    try:
        return point.name, _loaded(point).get_short_help_str(limit=100)
    except InvalidSettingsError as error:
        return point.name, str(error)


@click.group(
    cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"], "show_default": True}
)
@click.version_option(__version__, prog_name="syncd")
def cli() -> None:
    """Move RL weights from trainers to explorers over shared storage.

    Options with a value of SECONDS or BYTES accept plain numbers, or numbers with a unit: 500ms,
    30s, 5min, 2h; 500MB, 64GB, 1GiB.
    """


def main() -> None:
    """Run the command line; report an error without a traceback, and exit with its code."""
    if _SERVING.intersection(sys.argv[1:2]):
        sinks.start()
    log_lines.set_up()
    log_lines.name_faults()
    atexit.register(gc.freeze)  # once torch was imported, a last collection takes long
    # A save of a thousand ranks needs a thousand open files.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        cli.main(standalone_mode=True)
    except SyncdError as error:
        log_lines.last_words(error, error.exit_code)
        sys.exit(error.exit_code)
    except OSError as error:
        fault = unwritable_storage(error, "the files of this command") or error
        code = fault.exit_code if isinstance(fault, SyncdError) else 1
        log_lines.last_words(fault, code)
        sys.exit(code)


if __name__ == "__main__":
    main()
