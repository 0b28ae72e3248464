"""Change an engine's weights: pause, load or receive, resume. After an error, go back."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from explorer_hooks.engines.base import Engine, InProcessEngine, WeightTaker
from explorer_hooks.reader import LeasedVersion
from syncd.coordination.explorer import ExplorerSynchronizer
from syncd.coordination.waiting import Cancellation
from syncd.protocol.errors import (
    BroadcastError,
    CancelledError,
    EngineBrokenError,
    EngineMismatchError,
    JobUnavailableError,
)
from syncd.protocol.records import SaveId
from syncd.protocol.reports import Rendezvous

log = logging.getLogger(__name__)

#: Called with the path of a version of kind ``remote``, and the version.
OnRemote = Callable[[str, LeasedVersion], object]
#: Lets the engine receive a transfer, with the errors of ``WeightTaker.receive``.
Take = Callable[[], None]


class RefusedError(Exception):
    """Raised when a version is refused because of ``error``."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


class OnRemoteError(Exception):
    """Raised when ``on_remote`` raised ``error``. The next pull tries the version again."""

    def __init__(self, path: str, error: Exception) -> None:
        super().__init__(f"on_remote raised an error for {path!r}: {error!r}")
        self.error = error


def refuses(error: BaseException) -> bool:
    """True if an error is the version's fault, so that the version is not tried again.

    After a passing error, for example of storage or of a connection, the next try can succeed.
    """
    if isinstance(error, EngineBrokenError):
        return error.refuses
    passing = OSError | OnRemoteError | CancelledError | JobUnavailableError
    return isinstance(error, Exception) and not isinstance(error, passing)


@dataclass(frozen=True)
class Reloader:
    """Loads versions into one engine, or gives them to ``on_remote`` (kind ``remote``).

    A paused engine is always resumed. If a load fails, the previous version is loaded again.
    """

    engine: Engine
    on_remote: OnRemote | None

    def taker(self, version: LeasedVersion) -> Engine:
        """The engine, or ``on_remote``, which loads versions of this kind."""
        if self.on_remote is not None and version.remote_path is not None:
            return _Remote(self.on_remote, version.remote_path)
        return self.engine

    def reload(self, version: LeasedVersion, before: LeasedVersion | None) -> dict[str, float]:
        """Load an accepted version instead of ``before``; return the times for a ``Reload``.

        Raises:
            EngineBrokenError: the engine has neither version, or does not serve.
            Exception: the engine raised this error, and serves ``before`` again. If ``before`` is
                None, the engine may have a part of the new version.
        """
        begun = time.monotonic()
        with self._paused():
            loading = time.monotonic()
            try:
                self.taker(version).load(version)
                load = time.monotonic() - loading
                self.engine.reset_cache()
            except Exception as error:
                self._go_back(before, error)
                raise
        return {"pause": time.monotonic() - begun, "load": load}

    def receive(self, take: Take) -> dict[str, float]:
        """Let the engine receive a broadcast; return the times for a ``Reload``.

        Raises:
            BroadcastError: the broadcast failed. The engine is unchanged.
            EngineBrokenError: the engine's weights are unknown, or the engine does not serve.
        """
        begun = time.monotonic()
        loading = None
        try:
            with self._paused():
                loading = time.monotonic()
                take()
                load = time.monotonic() - loading
                self.engine.reset_cache()
        except (BroadcastError, EngineBrokenError):
            raise
        except Exception as error:
            if loading is None:
                raise BroadcastError(
                    f"the engine could not be paused for the broadcast: {error}"
                ) from error
            raise EngineBrokenError(
                f"the engine failed while it received a broadcast: {error}. The weights that "
                "the engine serves are unknown"
            ) from error
        return {"pause": time.monotonic() - begun, "load": load}

    def restore(self, version: LeasedVersion) -> None:
        """Load a broken engine's version again; EngineBrokenError if the engine stays broken."""
        try:
            with self._paused():
                self.taker(version).load(version)
                self.engine.reset_cache()
        except EngineBrokenError:
            raise
        except Exception as error:
            raise EngineBrokenError(
                "the engine is broken, and another attempt to load "
                f"v{version.sequence} has failed: {error}"
            ) from error

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Pause the engine, and resume it at the end, even if the pause fails."""
        failed: BaseException | None = None
        try:
            self.engine.pause()
            yield
        except BaseException as error:
            failed = error
            raise
        finally:
            try:
                self.engine.resume()
            except Exception as refused:
                before = f" after {failed}" if failed is not None else ""
                raise EngineBrokenError(
                    f"the engine does not serve, because it could not be resumed{before}: "
                    f"{refused}",
                    refuses=failed is not None and refuses(failed),
                ) from refused

    def _go_back(self, before: LeasedVersion | None, error: Exception) -> None:
        if before is None:
            return
        log.warning("going back to v%d: %s", before.sequence, error)
        try:
            before.verify()  # its files may have been damaged since they were loaded
            self.taker(before).load(before)
            self.engine.reset_cache()
        except Exception as again:  # noqa: BLE001 - raised with the error that came before it
            raise EngineBrokenError(
                f"the engine did not load the new version ({error}), and could not go back to "
                f"v{before.sequence} ({again}). The weights that the engine "
                "serves are unknown. Restart the engine",
                refuses=refuses(error),
            ) from error


@dataclass(frozen=True)
class _Remote(InProcessEngine):
    """Gives a version of kind ``remote`` to ``on_remote``."""

    on_remote: OnRemote
    path: str
    kinds = frozenset({"remote"})

    def check(self, version: LeasedVersion) -> None:
        """Do nothing, because only ``on_remote`` can tell whether the version fits."""

    def load(self, version: LeasedVersion) -> None:
        """Call ``on_remote``."""
        try:
            self.on_remote(self.path, version)
        except Exception as error:
            # Only EngineMismatchError says for certain that the version is at fault.
            if isinstance(error, EngineMismatchError) or not refuses(error):
                raise
            raise OnRemoteError(self.path, error) from error


@dataclass
class ExplorerBroadcasts:
    """Lets one engine take part in transfers (method ``nccl``).

    Attributes:
        fits: False after a transfer whose tensors did not fit, until the engine has loaded a
            version.
        group: the weight group that the engine's workers are in, if any.
    """

    sync: ExplorerSynchronizer
    engine: WeightTaker
    fits: bool = True
    group: str | None = None

    def meet(self, cancel: Cancellation) -> tuple[SaveId, Take]:
        """Wait for the group of the agreed broadcast."""
        rendezvous, rank_offset = self.sync.rendezvous(cancel=cancel)
        save_id = SaveId.parse(rendezvous.save_id)
        if save_id is None:
            raise BroadcastError(
                f"the announced save id is {rendezvous.save_id!r}, but a TrainerHook makes no such "
                "save ids"
            )
        return save_id, lambda: self._take(rendezvous, rank_offset)

    def _take(self, rendezvous: Rendezvous, rank_offset: int) -> None:
        group, self.group = self.group, None
        try:
            self.engine.receive(rendezvous, rank_offset, self.sync.settings.broadcast_timeout)
        except BroadcastError as error:
            self.fits = not isinstance(error.__cause__, EngineMismatchError)
            raise
        if group != rendezvous.group_name:
            log.info("%s has joined weight group %s", self.sync.name, rendezvous.group_name)
        self.group = rendezvous.group_name
