"""``syncd unit``: systemd units for this host."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Annotated, Final, Literal

import click
from annotated_types import Ge

from syncd.cli import options
from syncd.daemon.config import Bytes, RunConfig
from syncd.daemon.configuration import load
from syncd.protocol.errors import InvalidSettingsError, JobUnavailableError
from syncd.protocol.names import checked_name
from syncd.storage.errnos import is_gone
from syncd.storage.job import no_folder
from syncd.units.files import FOLLOWER, Instance, owner_of, unit_files

_SYSTEMD: Final = Path("/etc/systemd/system")
_OF_FOLLOW: Final = "With --follow: this option of 'syncd follow'."
_OF_MIRROR: Final = "With --follow: make a unit for 'syncd mirror {}' with this URL."


@click.group("unit", epilog="Example: syncd unit print qwen-grpo")
def command() -> None:
    """Print systemd units: a daemon for a job, or an explorer beside a server.

    NAME is the unit's instance name: syncd@NAME serves the job that /etc/syncd/NAME.toml names.
    With --follow, syncd-follow@NAME runs an explorer that is called NAME, or a mirror.
    """


@options.as_command("unit print qwen-grpo --user trainer | sh", group=command)
def print_(
    name: str,
    *,
    config: Annotated[
        options.AnyPath | None, "The daemon's configuration.  [default: /etc/syncd/NAME.toml]"
    ] = None,
    user: Annotated[str | None, "The unit's user.  [default: the job's owner]"] = None,
    group: Annotated[str | None, "The unit's group.  [default: the job's group]"] = None,
    follow: Annotated[
        options.AnyPath | None,
        "--follow JOB",
        "Make a unit for an explorer of this job (syncd follow), not for a daemon.",
    ] = None,
    stage: Annotated[options.AnyPath | None, _OF_FOLLOW] = None,
    budget: Annotated[Bytes | None, Ge(1), _OF_FOLLOW] = None,
    link: Annotated[options.AnyPath | None, _OF_FOLLOW] = None,
    run: Annotated[str | None, "--command", _OF_FOLLOW] = None,
    engine: Annotated[Literal["vllm", "sglang"] | None, _OF_FOLLOW] = None,
    urls: Annotated[tuple[str, ...], "--url", _OF_FOLLOW] = (),
    memory_dir: Annotated[options.AnyPath | None, _OF_FOLLOW] = None,
    push: Annotated[str | None, "--push URL", _OF_MIRROR.format("push")] = None,
    pull: Annotated[str | None, "--pull URL", _OF_MIRROR.format("pull")] = None,
    more: Annotated[
        tuple[str, ...],
        "--option OPTION",
        "With --follow: another option of the command. Example: --option=--ask",
    ] = (),
) -> options.Answer:
    """Print a shell script that writes the unit's files."""
    name = checked_name(name, "the unit's name")
    if follow is None:
        if any((stage, budget, link, run, engine, urls, memory_dir, push, pull, more)):
            raise click.UsageError("options other than --config, --user and --group need --follow")
        instance = _daemon(name, user, group, config)
    elif config is not None:
        raise click.UsageError("--config is for a daemon. With --follow, leave --config out")
    elif [link, run, engine, push, pull].count(None) != 4:
        raise click.UsageError(
            "with --follow give one of --engine, --link, --command, --push and --pull"
        )
    elif (engine is None) != (not urls):
        raise click.UsageError("--engine and --url belong together: give both")
    else:
        given = {
            "--stage": stage,
            "--budget": budget,
            "--link": link,
            "--command": run,
            "--engine": engine,
            "--memory-dir": memory_dir,
        }
        more = (*(word for url in urls for word in ("--url", url)), *more)
        job = follow.absolute()
        words: tuple[str, ...] = ("follow", str(job), "--name", name)
        if push is not None:
            words = ("mirror", "push", str(job), push, "--name", name)
        elif pull is not None:
            words = ("mirror", "pull", pull, str(job))
        instance = _follower(name, user, group, job, words, given, more)
    files = {str(_SYSTEMD / where): text for where, text in unit_files(instance).items()}
    script = "\n".join(
        f"install -Dm644 /dev/stdin {quote(path)} <<'END'\n{text}END"
        for path, text in files.items()
    )
    return {"files": files}, script


def _daemon(name: str, user: str | None, group: str | None, elsewhere: Path | None) -> Instance:
    file = elsewhere.absolute() if elsewhere else options.CONFIGURATIONS / f"{name}.toml"
    # Without this shell's environment, because the unit has its own.
    config = load(file, {}).config
    named = config.root or config.job
    if named is None:
        raise InvalidSettingsError(f'{file} names no job: add a line such as job = "/shared/job"')
    # Resolved paths, because systemd needs the real mounts and not links to them.
    job = named.resolve()
    beside = [path.resolve() for path in (config.memory_dir, config.metrics_textfile) if path]
    writes = [job, *map(_folder_of, beside)]
    user, group = _owner(job, user, group)
    return Instance(
        name,
        user,
        group,
        writes=tuple(writes),
        reads=(file,),
        groups=() if config.shared_group is None else (config.shared_group,),
        command=("run", "--config", str(file)) if elsewhere else (),
        check=("config", "check", str(file)) if elsewhere else (),
        hang_time=config.hang_time if config.hang_time > RunConfig().hang_time else None,
    )


def _follower(
    name: str,
    user: str | None,
    group: str | None,
    job: Path,
    called: tuple[str, ...],
    given: Mapping[str, object],
    more: tuple[str, ...],
) -> Instance:
    words = [*called]
    writes = [job.resolve()]
    for option, value in given.items():
        if isinstance(value, Path):
            words += [option, str(value.absolute())]
            # The link itself is replaced, not its target.
            path = value.absolute() if option == "--link" else value.resolve()
            writes.append(_folder_of(path).resolve())
        elif value is not None:
            words += [option, str(value)]
    user, group = _owner(job, user, group)
    return Instance(
        name,
        user,
        group,
        writes=tuple(writes),
        command=(*words, *more),
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
