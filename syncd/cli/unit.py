"""``syncd unit``: services of systemd for this host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

from syncd.cli import options
from syncd.daemon.config import RunConfig
from syncd.daemon.configuration import load
from syncd.protocol.errors import InvalidSettingsError, JobUnavailableError
from syncd.protocol.names import checked_name
from syncd.storage.fsio import Storage
from syncd.units.files import FOLLOWER, Instance, is_untouched, owner_of, unit_files

_SYSTEMD: Final = Path("/etc/systemd/system")


@click.group("unit", epilog="Example: syncd unit install qwen-grpo")
def command() -> None:
    """Services of systemd: a daemon for a job, or an explorer beside a server.

    NAME is of the unit: syncd@NAME serves the job that /etc/syncd/NAME.toml names; with --follow,
    syncd-follow@NAME is an explorer of that name.
    """


def _options(command: Callable[..., Any]) -> Callable[..., Any]:
    path = click.Path(path_type=Path)
    for option in reversed((
        click.argument("name"),
        click.option(
            "--config",
            type=path,
            default=None,
            help="The daemon's configuration.  [default: /etc/syncd/NAME.toml]",
        ),
        click.option("--user", default=None, help="Who it runs as.  [default: the job's owner]"),
        click.option("--group", default=None, help="Its group.  [default: the job's]"),
        click.option(
            "--follow",
            type=path,
            default=None,
            metavar="JOB",
            help="Not a daemon, but an explorer of this job (syncd follow).",
        ),
        click.option("--stage", type=path, default=None, help="With --follow: where it copies to."),
        click.option("--budget", default=None, help="With --follow: the most bytes there."),
        click.option("--link", type=path, default=None, help="With --follow: the link it moves."),
        click.option("--command", "run", default=None, help="With --follow: what it runs."),
        click.option(
            "--memory-dir", type=path, default=None, help="With --follow: the job's second folder."
        ),
        click.option(
            "--option",
            "more",
            multiple=True,
            metavar="OPTION",
            help="With --follow: another of 'syncd follow', such as --option=--ask.",
        ),
    )):  # fmt: skip
        command = option(command)
    return command


@command.command("print", epilog="Example: syncd unit print qwen-grpo --user trainer")
@_options
def print_(name: str, **given: Any) -> None:
    """Print the unit's files, and where they would be written."""
    for where, text in unit_files(_instance(name, **given)).items():
        click.echo(f"# {_SYSTEMD / where}\n{text}")


@command.command("install", epilog="Example: syncd unit install qwen-grpo --user trainer")
@_options
@click.option(
    "--to",
    type=click.Path(path_type=Path, file_okay=False),
    default=_SYSTEMD,
    show_default=True,
    help="Where units are.",
)
@click.option("--force", is_flag=True, help="Replace files that someone has changed.")
def install(name: str, to: Path, *, force: bool, **given: Any) -> None:
    """Write the unit's files, and say what to run next.

    A file that someone has changed since is not replaced; write what is your own into another
    drop-in beside it ('systemctl edit').
    """
    instance = _instance(name, **given)
    storage = Storage()
    files = {to / where: text for where, text in unit_files(instance).items()}
    for path, text in files.items():
        if storage.exists(path) and not force:
            found = storage.read(path).decode(errors="replace")
            if found != text and not is_untouched(found):
                raise InvalidSettingsError(
                    f"{path} was changed since it was written: move the changes to another drop-in "
                    f"('systemctl edit {instance.unit}') and remove it, or say --force"
                )
    for path, text in files.items():
        storage.make_folder(path.parent, below=Path(path.anchor))
        storage.replace(path, text.encode())
        click.echo(f"wrote {path}")
    click.echo("next:")
    if instance.template != FOLLOWER:
        click.echo(f"  syncd config check {_config_of(name, given['config'])}")
    click.echo("  systemctl daemon-reload")
    click.echo(f"  systemctl enable --now {instance.unit}")
    click.echo(f"  systemctl status {instance.unit}")


def _instance(
    name: str, *, user: str | None, group: str | None, follow: Path | None, **given: Any
) -> Instance:
    name = checked_name(name, "the unit's name")
    if follow is not None:
        return _follower(name, user, group, follow.absolute(), **given)
    if any(value for option, value in given.items() if option != "config"):
        raise click.UsageError("only --config, --user and --group go without --follow")
    config = _config_of(name, given["config"])
    # Not by this shell's environment: the unit has one of its own.
    told = load(config, {}).config
    named = told.root or told.job
    if named is None:
        raise InvalidSettingsError(f'{config} names no job: add a line such as job = "/shared/job"')
    # Where they are, and not what they are called: links on the way are not mounts.
    job = named.resolve()
    beside = [path.resolve() for path in (told.memory_dir, told.metrics_textfile) if path]
    writes = [job, *map(_folder_of, beside)]
    user, group = _owner(job, user, group)
    elsewhere = given["config"] is not None
    return Instance(
        name,
        user,
        group,
        needs=tuple(writes),
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
    budget: str | None,
    link: Path | None,
    run: str | None,
    memory_dir: Path | None,
    more: tuple[str, ...],
    config: Path | None,
) -> Instance:
    if config is not None:
        raise click.UsageError("--config is a daemon's; an explorer has none")
    if (link is None) == (run is None):
        raise click.UsageError("with --follow say --link PATH or --command CMD")
    words = ["follow", str(job), "--name", name]
    writes = [job.resolve()]
    if stage is not None:
        words += ["--stage", str(stage.absolute())]
        writes.append(_folder_of(stage.resolve()))
    if budget is not None:
        words += ["--budget", budget]
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
        needs=tuple(writes),
        writes=tuple(writes),
        command=tuple(words),
        template=FOLLOWER,
    )


def _folder_of(path: Path) -> Path:
    """Where a name is made and replaced: a memory filesystem is empty after each start."""
    if path.is_mount():
        return path
    if path.parent == Path(path.anchor):
        raise InvalidSettingsError(
            f"{path} is at the top: the unit would need to write everywhere; name one in a folder"
        )
    return path.parent


def _owner(job: Path, user: str | None, group: str | None) -> tuple[str, str]:
    try:
        owner = owner_of(job)
    except OSError as error:
        raise JobUnavailableError(
            f"the job directory {job} is not there ({error.strerror}): create it, or mount its "
            "storage"
        ) from error
    return user or owner[0], group or owner[1]


def _config_of(name: str, given: Path | None) -> Path:
    return options.CONFIGURATIONS / f"{name}.toml" if given is None else given.absolute()
