"""Where metrics can be had: over HTTP on this host, and in a file for the node exporter."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Self

from prometheus_client import start_http_server, write_to_textfile

from syncd.daemon.metrics import Metrics
from syncd.protocol.errors import InvalidSettingsError
from syncd.protocol.events import Event
from syncd.storage.repeats import Repeats

log = logging.getLogger(__name__)

HOST: Final = "127.0.0.1"
#: Seconds between two writings of the file: Prometheus looks about as often.
_WRITE: Final = 15.0


class Exporter:
    """Serves metrics while it is open.

    The file is written at a tick: while a merge goes on it stays as it was. It is of this host, and
    no part of the job.

    Args:
        metrics: what is served.
        port: on 127.0.0.1; 0 for none.
        textfile: the file, which appears whole each time; None for none.
        clock: seconds, monotonic.

    Raises:
        InvalidSettingsError: the port is taken.
    """

    def __init__(
        self,
        metrics: Metrics,
        *,
        port: int,
        textfile: Path | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics = metrics
        self._textfile = textfile
        self._clock = clock
        self._written_at = float("-inf")
        self._repeats = Repeats(clock=clock)
        self._server = None
        if port:
            try:
                self._server = start_http_server(port, HOST, metrics.registry)
            except OSError as error:
                raise InvalidSettingsError(
                    f"metrics_port = {port} cannot be used: {error.strerror}. Give another, or 0 "
                    "for none"
                ) from error
            address = f"http://{HOST}:{port}/metrics"
            extra = Event.METRICS_SERVED(address=address)
            log.info("metrics are at %s", address, extra=extra)

    def tick(self) -> None:
        """Write the file, if it is time."""
        if self._textfile is not None and self._clock() - self._written_at >= _WRITE:
            self._write(self._textfile)

    def close(self) -> None:
        """Write the file once more, and serve no longer."""
        if self._textfile is not None:
            self._write(self._textfile)
        if self._server is not None:
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join()

    def _write(self, path: Path) -> None:
        self._written_at = self._clock()
        try:
            write_to_textfile(str(path), self._metrics.registry)
        except OSError as error:
            if self._repeats.due(path):
                log.warning(
                    "the metrics cannot be written to %s: %s",
                    path,
                    error,
                    extra=Event.METRICS_UNWRITTEN(path=path, reason=error),
                )
        else:
            self._repeats.forget(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
