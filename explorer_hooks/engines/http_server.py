"""An inference server's HTTP interface: which routes it has, and requests that fail clearly."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any, Final

import httpx2

from syncd.protocol.errors import (
    InvalidSettingsError,
    ServerRefusedError,
    ServerUnreachableError,
)

#: What is between us and a server says these while the server is away or begins.
_AWAY: Final = frozenset({502, 503, 504})
_LONGEST_TEXT: Final = 500
_POLL: Final = 0.5


class HttpServer:
    """A server, by its address.

    Routes are ``METHOD /path``, and are read from the server's own ``/openapi.json``: what it has
    depends on its release and on how it was started.

    Args:
        url: e.g. ``http://127.0.0.1:8000``.
        api_key: what it was started with, sent as a bearer token.
        timeout: seconds for a request, where a call gives no other.
        transport: the seam for tests.

    Raises:
        InvalidSettingsError: this is no address.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout: float = 30.0,
        transport: httpx2.BaseTransport | None = None,
    ) -> None:
        try:
            self.url = httpx2.URL(url)
        except httpx2.InvalidURL as error:
            raise InvalidSettingsError(f"{url} is no address: {error}") from error
        if self.url.scheme not in {"http", "https"} or not self.url.host:
            raise InvalidSettingsError(f"{url} is no address: give http://HOST:PORT")
        if self.url.userinfo or self.url.query or self.url.fragment:
            # It is named in logs, and in reports on shared storage.
            raise InvalidSettingsError(
                f"the address of {self.url.host} says more than http://HOST:PORT/PATH: give a key "
                "by SYNCD_API_KEY, or api_key"
            )
        self._client = httpx2.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
            timeout=timeout,
            transport=transport,
            # A server closes the connection behind an error: each request has one of its own.
            limits=httpx2.Limits(max_keepalive_connections=0),
            # An engine is asked where it is, by no proxy that the environment names for others.
            trust_env=False,
        )
        self._routes: frozenset[str] | None = None

    def has(self, route: str) -> bool:
        """Whether the server has a route; it is asked once, until :meth:`forget_routes`.

        Raises:
            ServerError: it does not say.
        """
        if self._routes is None:
            self._read_routes()
        assert self._routes is not None  # noqa: S101 # read just now
        return route in self._routes

    def require(self, route: str, advice: str) -> None:
        """See that the server has a route.

        Raises:
            InvalidSettingsError: it does not; the advice says what to do.
            ServerError: it does not say.
        """
        if not self.has(route):
            raise InvalidSettingsError(f"{self.url} has no {route}: {advice}")

    def forget_routes(self) -> None:
        """Ask again when they are needed: the server may be another one now."""
        self._routes = None

    def ask(
        self,
        route: str,
        body: object = None,
        *,
        params: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Send a request, and wait for the answer.

        Args:
            route: ``METHOD /path``.
            body: sent as JSON; None for none.
            params: of the query.
            timeout: seconds for each part of it; that of the server by default.

        Returns:
            The answer's JSON; None where there is none in it.

        Raises:
            ServerUnreachableError: there is nobody, or no answer in time: what was asked for may
                have been done, or may yet be.
            ServerRefusedError: the answer is an error.
        """
        method, _, path = route.partition(" ")
        try:
            response = self._client.request(
                method,
                path,
                json=body,
                params=params,
                timeout=httpx2.USE_CLIENT_DEFAULT if timeout is None else timeout,
            )
        except httpx2.TransportError as error:
            self.forget_routes()
            what = str(error) or type(error).__name__
            raise ServerUnreachableError(f"{self.url}: {route}: {what}: is it up?") from error
        said = f"{self.url}: {route}: {response.status_code} {response.text[:_LONGEST_TEXT]}"
        if response.status_code in _AWAY:
            self.forget_routes()
            raise ServerUnreachableError(said)
        if not response.is_success:  # a redirection is followed by nobody: it was not done
            raise ServerRefusedError(said, answer=_json(response))
        return _json(response)

    def wait_until_up(self, timeout: float) -> None:
        """Wait until the server says what routes it has: one that begins needs a while.

        Raises:
            ServerUnreachableError: it did not come up in time.
            ServerRefusedError: it does not say.
        """
        deadline = time.monotonic() + timeout
        while True:
            try:
                self._read_routes()
            except ServerUnreachableError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_POLL)
            else:
                return

    def close(self) -> None:
        """Close its connections. Safe to call twice."""
        self._client.close()

    def _read_routes(self) -> None:
        try:
            told = self.ask("GET /openapi.json")
        except ServerRefusedError as error:
            raise ServerRefusedError(
                f"{error}: it does not say what routes it has; start it without an option that "
                "turns its API's description off"
            ) from error
        paths = told.get("paths") if isinstance(told, dict) else None
        if not isinstance(paths, dict):
            raise ServerRefusedError(f"{self.url}/openapi.json describes no paths")
        self._routes = frozenset(
            f"{method.upper()} {path}"
            for path, methods in paths.items()
            if isinstance(methods, dict)
            for method in methods
        )


def _json(response: httpx2.Response) -> Any:
    try:
        return response.json()
    except json.JSONDecodeError:
        return None
