"""Keeping one job served: a new daemon replaces a daemon that failed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from syncd.daemon.config import DaemonConfig
from syncd.daemon.hang import HangGuard
from syncd.daemon.service import Service
from syncd.protocol.errors import SyncdError
from syncd.protocol.events import JobFault, JobUnavailable

log = logging.getLogger(__name__)

#: Seconds after which a job whose daemon failed is served again.
_AGAIN: Final = 10.0
_LOOK: Final = 0.2


class Keeper:
    """Serves one job until it is stopped or its daemon ends.

    If the daemon fails, the error is logged, and a new daemon serves the job 10 s later.
    """

    def __init__(
        self,
        root: Path,
        config: DaemonConfig,
        make: Callable[[DaemonConfig], Service],
        guard: HangGuard,
    ) -> None:
        self.root = root
        self._config = config
        self._make = make
        self._guard = guard
        self._stopping = False
        self._replacing = threading.Lock()
        self._service: Service | None = None

    def prepare(self) -> None:
        """Make the daemon before :meth:`serve`; raises the errors of :class:`Service`."""
        self._replace()

    def serve(self) -> None:
        """Serve the job in this thread."""
        try:
            self._serve_again_and_again()
        finally:
            self._guard.forget(str(self.root))

    def stop(self) -> None:
        """Ask :meth:`serve` to return; any thread or signal handler may call this."""
        self._stopping = True
        if (service := self._service) is not None:
            service.stop()

    def wake(self) -> None:
        """Begin the next round now; any thread or signal handler may call this."""
        if (service := self._service) is not None:
            service.wake()

    def give_up(self) -> None:
        """Release the job to other daemons; see :meth:`Service.give_up`. Hangs if storage hangs."""
        self.stop()
        if (service := self._service) is not None:
            service.give_up()

    def reload(self, config: DaemonConfig) -> None:
        """Use another configuration from the next round on; any thread may call this."""
        with self._replacing:
            self._config = config
            if self._service is not None:
                self._service.reload(config)

    @property
    def is_idle(self) -> bool:
        """True if no participant is alive and nothing is left to publish."""
        return self._service is None or self._service.is_idle

    def _serve_again_and_again(self) -> None:
        failed = False
        while not self._stopping:
            try:
                service = self._service
                if failed or service is None:
                    service = self._replace()
                    if self._is_asked_to_stop():  # asked while there was no daemon
                        service.stop()
                service.run()
            except (SyncdError, OSError) as error:
                JobUnavailable(self.root, error).tell(log)
            except Exception:  # noqa: BLE001 - a bug in syncd is logged with its traceback
                JobFault(self.root).tell(log)
            else:
                return
            failed = True
            self._wait()

    def _replace(self) -> Service:
        service = self._make(self._config)
        with self._replacing:
            self._service = service
            service.reload(self._config)  # the configuration may have changed meanwhile
        return service

    def _is_asked_to_stop(self) -> bool:
        return self._stopping

    def _wait(self) -> None:
        self._guard.forget(str(self.root))  # until there is a daemon again, no progress is expected
        end = time.monotonic() + _AGAIN
        while not self._stopping and time.monotonic() < end:
            time.sleep(_LOOK)
