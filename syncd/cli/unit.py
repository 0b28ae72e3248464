"""``syncd unit``: systemd units for this host."""

from __future__ import annotations

import json
from pathlib import Path
from shlex import quote
from typing import Any, Final

import click

from syncd.cli import options
from syncd.daemon.config import RunConfig
from syncd.daemon.configuration import load
from syncd.protocol.errors import InvalidSettingsError, JobUnavailableError
from syncd.protocol.names import checked_name
from syncd.storage.errnos import is_gone
from syncd.storage.job import no_folder
from syncd.units.files import FOLLOWER, Instance, owner_of, unit_files

_SYSTEMD: Final = Path("/etc/systemd/system")
_AS_FOLLOW: Final = "With --follow: the option {} of 'syncd follow'."


@click.group("unit", epilog="Example: syncd unit print qwen-grpo")
def command() -> None:
    """Print systemd units: a daemon for a job, or an explorer beside a server.

    NAME is the unit's instance name: syncd@NAME serves the job that /etc/syncd/NAME.toml names.
    With --follow, syncd-follow@NAME runs an explorer that is called NAME.
    """


_path = click.Path(path_type=Path)


@command.command("print", epilog="Example: syncd unit print qwen-grpo --user trainer | sh")
@click.argument("name")
@click.option(
    "--config",
    type=_path,
    default=None,
    help="The daemon's configuration.  [default: /etc/syncd/NAME.toml]",
)
@click.option("--user", default=None, help="The unit's user.  [default: the job's owner]")
@click.option("--group", default=None, help="The unit's group.  [default: the job's group]")
@click.option(
    "--follow",
    type=_path,
    default=None,
    metavar="JOB",
    help="Make a unit for an explorer of this job (syncd follow), not for a daemon.",
)
@click.option("--stage", type=_path, default=None, help=_AS_FOLLOW.format("--stage"))
@click.option(
    "--budget",
    type=options.BytesRange(min=1),
    help="With --follow: the limit in bytes for all copies in --stage together.",
)
@click.option("--link", type=_path, default=None, help=_AS_FOLLOW.format("--link"))
@click.option("--command", "run", default=None, help=_AS_FOLLOW.format("--command"))
@click.option("--memory-dir", type=_path, default=None, help=_AS_FOLLOW.format("--memory-dir"))
@click.option(
    "--option",
    "more",
    multiple=True,
    metavar="OPTION",
    help="With --follow: another option of 'syncd follow'. Example: --option=--ask",
)
@options.as_json
def print_(name: str, *, as_json: bool, **given: Any) -> None:
    """Print a shell script that writes the unit's files."""
    files = {_SYSTEMD / where: text for where, text in unit_files(_instance(name, **given)).items()}
    if as_json:
        told = {str(path): text for path, text in files.items()}
        click.echo(json.dumps({"files": told}, indent=2))
        return
    for path, text in files.items():
        click.echo(f"install -Dm644 /dev/stdin {quote(str(path))} <<'END'\n{text}END")


def _instance(
    name: str, *, user: str | None, group: str | None, follow: Path | None, **given: Any
) -> Instance:
    name = checked_name(name, "the unit's name")
    if follow is not None:
        return _follower(name, user, group, follow.absolute(), **given)
    if any(value for option, value in given.items() if option != "config"):
        raise click.UsageError("options other than --config, --user and --group need --follow")
    elsewhere: Path | None = given["config"]
    config = elsewhere.absolute() if elsewhere else options.CONFIGURATIONS / f"{name}.toml"
    # Without this shell's environment, because the unit has its own.
    told = load(config, {}).config
    named = told.root or told.job
    if named is None:
        raise InvalidSettingsError(f'{config} names no job: add a line such as job = "/shared/job"')
    # Resolved paths, because systemd needs the real mounts and not links to them.
    job = named.resolve()
    beside = [path.resolve() for path in (told.memory_dir, told.metrics_textfile) if path]
    writes = [job, *map(_folder_of, beside)]
    user, group = _owner(job, user, group)
    return Instance(
        name,
        user,
        group,
        writes=tuple(writes),
        reads=(config,),
        groups=() if told.shared_group is None else (told.shared_group,),
        command=("run", "--config", str(config)) if elsewhere else (),
        check=("config", "check", str(config)) if elsewhere else (),
        hang_time=told.hang_time if told.hang_time > RunConfig().hang_time else None,
    )


def _follower(
    name: str,
    user: str | None,
    group: str | None,
    job: Path,
    *,
    stage: Path | None,
    budget: int | None,
    link: Path | None,
    run: str | None,
    memory_dir: Path | None,
    more: tuple[str, ...],
    config: Path | None,
) -> Instance:
    if config is not None:
        raise click.UsageError("--config is for a daemon. With --follow, leave --config out")
    if (link is None) == (run is None):
        raise click.UsageError("with --follow give either --link PATH or --command CMD")
    words = ["follow", str(job), "--name", name]
    writes = [job.resolve()]
    if stage is not None:
        words += ["--stage", str(stage.absolute())]
        writes.append(_folder_of(stage.resolve()))
    if budget is not None:
        words += ["--budget", str(budget)]
    if link is not None:
        words += ["--link", str(link.absolute())]
        writes.append(_folder_of(link.absolute()).resolve())
    if run is not None:
        words += ["--command", run]
    if memory_dir is not None:
        words += ["--memory-dir", str(memory_dir.absolute())]
        writes.append(_folder_of(memory_dir.resolve()))
    words += more
    user, group = _owner(job, user, group)
    return Instance(
        name,
        user,
        group,
        writes=tuple(writes),
        command=tuple(words),
        template=FOLLOWER,
    )


def _folder_of(path: Path) -> Path:
    """The folder that the unit must write to: ``path`` if it is a mount, otherwise its parent."""
    if path.is_mount():
        return path
    if path.parent == Path(path.anchor):
        raise InvalidSettingsError(
            f"{path} is in the root folder (/), but the unit must not write there: give a "
            "path in another folder"
        )
    return path.parent


def _owner(job: Path, user: str | None, group: str | None) -> tuple[str, str]:
    try:
        owner = owner_of(job)
    except OSError as error:
        if is_gone(error):
            raise no_folder(job) from error
        raise JobUnavailableError(f"cannot access {job}: {error.strerror}") from error
    return user or owner[0], group or owner[1]
