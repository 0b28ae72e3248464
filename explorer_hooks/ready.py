"""``syncd follow --ready-file``: a file that tells a readiness probe whether a server is ready."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from explorer_hooks.engines.server_engine import ServerEngine
from explorer_hooks.hook import ExplorerHook
from syncd.protocol.errors import SyncdError

log = logging.getLogger(__name__)


@contextmanager
def ready_file(
    path: Path,
    opens: Callable[[], ExplorerHook],
    engine: ServerEngine,
    max_behind: int | None,
    every: float = 2.0,
) -> Iterator[ExplorerHook]:
    """Open a hook; in the block touch ``path`` every 2 s while the server is ready, or remove it.

    The server is ready if it has the hook's version, and is at most ``max_behind`` versions behind
    LATEST. While LATEST cannot be read, the file stays as it is, and gets too old for the probe.

    ``engine`` is for the server of the hook's engine, and is closed at the end. It is not the
    hook's engine, because that one belongs to the hook's thread.
    """
    ended = threading.Event()
    path.unlink(missing_ok=True)  # a killed process may have left it

    with closing(engine), opens() as hook:

        def is_ready() -> bool:
            version = hook.version
            if version is None or hook.fault:
                return False
            if max_behind is not None:
                newest = hook.synchronizer.get_latest_model_version() or version
                if newest.sequence > version.sequence + max_behind:
                    return False
            return engine.is_loaded()  # last, because reading LATEST can take long

        def watch() -> None:
            while not ended.wait(every):
                try:
                    if is_ready():
                        path.touch()
                    else:
                        path.unlink(missing_ok=True)
                except (OSError, SyncdError) as error:
                    log.warning("%s was neither touched nor removed: %s", path, error)

        thread = threading.Thread(target=watch, name="syncd-ready")
        thread.start()
        try:
            yield hook
        finally:
            ended.set()
            thread.join()
            path.unlink(missing_ok=True)
