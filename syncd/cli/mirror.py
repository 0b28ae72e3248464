"""``syncd mirror push`` and ``pull``: a job's versions in an object store, for jobs elsewhere."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Annotated, Final

import click

from syncd.daemon.config import Bytes

#: The entry points of the hooks' commands, which syncd must not import.
_COMMANDS: Final = "syncd.mirror"

#: An option of both.
RateLimit = Annotated[
    Bytes | None, "The most bytes that are moved in a second.  [default: no limit]"
]


class _Mirror(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 # click's signature
        return ["push", "pull"]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 # click's signature
        for point in entry_points(group=_COMMANDS, name=cmd_name):
            found: click.Command = point.load()
            return found
        return None


@click.group(cls=_Mirror)
def command() -> None:
    """Copy the versions of a job to an object store, or from there into another job."""
