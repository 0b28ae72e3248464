"""``syncd follow``: an explorer beside a server, in a separate process that never imports torch.

``syncd`` finds the command by an entry point, because it must not import this package.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import click
from annotated_types import Ge, Gt

from explorer_hooks.bench import serve
from explorer_hooks.engines.base import Engine, InProcessEngine
from explorer_hooks.engines.http_server import ServerAccess, ServerTimeouts, place
from explorer_hooks.engines.server_engine import ServerEngine
from explorer_hooks.engines.sglang_server import SGLangServer
from explorer_hooks.engines.vllm_server import VLLMServer
from explorer_hooks.followers import Followers, ready_file
from explorer_hooks.hook import ExplorerHook
from explorer_hooks.reader import LeasedVersion
from explorer_hooks.server_fit import Fits
from explorer_hooks.staging import Staging
from syncd.cli import options
from syncd.cli.signals import handled_by
from syncd.daemon.config import Bytes, Count, Seconds
from syncd.protocol.errors import CommandFailedError, InvalidSettingsError
from syncd.protocol.names import TEMPORARY
from syncd.protocol.policy import SyncMethod, SyncSettings, SyncStyle, Version
from syncd.storage.fsio import Storage

_SERVERS: Mapping[str, type[ServerEngine]] = {"vllm": VLLMServer, "sglang": SGLangServer}


@options.as_command(
    "follow /shared/jobs/qwen-grpo --name server-0 --stage /dev/shm --link /srv/model"
)
def command(
    job: Path,
    *,
    name: Annotated[str, "The explorer's name, unique in the job."],
    run: Annotated[
        str | None,
        "--command",
        "The shell command to run for each version; exit status 0 accepts it.",
    ] = None,
    link: Annotated[
        options.AnyPath | None,
        "A symbolic link that syncd points to the folder of each new version.",
    ] = None,
    server: Annotated[
        Literal["vllm", "sglang"] | None,
        "--engine",
        "The kind of server at --url, which loads each version.",
    ] = None,
    urls: Annotated[
        tuple[str, ...],
        "--url",
        "The server's address, e.g. http://127.0.0.1:8000. Repeat it for several servers of this "
        "host, the explorers NAME-0, NAME-1 and so on.",
    ] = (),
    start_timeout: Annotated[
        Seconds, Ge(0), "How long to wait at the start for the --engine to answer."
    ] = 600.0,
    cacert: Annotated[
        options.File | None,
        "The certificate (PEM) of the authority that signed the server's.",
    ] = None,
    in_flight: Annotated[
        str | None,
        "--in-flight MODE",
        "How to treat running requests during a load: keep, wait or abort (vllm), retract or abort "
        "(sglang).  [default: keep for vllm, retract for sglang]",
    ] = None,
    lora_name: Annotated[str, "The model name under which the server serves adapters."] = "syncd",
    spans_hosts: Annotated[
        bool, "The server also reads weights on other hosts: ignore --stage."
    ] = False,
    stage: Annotated[
        Path | None, "Copy each version into this folder of this host before the load."
    ] = None,
    budget: Annotated[
        Bytes | None,
        Ge(1),
        "The limit for all copies in --stage together.  [default: the free space]",
    ] = None,
    base: Annotated[
        Path | None, "The server's model folder; versions that do not fit this model are refused."
    ] = None,
    timeout: Annotated[
        Seconds, Gt(0), "The time limit for the command, or for a load by the server."
    ] = 600.0,
    ask: Annotated[bool, "Request syncs from a trainer with style explorer_driven."] = False,
    broadcast: Annotated[
        bool,
        "Receive broadcasts from a trainer with method nccl, if the server is started for them.",
    ] = False,
    broadcast_timeout: Annotated[
        Seconds | None,
        Gt(0),
        "How long to wait for a broadcast to begin, and then for its end, as in the trainer's "
        f"settings.  [default: {SyncSettings().broadcast_timeout:g}]",
    ] = None,
    memory_dir: Annotated[
        Path | None, "The memory directory of a job with method memory, which has the versions."
    ] = None,
    ready: Annotated[
        options.File | None,
        "--ready-file FILE",
        "For a [readiness probe](kubernetes.md#readiness): touch FILE every 2 s while the server "
        "answers, was not restarted since its last load, and has all but --max-behind versions; "
        "otherwise, and at the end, remove it. With several --url: FILE-0, FILE-1 and so on.",
    ] = None,
    max_behind: Annotated[
        Count | None,
        Ge(0),
        "--max-behind N",
        "By how many versions a ready server may be behind.  [default: any number]",
    ] = None,
    as_json: Annotated[
        bool, "--json", "Print one line with a JSON object to stdout for each version."
    ] = False,
) -> None:
    """Load the versions of JOB into a running server (--engine, --command or --link).

    syncd verifies each version and copies it to this host (--stage). Then syncd does one of these:

    --engine, at --url: syncd pauses the server, and lets the server load the version and generate a
    token. Only then does the version count as served. If the server was restarted, the server must
    load the version again. syncd reads the server's key from SYNCD_API_KEY, and the key for
    SGLang's --admin-api-key from SYNCD_ADMIN_API_KEY.

    --command: syncd runs the command with SYNCD_FOLDER, SYNCD_STEP, SYNCD_SEQUENCE and SYNCD_KIND.
    If the command fails, the version is refused, and the command runs again with the previous
    version.

    --link: syncd points the link to the version's folder.

    SIGTERM or Ctrl-C ends syncd follow, after a running command has ended.
    """
    for is_wrong, why in (
        ([run, link, server].count(None) != 2, "Give exactly one of --engine, --command, --link."),
        ((server is None) != (not urls), "--engine and --url belong together: give both."),
        (len(set(map(place, urls))) < len(urls), "--url is given twice with the same address."),
        (cacert and not server, "--cacert needs --engine and an https --url."),
        (budget and not stage, "--budget limits the copies in --stage: give both."),
        (broadcast and not server, "--broadcast needs an --engine to send weights to."),
        (broadcast_timeout and not broadcast, "--broadcast-timeout needs --broadcast."),
        (ready and not server, "--ready-file needs an --engine."),
        (max_behind is not None and not ready, "--max-behind needs --ready-file."),
    ):
        if is_wrong:
            raise click.UsageError(why)
    staging = Staging(stage, budget, keep_last=link is not None) if stage is not None else None
    settings = SyncSettings(
        style=SyncStyle.EXPLORER_DRIVEN if ask else SyncStyle.FULLY_ASYNC,
        method=SyncMethod.NCCL if broadcast else SyncMethod.CHECKPOINT,
        broadcast_timeout=broadcast_timeout or SyncSettings().broadcast_timeout,
    )
    servers: dict[str, Callable[..., ServerEngine]] = {}
    engine: Engine
    if server is not None:
        for number, url in enumerate(urls):
            each = name if len(urls) == 1 else f"{name}-{number}"
            servers[each] = partial(
                _SERVERS[server],
                url,
                mode=in_flight,
                base=base,
                lora_name=lora_name,
                is_local=False if spans_hosts else None,
                access=ServerAccess(
                    os.environ.get("SYNCD_API_KEY"), os.environ.get("SYNCD_ADMIN_API_KEY"), cacert
                ),
                timeouts=ServerTimeouts(load=timeout, start=start_timeout),
            )
    else:
        fits = Fits(base, casts=True, whose=str(base))
        if run is not None:
            engine = CommandEngine(run, timeout=timeout, fits=fits)
        elif link is not None:
            engine = linked = LinkEngine(link, fits=fits)
            if staging is not None and linked.target is not None:
                staging.serves(linked.target)  # a server may start from it before the link moves

    def opened(each: str, cancel: Callable[[], None]) -> AbstractContextManager[ExplorerHook]:
        opens = partial(
            ExplorerHook,
            job,
            each,
            servers[each](cancel=cancel) if servers else engine,
            settings=settings,
            staging=copy(staging),  # each hook reports what it has read itself
            memory_dir=memory_dir,
        )
        if not ready:
            return opens()
        file = Path(f"{ready}{each.removeprefix(name)}")  # NAME-0 has FILE-0
        return ready_file(file, opens, servers[each](timeouts=ServerTimeouts(5.0)), max_behind)

    def told(name: str, version: Version) -> None:
        if as_json:
            line = {"explorer": name, "version": version.sequence, "step": version.step}
            click.echo(json.dumps(line))

    with _ends() as ends:
        if len(servers) > 1:
            for make in servers.values():
                make()  # a wrong setting ends the command before any server is touched
            followers = Followers({each: partial(opened, each) for each in servers}, told)
            ends(followers.end)
            followers.run()
            return
        with opened(name, lambda: None) as hook:
            ends(hook.cancel)
            serve(hook, partial(told, name))


@contextmanager
def _ends() -> Iterator[Callable[[Callable[[], None]], None]]:
    """In this context SIGTERM and SIGINT exit with status 0, or call the last function given."""
    cancels: list[Callable[[], None]] = []

    def end(*_: object) -> None:
        if not cancels:
            raise SystemExit
        cancels[-1]()

    with handled_by(end, (signal.SIGTERM, signal.SIGINT)):
        yield cancels.append


class _FolderEngine(InProcessEngine):
    hub_names = True  # a folder from the hub has the hub's names, too
    fits: Fits

    def check(self, version: LeasedVersion) -> None:
        """Compare a full model with the base model, or with the last accepted full model."""
        self.fits.check(version)


@dataclass
class CommandEngine(_FolderEngine):
    """Runs a shell command for each version. Exit status 0 accepts the version.

    After ``timeout`` seconds, the command's process group is killed. ``fits`` is the model to
    compare versions with; if unknown, it is the last version that the command accepted.
    """

    kinds = frozenset({"full", "adapter", "remote"})

    command: str
    timeout: float
    fits: Fits = field(default_factory=Fits)

    def __post_init__(self) -> None:
        self._learns = not self.fits.is_known

    def load(self, version: LeasedVersion) -> None:
        """Run the command, and wait until it ends.

        Raises:
            CommandFailedError: the command ended with a status other than 0, or ran too long.
        """
        told = {
            "SYNCD_FOLDER": str(version.folder),
            "SYNCD_STEP": str(version.step),
            "SYNCD_SEQUENCE": str(version.sequence),
            "SYNCD_KIND": version.kind,
        }
        if version.remote_path is not None:
            told["SYNCD_REMOTE_PATH"] = version.remote_path
        process = subprocess.Popen(  # noqa: S603 # running the user's own command is its purpose
            ["/bin/sh", "-c", self.command],
            env=os.environ | told,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            status = process.wait(self.timeout)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            raise CommandFailedError(
                f"the command for v{version.sequence} did not finish within "
                f"{self.timeout:g} s, so syncd killed it. Increase --timeout, or mend the command"
            ) from error
        if status:
            raise CommandFailedError(
                f"the command ended with status {status} for v{version.sequence}, step "
                f"{version.step}, in {version.folder}"
            )
        if self._learns and version.kind == "full":
            self.fits = Fits(version.manifest, whose="the last version that the command accepted")


@dataclass
class LinkEngine(_FolderEngine):
    """Points a symbolic link to each version's folder.

    Raises:
        InvalidSettingsError: ``path`` exists and is not a link, or its parent folder is missing.
    """

    kinds = frozenset({"full", "adapter"})

    path: Path
    fits: Fits = field(default_factory=Fits)

    def __post_init__(self) -> None:
        self._path = self.path.absolute()
        self._storage = Storage()
        if not self._path.parent.is_dir():
            raise InvalidSettingsError(
                f"{self._path.parent} does not exist: create this folder first"
            )
        if os.path.lexists(self._path) and not self._path.is_symlink():
            raise InvalidSettingsError(
                f"{self._path} is not a link, so syncd does not replace it. Move it away, or give "
                "another path"
            )

    @property
    def target(self) -> Path | None:
        """The present target of the link; None if there is no link."""
        return Path(os.readlink(self._path)) if self._path.is_symlink() else None

    def load(self, version: LeasedVersion) -> None:
        """Point the link to the version's folder, by one atomic rename."""
        draft = self._path.with_name(f"{TEMPORARY}{self._path.name}-{secrets.token_hex(6)}")
        self._storage.symlink(version.folder, draft)
        try:
            self._storage.rename(draft, self._path)
        except OSError:
            self._storage.unlink_if_there(draft)
            raise
        self._storage.sync_folder(self._path.parent)
