"""``syncd mirror push`` and ``pull``: a job's versions in an object store, for jobs elsewhere."""

from __future__ import annotations

import json
from importlib.metadata import entry_points
from typing import Annotated, Final

import click
from annotated_types import Ge

from syncd.daemon.config import Bytes

#: The entry points of the hooks' commands, which syncd must not import.
_COMMANDS: Final = "syncd.mirror"

#: An option of both.
RateLimit = Annotated[
    Bytes | None, Ge(1), "The most bytes that are moved in a second.  [default: no limit]"
]
#: Likewise.
Lines = Annotated[bool, "--json", "Print one line with a JSON object to stdout for each version."]


def tell(sequence: int, step: int) -> None:
    """Print the line of a version: its number in the job that is mirrored, and its step."""
    click.echo(json.dumps({"version": sequence, "step": step}))


class _Mirror(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 # click's signature
        return ["push", "pull"]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 # click's signature
        for point in entry_points(group=_COMMANDS, name=cmd_name):
            found: click.Command = point.load()
            return found
        return None


@click.group(
    "mirror",
    cls=_Mirror,
    epilog="Example: syncd mirror push /shared/jobs/qwen-grpo s3://bucket/qwen",
)
def command() -> None:
    """Copy the versions of a job to an object store, or from there into another job."""
