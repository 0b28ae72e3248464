"""Export of the metrics: over HTTP on loopback, and in a file for the node exporter."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Self

from prometheus_client import CollectorRegistry, generate_latest, write_to_textfile

from syncd.daemon.loopback import HOST, LoopbackRequest, LoopbackServer
from syncd.daemon.telling.metrics import Metrics
from syncd.protocol.errors import InvalidSettingsError
from syncd.protocol.events import MetricsServed, MetricsUnwritten
from syncd.storage.repeats import Repeats

log = logging.getLogger(__name__)

#: The most connections at a time; Prometheus needs one.
_MOST: Final = 16
#: The media type of ``generate_latest``'s output.
_TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
#: Seconds between two writes of the file; Prometheus reads it about as often.
_WRITE: Final = 15.0


class Exporter:
    """Serves metrics over HTTP, and writes them to a file, while it is open.

    The file is replaced at ticks, so it does not change during a merge. Port 0 serves nothing.

    Raises:
        InvalidSettingsError: the port cannot be used.
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
        self._server: _Server | None = None
        if port:
            try:
                self._server = _Server(port, metrics.registry)
            except OSError as error:
                raise InvalidSettingsError(
                    f"metrics_port = {port} cannot be used: {error.strerror}. Give another port, "
                    "or 0 to serve no metrics"
                ) from error
            self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
            self._thread.start()
            address = f"http://{HOST}:{port}/metrics"
            MetricsServed(address).tell(log)

    def tick(self) -> None:
        """Write the file if the last write was at least 15 s ago."""
        if self._textfile is not None and self._clock() - self._written_at >= _WRITE:
            self._write(self._textfile)

    def close(self) -> None:
        """Write the file once more, and stop serving."""
        if self._textfile is not None:
            self._write(self._textfile)
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()

    def _write(self, path: Path) -> None:
        self._written_at = self._clock()
        try:
            write_to_textfile(str(path), self._metrics.registry)
        except OSError as error:
            if self._repeats.due(path):
                MetricsUnwritten(path, error).tell(log)
        else:
            self._repeats.forget(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Server(LoopbackServer):
    def __init__(self, port: int, registry: CollectorRegistry) -> None:
        self.registry = registry
        super().__init__(port, _Scrape, _MOST)


class _Scrape(LoopbackRequest):
    server: _Server

    def answer(self) -> None:
        """Answer a request for any path with all metrics."""
        self.send(generate_latest(self.server.registry), _TEXT)
