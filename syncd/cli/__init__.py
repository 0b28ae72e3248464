"""The ``syncd`` command: one module a subcommand, imported when it is used."""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

import click

from syncd import __version__
from syncd.cli import log_lines
from syncd.protocol.errors import InvalidSettingsError, SyncdError

_COMMANDS: Final = {
    "run": "Serve a job: merge, publish, signal, prune.",
    "status": "Show what is published, who serves what, and what is being waited for.",
    "history": "Show what became of each version: saved, merged, live, pruned.",
    "web": "Show all that on a page in a browser.",
    "convert": "Merge all full checkpoints into their huggingface/ folders.",
    "merge": "Merge one checkpoint into a Hugging Face folder, without a daemon.",
    "verify": "Read versions again and compare them with their manifests.",
    "prune": "Delete what a daemon would delete, where none is running.",
    "pin": "Keep a version or a step folder from being pruned.",
    "unpin": "Let a pinned version or step folder go by the usual rules.",
    "rollback": "Let an old version be served again, under a new sequence.",
    "pause": "Stop publishing and pruning, until resume.",
    "resume": "Go on with publishing and pruning.",
    "doctor": "Measure what a job's storage really does, and say what is wrong with it.",
    "unit": "Services of systemd: print or install the units for a job.",
    "config": "Check a configuration file, or show what a daemon would be told by it.",
    "demo": "Train, merge, publish, reload and prune on this machine, to see it work.",
}
#: Entry points of commands that other packages add: the hooks, which syncd never imports itself.
_ADDED: Final = "syncd.commands"


class _Lazy(click.Group):
    """A group that imports a command's module only to run it: the daemon stays small."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 # click's signature
        return [*_COMMANDS, *_added()]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 # click's signature
        if cmd_name in _COMMANDS:
            command = importlib.import_module(f"syncd.cli.{cmd_name}").command
        elif cmd_name in (added := _added()):
            command = _loaded(added[cmd_name])
        else:
            return None
        assert isinstance(command, click.Command)  # noqa: S101 # a slip of ours, not of the user's
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 # click's signature
        with formatter.section("Commands"):
            formatter.write_dl([*_COMMANDS.items(), *map(_described, _added().values())])


def _added() -> dict[str, EntryPoint]:
    """The commands of other packages by name; none of them replaces one of ours."""
    found = entry_points(group=_ADDED)
    return {point.name: point for point in found if point.name not in _COMMANDS}


def _loaded(point: EntryPoint) -> Any:
    """A command of another package.

    Raises:
        InvalidSettingsError: the package is broken.
    """
    try:
        return point.load()
    except (ImportError, AttributeError) as error:
        raise InvalidSettingsError(
            f"the command {point.name} of {point.value} cannot be loaded: {error}; install its "
            "package again"
        ) from error


def _described(point: EntryPoint) -> tuple[str, str]:
    """A line of help; one package that is broken keeps nobody from the others."""
    try:
        return point.name, _loaded(point).get_short_help_str(limit=100)
    except InvalidSettingsError as error:
        return point.name, str(error)


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="syncd")
def cli() -> None:
    """Move RL weights from trainers to explorers over shared storage."""


def main() -> None:
    """Run the command line. An error of ours ends it with one line and that error's exit code."""
    log_lines.set_up()
    log_lines.name_faults()
    try:
        cli.main(standalone_mode=True)
    except SyncdError as error:
        log_lines.last_words(error, error.exit_code)
        sys.exit(error.exit_code)
    except OSError as error:
        log_lines.last_words(error, 1)
        sys.exit(1)


if __name__ == "__main__":
    main()
