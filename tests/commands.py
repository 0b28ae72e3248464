"""Commands in this process."""

from click import testing

from syncd.cli import cli

Result = testing.Result


def invoke(*arguments: object) -> Result:
    """``syncd`` with these arguments."""
    return testing.CliRunner().invoke(cli, [*map(str, arguments)])
