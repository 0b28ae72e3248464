"""An engine's change from one version to the next: pause, load, resume; or back on an error."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from explorer_hooks.engines.base import Engine
from explorer_hooks.engines.fitting import check_kind
from explorer_hooks.reader import LeasedVersion
from syncd.protocol.errors import (
    BroadcastError,
    CancelledError,
    EngineBrokenError,
    EngineMismatchError,
    JobUnavailableError,
)
from syncd.protocol.reports import Reload

log = logging.getLogger(__name__)

#: Called with the path of a version of kind ``remote``, and the version.
OnRemote = Callable[[str, LeasedVersion], object]


class RefusedError(Exception):
    """Raised when a version was refused; the engine still serves the previous one.

    Attributes:
        error: the reason.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


class OnRemoteError(Exception):
    """Raised when ``on_remote`` failed: the next pull tries the same version again.

    Attributes:
        error: the error that the callback raised.
    """

    def __init__(self, path: str, error: Exception) -> None:
        super().__init__(f"on_remote did not take {path!r}: {error!r}")
        self.error = error


def refuses(error: BaseException) -> bool:
    """Whether the version itself causes an error: then the version is not tried again.

    Errors of storage, of a connection (any OSError) and of ``on_remote``, and the end of the
    caller, may pass: then the next try may succeed.
    """
    if isinstance(error, EngineBrokenError):
        return error.refuses
    passing = OSError | OnRemoteError | CancelledError | JobUnavailableError
    return isinstance(error, Exception) and not isinstance(error, passing)


class Reloader:
    """Brings versions into one engine.

    Promised: a paused engine is always resumed. An engine that does not take the new version gets
    the previous one back; if that fails too, EngineBrokenError says so.

    Args:
        engine: the engine to load into.
        on_remote: takes the versions of kind ``remote`` in place of the engine.
    """

    def __init__(self, engine: Engine, on_remote: OnRemote | None = None) -> None:
        self._engine = engine
        self._on_remote = on_remote

    def check_kind(self, version: LeasedVersion) -> None:
        """Check that the engine or ``on_remote`` takes versions of this kind.

        Raises:
            EngineMismatchError: neither does.
        """
        if not self._is_elsewhere(version):
            check_kind(version, self._engine.kinds)

    def check(self, version: LeasedVersion) -> None:
        """Let the engine compare names, shapes and dtypes; nothing changes.

        Raises:
            EngineMismatchError: they do not fit.
        """
        if not self._is_elsewhere(version):
            self._engine.check(version)

    def prepare(self, version: LeasedVersion) -> None:
        """Let the engine prepare the load while it still serves."""
        if not self._is_elsewhere(version):
            self._engine.prepare(version)

    def reload(self, version: LeasedVersion, before: LeasedVersion | None, told: Reload) -> Reload:
        """Let the engine serve a version that it has accepted.

        Args:
            version: the new version.
            before: the version that it serves; None before the first.
            told: the measurements of this pull so far.

        Returns:
            ``told``, with the seconds of the pause and of the load.

        Raises:
            EngineBrokenError: it has neither of the two, or does not serve.
            Exception: an error of the engine; it serves the previous version again. If there was
                none, an engine that is not all or nothing may have half of the new one.
        """
        begun = time.monotonic()
        # A pause that failed may have stopped the engine nevertheless.
        with _Resumed(self._engine):
            self._engine.pause()
            loading = time.monotonic()
            try:
                self._load(version)
                loaded = time.monotonic()
                self._engine.reset_cache()
            except Exception as error:
                self._go_back(before, error)
                raise
        pause = time.monotonic() - begun
        return told.model_copy(update={"pause": pause, "load": loaded - loading})

    def receive(self, take: Callable[[], None], told: Reload) -> Reload:
        """Let the engine take weights by a broadcast.

        Args:
            take: the engine's part in it; all or nothing, if it raises only the errors below.
            told: the measurements of this pull so far.

        Returns:
            ``told``, with the seconds of the pause and of the transfer.

        Raises:
            BroadcastError: the transfer failed; the engine is as it was.
            EngineBrokenError: its weights are unknown, or it does not serve.
        """
        begun = time.monotonic()
        with _Resumed(self._engine):
            try:
                self._engine.pause()
            except EngineBrokenError:
                raise
            except Exception as error:
                raise BroadcastError(
                    f"the engine could not be paused for the broadcast: {error}"
                ) from error
            loading = time.monotonic()
            try:
                take()
                loaded = time.monotonic()
                self._engine.reset_cache()
            except (BroadcastError, EngineBrokenError):
                raise
            except Exception as error:
                raise EngineBrokenError(
                    f"the engine failed while it took a broadcast: {error}; the weights that it "
                    "serves are unknown"
                ) from error
        pause = time.monotonic() - begun
        return told.model_copy(update={"pause": pause, "load": loaded - loading})

    def still_serves(self, version: LeasedVersion) -> bool:
        """Whether the engine still has the version that it was given last."""
        return self._is_elsewhere(version) or self._engine.still_serves(version)

    def restore(self, version: LeasedVersion) -> None:
        """Let a broken engine serve its version again.

        Raises:
            EngineBrokenError: it is still broken.
        """
        try:
            with _Resumed(self._engine):
                self._engine.pause()
                self._load(version)
                self._engine.reset_cache()
        except EngineBrokenError:
            raise
        except Exception as error:
            raise EngineBrokenError(
                f"the engine still does not take version {version.sequence} again: {error}"
            ) from error

    def _load(self, version: LeasedVersion) -> None:
        if self._on_remote is None or version.remote_path is None:
            self._engine.load(version)
            return
        try:
            self._on_remote(version.remote_path, version)
        except Exception as error:
            # Other errors may pass. Only EngineMismatchError says for certain that the version is
            # at fault.
            if isinstance(error, EngineMismatchError) or not refuses(error):
                raise
            raise OnRemoteError(version.remote_path, error) from error

    def _go_back(self, before: LeasedVersion | None, error: Exception) -> None:
        """After the engine failed half-way, load the previous version, still held, again."""
        if before is None:
            return
        log.warning("loading the previous version %d again: %s", before.sequence, error)
        try:
            self._load(before)
            self._engine.reset_cache()
        except Exception as again:  # noqa: BLE001 - raised with the error that came before it
            raise EngineBrokenError(
                f"the engine did not take the new version ({error}), and could not load its "
                f"previous version {before.sequence} again ({again}): the weights that it serves "
                "are unknown; "
                "restart it",
                refuses=refuses(error),
            ) from error

    def _is_elsewhere(self, version: LeasedVersion) -> bool:
        return self._on_remote is not None and version.kind == "remote"


class _Resumed:
    """Resumes the engine at the end, with or without an error."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        try:
            self._engine.resume()
        except Exception as refused:
            before = f" after {error}" if error is not None else ""
            raise EngineBrokenError(
                f"the engine does not serve: it could not be resumed{before}: {refused}",
                refuses=error is not None and refuses(error),
            ) from refused
