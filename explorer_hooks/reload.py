"""Load a version into an engine: pause, load, resume. After an error, load the previous version."""

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


class Reloader:
    """Loads versions into one engine, or gives them to ``on_remote`` (kind ``remote``).

    A paused engine is always resumed. If a load fails, the previous version is loaded again.
    """

    def __init__(self, engine: Engine, on_remote: OnRemote | None = None) -> None:
        self._engine = engine
        self._on_remote = on_remote

    def check_kind(self, version: LeasedVersion) -> None:
        """Check that the engine or ``on_remote`` takes versions of this kind."""
        if not self._goes_to_on_remote(version):
            check_kind(version, self._engine.kinds)

    def check(self, version: LeasedVersion) -> None:
        """Let the engine compare a version's names, shapes and dtypes with its model."""
        if not self._goes_to_on_remote(version):
            self._engine.check(version)

    def prepare(self, version: LeasedVersion) -> None:
        """Let the engine prepare the load while it still serves."""
        if not self._goes_to_on_remote(version):
            self._engine.prepare(version)

    def reload(self, version: LeasedVersion, before: LeasedVersion | None, told: Reload) -> Reload:
        """Load an accepted version instead of ``before``; return ``told`` with the times.

        Raises:
            EngineBrokenError: the engine has neither version, or does not serve.
            Exception: the engine raised this error, and serves ``before`` again. If ``before`` is
                None, the engine may have a part of the new version.
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
        """Let the engine receive a broadcast; return ``told`` with the times.

        Raises:
            BroadcastError: the broadcast failed. The engine is unchanged.
            EngineBrokenError: the engine's weights are unknown, or the engine does not serve.
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
                    f"the engine failed while it received a broadcast: {error}. The weights that "
                    "the engine serves are unknown"
                ) from error
        pause = time.monotonic() - begun
        return told.model_copy(update={"pause": pause, "load": loaded - loading})

    def still_serves(self, version: LeasedVersion) -> bool:
        """True if the engine still has ``version``, which must be the last loaded version."""
        return self._goes_to_on_remote(version) or self._engine.still_serves(version)

    def restore(self, version: LeasedVersion) -> None:
        """Load a broken engine's version again; EngineBrokenError if the engine stays broken."""
        try:
            with _Resumed(self._engine):
                self._engine.pause()
                self._load(version)
                self._engine.reset_cache()
        except EngineBrokenError:
            raise
        except Exception as error:
            raise EngineBrokenError(
                "the engine is broken, and another attempt to load version "
                f"{version.sequence} has failed: {error}"
            ) from error

    def _load(self, version: LeasedVersion) -> None:
        if self._on_remote is None or version.remote_path is None:
            self._engine.load(version)
            return
        try:
            self._on_remote(version.remote_path, version)
        except Exception as error:
            # Only EngineMismatchError says for certain that the version is at fault.
            if isinstance(error, EngineMismatchError) or not refuses(error):
                raise
            raise OnRemoteError(version.remote_path, error) from error

    def _go_back(self, before: LeasedVersion | None, error: Exception) -> None:
        if before is None:
            return
        log.warning("loading the previous version %d again: %s", before.sequence, error)
        try:
            self._load(before)
            self._engine.reset_cache()
        except Exception as again:  # noqa: BLE001 - raised with the error that came before it
            raise EngineBrokenError(
                f"the engine did not load the new version ({error}), and could not load its "
                f"previous version {before.sequence} again ({again}). The weights that the engine "
                "serves are unknown. Restart the engine",
                refuses=refuses(error),
            ) from error

    def _goes_to_on_remote(self, version: LeasedVersion) -> bool:
        return self._on_remote is not None and version.kind == "remote"


class _Resumed:
    """A context that resumes the engine at its end, even after an error."""

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
                f"the engine does not serve, because it could not be resumed{before}: {refused}",
                refuses=error is not None and refuses(error),
            ) from refused
