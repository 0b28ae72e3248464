"""An HTTP client for an inference server."""

from __future__ import annotations

import ipaddress
import json
import ssl
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import httpx2

from syncd.protocol.errors import (
    InvalidSettingsError,
    ServerRefusedError,
    ServerUnreachableError,
)

#: The statuses of a proxy's answers while the server behind the proxy is away or starts.
_AWAY: Final = frozenset({502, 503, 504})
#: The schemes that are supported, with their default ports.
_PORTS: Final = {"http": 80, "https": 443}
#: The names of this host in a server's address. They count as one host.
_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1", "0.0.0.0", "::"})  # noqa: S104 # compared only
_LONGEST_TEXT: Final = 500
#: Shorter keys are no secrets, but parts of many words.
_SECRET: Final = 6
_POLL: Final = 0.5
#: Seconds between two log lines that the server is still not up.
_WORD: Final = 30.0
_DISTRUSTED: Final = (
    "this host does not trust the server's certificate. As cacert (--cacert), pass the "
    "certificate of the authority that signed the server's certificate"
)
_WRONG_KEY: Final = (
    ": the server refuses the API key. Set SYNCD_API_KEY to the key that the server was started "
    "with. For an SGLang server, also set SYNCD_ADMIN_API_KEY to the value of --admin-api-key"
)
_UNLISTED: Final = (
    "The server answers, but it is neither vLLM nor SGLang, or does not serve its API description "
    "(openapi.json)"
)
#: The most seconds to connect. Short, because a host that is down may not refuse connections.
_CONNECT: Final = 3.0


class HttpServer:
    """Sends requests to one server.

    A route is written as ``METHOD /path``. The routes are read from the server's ``/openapi.json``,
    because they depend on the server's release and options.

    Args:
        url, api_key, cacert: see :class:`~explorer_hooks.engines.server_engine.ServerEngine`.
        other_keys: maps a route to the key that replaces ``api_key`` for this route.
        timeout: the default limit for a request, in seconds.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        other_keys: Mapping[str, str] | None = None,
        cacert: str | Path | None = None,
        timeout: float = 30.0,
        transport: httpx2.BaseTransport | None = None,
    ) -> None:
        self.url = _address(url)
        self._api_key = None if api_key is None else _checked(api_key)
        self._other_keys = {route: _checked(key) for route, key in (other_keys or {}).items()}
        self._timeout = timeout
        try:
            trusted = True if cacert is None else ssl.create_default_context(cafile=cacert)
        except OSError as error:  # an SSLError is one
            raise InvalidSettingsError(
                f"{cacert} contains no certificate in PEM format: {error}"
            ) from error
        self._client = httpx2.Client(
            base_url=self.url,
            verify=trusted,
            timeout=_limits(timeout),
            transport=transport,
            # A server closes the connection after an error, so each request has its own connection.
            limits=httpx2.Limits(max_keepalive_connections=0),
            # Ignore the environment's proxies, and connect to the address directly.
            trust_env=False,
        )
        self._routes: frozenset[str] = frozenset()

    @property
    def is_here(self) -> bool:
        """True if the server's address is on this host's loopback interface."""
        try:
            return ipaddress.ip_address(self.url.host).is_loopback
        except ValueError:
            return self.url.host == "localhost"

    def has(self, route: str) -> bool:
        """True if the server has a route, by the cached list of routes."""
        if not self._routes:
            self.read_routes()
        return route in self._routes

    def require(self, route: str, advice: str) -> None:
        """Raise InvalidSettingsError, with ``advice``, if the server lacks a route."""
        if not self.has(route):
            raise InvalidSettingsError(f"{self.url} has no route {route}: {advice}")

    def forget_routes(self) -> None:
        """Drop the cached routes; another server may have the address now."""
        self._routes = frozenset()

    def ask(
        self,
        route: str,
        body: object = None,
        *,
        params: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """Send a request with ``body`` as JSON; return the answer's JSON object, or an empty dict.

        ``timeout`` (in seconds) limits each read and each write. The limit to connect is at most 3
        s.

        Raises:
            ServerUnreachableError: there is no server, or no answer came in time. The server may
                still have carried out the request, or may do so later.
            ServerRefusedError: the answer is an error.
        """
        method, _, path = route.partition(" ")
        key = self._other_keys.get(route, self._api_key)
        try:
            response = self._client.request(
                method,
                path,
                json=body,
                params=params,
                headers={"Authorization": f"Bearer {key}"} if key else None,
                timeout=httpx2.USE_CLIENT_DEFAULT if timeout is None else _limits(timeout),
            )
        except httpx2.TransportError as error:
            self.forget_routes()
            what = self._hidden(str(error)) or type(error).__name__
            hint = (
                _DISTRUSTED if "CERTIFICATE_VERIFY_FAILED" in what else "check that the server runs"
            )
            raise ServerUnreachableError(f"{self.url}: {route}: {what}: {hint}") from error
        is_page = "html" in response.headers.get("content-type", "")
        text = self._hidden(response.text)
        try:
            answer = json.loads(text)
        except json.JSONDecodeError:
            answer = None
        shown = response.reason_phrase if is_page else text[:_LONGEST_TEXT]
        status = response.status_code
        said = f"{self.url}: {route}: {status} {shown}"
        if status in _AWAY:
            self.forget_routes()
            raise ServerUnreachableError(said)
        if not response.is_success:  # redirections are not followed, so nothing was done
            hint = _WRONG_KEY if status == httpx2.codes.UNAUTHORIZED else ""
            raise ServerRefusedError(f"{said}{hint}", answer=answer, status=status)
        return json_object(answer)

    def _hidden(self, text: str) -> str:
        """A text without the keys, which some servers repeat in their errors."""
        for key in (self._api_key or "", *self._other_keys.values()):
            if len(key) >= _SECRET:
                text = text.replace(key, "***").replace(json.dumps(key)[1:-1], "***")
        return text

    def wait_until_up(
        self,
        timeout: float,
        told: Callable[[str], object],
        cancel: Callable[[], None] = lambda: None,
    ) -> None:
        """Wait until the server lists its routes, at most ``timeout`` seconds.

        ``told`` gets the reason after the first failed attempt, then every 30 s. ``cancel`` is
        called after each failed attempt. It raises an error to end the wait.
        """
        begun = next_word = time.monotonic()
        while True:
            left = begun + timeout - time.monotonic()
            try:
                # An attempt that hangs must not take much longer than the time that is left.
                self.read_routes(min(self._timeout, max(left, _CONNECT)))
            except ServerUnreachableError as error:
                now = time.monotonic()
                waited = now - begun
                if waited >= timeout:
                    raise ServerUnreachableError(
                        f"the server did not start to answer within {timeout:g} s: {error}. Read "
                        "its log, or increase start_timeout (syncd follow --start-timeout)"
                    ) from error
                if now >= next_word:
                    next_word = now + _WORD
                    told(f"waiting for {waited:.0f} s of at most {timeout:g} s: {error}")
                cancel()
                time.sleep(_POLL)
            else:
                return

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def read_routes(self, timeout: float | None = None) -> None:
        """Read the server's routes; raise ServerRefusedError if the server does not list them."""
        try:
            paths = self.ask("GET /openapi.json", timeout=timeout).get("paths")
        except ServerRefusedError as error:
            if error.status == httpx2.codes.UNAUTHORIZED:
                raise
            raise ServerRefusedError(f"{error}. {_UNLISTED}") from error
        if not isinstance(paths, dict):
            raise ServerRefusedError(f"{self.url}/openapi.json lists no paths. {_UNLISTED}")
        self._routes = frozenset(
            f"{method.upper()} {path}"
            for path, methods in paths.items()
            if isinstance(methods, dict)
            for method in methods
        )


def json_object(value: object) -> dict[str, Any]:
    """The value, if it is a JSON object; otherwise an empty dict."""
    return value if isinstance(value, dict) else {}


def place(url: str) -> tuple[str, int, str]:
    """Split a server's address into host, port and path. All spellings give equal results.

    All names of this host's loopback interface count as one host.
    """
    address = _address(url)
    host = address.host.rstrip(".")
    try:
        host = str(ipaddress.ip_address(host))
    except ValueError:
        pass  # a name
    return (
        "localhost" if host in _LOOPBACK else host,
        address.port or _PORTS[address.scheme],
        address.path.rstrip("/"),
    )


def _address(url: str) -> httpx2.URL:
    try:
        address = httpx2.URL(url)
    except httpx2.InvalidURL as error:
        raise InvalidSettingsError(f"{url} is not an address: {error}") from error
    if address.scheme not in _PORTS or not address.host:
        raise InvalidSettingsError(f"{url} is not an address: give http://HOST:PORT")
    if address.userinfo or address.query or address.fragment:
        # The address appears in logs, and in reports on shared storage, so it must hold no secret.
        raise InvalidSettingsError(
            f"the address of {address.host} has more parts than http://HOST:PORT/PATH. Pass an "
            "API key in SYNCD_API_KEY or as api_key, not in the address"
        )
    path = address.path.rstrip("/")
    # What OpenAI's clients take as the base URL begins one folder below the server's routes.
    return address.copy_with(path=path.removesuffix("/v1")) if path.endswith("/v1") else address


def _limits(timeout: float) -> httpx2.Timeout:
    return httpx2.Timeout(timeout, connect=min(timeout, _CONNECT))


def _checked(key: str) -> str:
    key = key.removesuffix("\n")  # files that hold a secret often end with one
    if not (key.isascii() and key.isprintable()):
        raise InvalidSettingsError(
            "an API key has a character that is not printable ASCII, such as a line break or an "
            "accent. Check SYNCD_API_KEY and SYNCD_ADMIN_API_KEY, or the arguments"
        )
    return key


def label_of(said: object) -> str:
    """The label in a server's answer; empty if the server has no labels."""
    return (said or "unlabelled") if isinstance(said, str) else ""
