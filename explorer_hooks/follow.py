"""``syncd follow``: an explorer beside a server, as a process of its own. Never imports torch.

syncd itself knows nothing of the hooks: its command line finds this one by an entry point.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import click

from explorer_hooks.bench import serve
from explorer_hooks.engines.base import Engine
from explorer_hooks.engines.server_engine import ServerEngine
from explorer_hooks.engines.sglang_server import SGLangServer
from explorer_hooks.engines.vllm_server import VLLMServer
from explorer_hooks.fitting import Fits
from explorer_hooks.follow_engines import CommandEngine, LinkEngine
from explorer_hooks.hook import ExplorerHook
from explorer_hooks.staging import Staging
from syncd.protocol.errors import InvalidSettingsError
from syncd.protocol.policy import SyncMethod, SyncSettings, SyncStyle, Version

log = logging.getLogger(__name__)

_SERVERS: Mapping[str, type[ServerEngine]] = {"vllm": VLLMServer, "sglang": SGLangServer}
_FOLDER = click.Path(path_type=Path, file_okay=False)


@click.command(
    "follow",
    epilog="Example: syncd follow /shared/jobs/qwen-grpo --name server-0 --stage /dev/shm "
    "--link /srv/model",
)
@click.argument("job", type=_FOLDER)
@click.option("--name", required=True, help="The explorer's, unique in the job.")
@click.option("--command", "run", help="What a shell runs for each version; 0 = it was taken.")
@click.option(
    "--link",
    type=click.Path(path_type=Path),
    help="A symbolic link that is to lead to each version's folder.",
)
@click.option(
    "--engine",
    "server",
    type=click.Choice(list(_SERVERS)),
    help="A server that is given each version over HTTP, at --url.",
)
@click.option("--url", help="Of one server, e.g. http://127.0.0.1:8000.")
@click.option(
    "--in-flight",
    metavar="MODE",
    help="What becomes of requests while weights are loaded; of vllm: keep, wait, abort; of "
    "sglang: retract, abort.  [default: the first]",
)
@click.option("--lora-name", default="syncd", show_default=True, help="The adapters' model name.")
@click.option("--spans-hosts", is_flag=True, help="The server reads on other hosts too.")
@click.option("--stage", type=_FOLDER, help="A folder of this host to copy versions into first.")
@click.option(
    "--budget",
    type=click.IntRange(min=1),
    metavar="BYTES",
    help="The most that all copies there may take.  [default: what is free]",
)
@click.option(
    "--base",
    type=_FOLDER,
    help="The model folder that the server was started with: versions must fit it.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="How long the command, or a server's load, may take.",
)
@click.option("--ask", is_flag=True, help="Require syncs, of a trainer that is explorer_driven.")
@click.option(
    "--broadcast",
    is_flag=True,
    help="Take broadcasts of a trainer with method nccl; the --engine must be started for them.",
)
@click.option(
    "--broadcast-timeout",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="How long a broadcast may take to begin, and to arrive: as the trainer's.  "
    f"[default: {SyncSettings().broadcast_timeout:g}]",
)
@click.option(
    "--memory-dir", type=_FOLDER, help="The job's second directory, where its versions are."
)
def command(
    job: Path,
    *,
    name: str,
    run: str | None,
    link: Path | None,
    server: str | None,
    url: str | None,
    in_flight: str | None,
    lora_name: str,
    spans_hosts: bool,
    stage: Path | None,
    budget: int | None,
    base: Path | None,
    timeout: float,
    ask: bool,
    broadcast: bool,
    broadcast_timeout: float | None,
    memory_dir: Path | None,
) -> None:
    """Follow JOB for a server that something else runs: --engine, --command, or --link.

    Each version is verified, copied to this host (--stage), and then given to the command, in
    SYNCD_FOLDER, SYNCD_STEP, SYNCD_SEQUENCE and SYNCD_KIND, or linked to. What the command does not
    take is refused, and it is given the version before again. A server, --engine at --url, is
    paused, given the version, and generates a token before it counts as served; where it was
    restarted it is given its version again. A key that it wants is read from SYNCD_API_KEY. Ends at
    SIGTERM, once a command that runs has ended.
    """
    if [run, link, server].count(None) != 2:
        raise click.UsageError("Give one of --engine, --command and --link.")
    if (server is None) != (url is None):
        raise click.UsageError("--engine says what is at --url: give both.")
    if budget is not None and stage is None:
        raise click.UsageError("--budget says how much of --stage may be used: give both.")
    if broadcast and server is None:
        raise click.UsageError("--broadcast sends weights to an --engine: give one.")
    if broadcast_timeout is not None and not broadcast:
        raise click.UsageError("--broadcast-timeout is how long --broadcast waits: give both.")
    staging = None
    if stage is not None:
        staging = Staging(stage, budget, keep_last=link is not None)
    engine: Engine
    if server is not None and url is not None:
        # Else a line for each request, of which there is one every few seconds.
        logging.getLogger("httpx2").setLevel(logging.WARNING)
        engine = _SERVERS[server](
            url,
            mode=in_flight,
            base=base,
            lora_name=lora_name,
            is_local=False if spans_hosts else None,
            api_key=os.environ.get("SYNCD_API_KEY"),
            load_timeout=timeout,
        )
    else:
        fits = Fits(base, casts=True, whose=str(base)) if base is not None else None
        engine = _engine(run, link, timeout, fits, staging)
    settings = SyncSettings(
        style=SyncStyle.EXPLORER_DRIVEN if ask else SyncStyle.FULLY_ASYNC,
        method=SyncMethod.NCCL if broadcast else SyncMethod.CHECKPOINT,
    )
    if broadcast_timeout is not None:
        settings = replace(settings, broadcast_timeout=broadcast_timeout)
    with (
        ExplorerHook(
            job,
            name,
            engine,
            settings=settings,
            staging=staging,
            memory_dir=memory_dir,
        ) as hook,
        _ended_by_signals(hook),
    ):
        serve(hook, _say)


def _engine(
    run: str | None, link: Path | None, timeout: float, fits: Fits | None, staging: Staging | None
) -> Engine:
    """What versions are given to."""
    if run is not None:
        return CommandEngine(run, timeout=timeout, fits=fits)
    if link is None:
        raise InvalidSettingsError("nothing to give versions to")
    engine = LinkEngine(link, fits=fits)
    if staging is not None and engine.target is not None:
        staging.serves(engine.target)  # a server may start from there before the link has moved
    return engine


@contextmanager
def _ended_by_signals(hook: ExplorerHook) -> Iterator[None]:
    """Let SIGTERM and SIGINT end the hook's waits."""
    before = {
        number: signal.signal(number, lambda *_: hook.cancel())
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say(version: Version) -> None:
    log.info("serving version %d, step %d", version.sequence, version.step)
