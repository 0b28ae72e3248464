"""An HTTP client for an inference server."""

from __future__ import annotations

import ipaddress
import json
import re
import ssl
import time
from base64 import b64encode
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import httpx2

from syncd.checkpoint.safetensors_header import without_duplicates
from syncd.checkpoint.tensor_rules import shown
from syncd.protocol.errors import (
    InvalidSettingsError,
    ServerRefusedError,
    ServerUnreachableError,
)
from syncd.protocol.policy import given_or_default

#: The statuses of a proxy's answers while the server behind the proxy is away or starts.
_AWAY: Final = frozenset({502, 503, 504})
#: The schemes that are supported, with their default ports.
_PORTS: Final = {"http": 80, "https": 443}
#: The names of this host in a server's address. They count as one host.
_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1", "0.0.0.0", "::"})  # noqa: S104 # compared only
_LONGEST_TEXT: Final = 500
#: The most bytes of an answer. The longest real ones are API descriptions, of less than 1 MiB.
_LONGEST_ANSWER: Final = 16 << 20
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
_UNEXPECTED: Final = "Check that the address is the server's own, and read the server's log"
#: The most seconds to connect. Short, because a host that is down may not refuse connections.
_CONNECT: Final = 3.0


@dataclass(frozen=True, repr=False)  # no key may get into a message
class ServerAccess:
    """The keys of a server, and whom to trust.

    Attributes:
        api_key: the key that the server was started with.
        admin_api_key: the ``--admin-api-key`` of an SGLang server, if any. A server with this key
            accepts only this key for its weight routes.
        cacert: a file of PEM certificates to trust instead of the host's, for ``https``.
    """

    api_key: str | None = None
    admin_api_key: str | None = None
    cacert: str | Path | None = None


@dataclass(frozen=True)
class ServerTimeouts:
    """How long to wait for a server, in seconds.

    Attributes:
        request: for the answer to a short request.
        load: for each pause, each load, and each token after a load.
        start: at the beginning, for a server that is not up yet.
    """

    request: float = 30.0
    load: float = 1800.0
    start: float = 600.0


class HttpServer:
    """Sends requests to one server.

    A route is written as ``METHOD /path``. The routes are read from the server's ``/openapi.json``,
    because they depend on the server's release and options.

    Args:
        url, access, timeouts: see :class:`~explorer_hooks.engines.server_engine.ServerEngine`.
        admin: the routes that need the admin key, if the server has one.
    """

    def __init__(
        self,
        url: str,
        access: ServerAccess | None = None,
        timeouts: ServerTimeouts | None = None,
        *,
        admin: Collection[str] = (),
        transport: httpx2.BaseTransport | None = None,
    ) -> None:
        self.url = _address(url)
        access = given_or_default("access", ServerAccess, access)
        cacert, self._key = access.cacert, _checked(access.api_key)
        self._admin, self._admin_key = admin, _checked(access.admin_api_key) or self._key
        self.timeouts = given_or_default("timeouts", ServerTimeouts, timeouts)
        try:
            trusted = True if cacert is None else ssl.create_default_context(cafile=cacert)
        except OSError as error:  # an SSLError is one
            raise InvalidSettingsError(
                f"{cacert} contains no certificate in PEM format: {error}"
            ) from error
        keys = sorted({self._key, self._admin_key}, key=len, reverse=True)
        patterns = [_spellings(key) for key in keys if len(key) >= _SECRET]
        self._secrets = re.compile("|".join(patterns) or "(?!)")  # which is nowhere
        # No client, because it would log each answer's reason phrase, which may contain a key.
        self._transport = transport or httpx2.HTTPTransport(
            verify=trusted,
            # A server closes the connection after an error, so each request has its own connection.
            limits=httpx2.Limits(max_keepalive_connections=0),
            trust_env=False,  # else the environment's certificates would be trusted
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

        An answer to GET must be an object. What is declared as JSON must be JSON: in UTF-8, with
        finite numbers, and with no key twice. Answers and errors have ``***`` in place of API keys.

        ``timeout`` (in seconds) limits each read and each write, and the whole body. The limit to
        connect is at most 3 s.

        Raises:
            ServerUnreachableError: there is no server, or no answer came in time. The server may
                still have carried out the request, or may do so later.
            ServerRefusedError: the answer is an error, or not the JSON that it must be.
        """
        method, _, path = route.partition(" ")
        key = self._admin_key if route in self._admin else self._key
        limit = self.timeouts.request if timeout is None else timeout
        request = httpx2.Request(
            method,
            f"{self.url}".rstrip("/") + path,
            json=body,
            params=params,
            headers={"Accept-Encoding": "identity"}
            | ({"Authorization": f"Bearer {key}"} if key else {}),
            extensions={"timeout": httpx2.Timeout(limit, connect=min(limit, _CONNECT)).as_dict()},
        )
        try:
            with closing(self._transport.handle_request(request)) as response:
                return self._object(route, response, self._hidden(_read(response, limit)))
        except httpx2.TransportError as error:
            reason = shown(self._hidden(str(error)), _LONGEST_TEXT) or type(error).__name__
        # Raised outside of the block, because the transport's error can contain a key.
        self.forget_routes()
        distrusted = "CERTIFICATE_VERIFY_FAILED" in reason
        hint = _DISTRUSTED if distrusted else "check that the server runs"
        raise ServerUnreachableError(f"{self.url}: {route}: {reason}: {hint}")

    def _object(self, route: str, response: httpx2.Response, text: str) -> dict[str, Any]:
        answer, wrong = None, ""
        try:
            answer = json.loads(text, object_pairs_hook=without_duplicates)
            json.dumps(answer, ensure_ascii=False, allow_nan=False).encode()  # no lone surrogate
        except (ValueError, RecursionError) as error:
            answer, wrong = None, f": {error}" if text else ""
        kind = response.headers.get("content-type", "")
        if "html" in kind or not text:
            text = self._hidden(response.reason_phrase)
        status = response.status_code
        message = f"{self.url}: {route}: {status} {shown(text, _LONGEST_TEXT)}"
        if status in _AWAY:
            self.forget_routes()
            raise ServerUnreachableError(message)
        if not response.is_success:  # redirections are not followed, so nothing was done
            hint = _WRONG_KEY if status == httpx2.codes.UNAUTHORIZED else ""
            raise ServerRefusedError(f"{message}{hint}", status=status)
        if (wrong and "json" in kind) or (route.startswith("GET") and not isinstance(answer, dict)):
            raise ServerRefusedError(f"{message}: this is not a JSON object{wrong}. {_UNEXPECTED}")
        return json_object(answer)

    def _hidden(self, text: str) -> str:
        """A text without the keys, which some servers repeat in their errors."""
        return self._secrets.sub("***", text)

    def wait_until_up(
        self, told: Callable[[str], object], cancel: Callable[[], None] = lambda: None
    ) -> None:
        """Wait until the server lists its routes, at most ``timeouts.start`` seconds.

        ``told`` gets the reason after the first failed attempt, then every 30 s. ``cancel`` is
        called after each failed attempt. It raises an error to end the wait.
        """
        timeout = self.timeouts.start
        begun = next_word = time.monotonic()
        while True:
            left = begun + timeout - time.monotonic()
            try:
                # An attempt that hangs must not take much longer than the time that is left.
                self.read_routes(min(self.timeouts.request, max(left, _CONNECT)))
            except ServerUnreachableError as error:
                now = time.monotonic()
                waited = now - begun
                if waited >= timeout:
                    raise ServerUnreachableError(
                        f"the server did not start to answer within {timeout:g} s: {error}. Read "
                        "its log, or increase ServerTimeouts.start (syncd follow --start-timeout)"
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
        self._transport.close()

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
    # The address appears in logs, and in reports on shared storage, so it must hold no secret.
    named = "the given URL" if set("@?#") & set(url) else shown(url)
    try:
        address = httpx2.URL(url)
    except httpx2.InvalidURL:
        address = httpx2.URL("")
    if address.scheme not in _PORTS or not address.host:
        raise InvalidSettingsError(f"{named} is not an address: give http://HOST:PORT")
    if address.userinfo or address.query or address.fragment:
        raise InvalidSettingsError(
            f"the address of {address.host} has more parts than http://HOST:PORT/PATH. Pass an "
            "API key in SYNCD_API_KEY or in ServerAccess, not in the address"
        )
    path = address.path.rstrip("/")
    # What OpenAI's clients take as the base URL begins one folder below the server's routes.
    return address.copy_with(path=path.removesuffix("/v1")) if path.endswith("/v1") else address


def _read(response: httpx2.Response, limit: float) -> str:
    # Unpacks nothing, because the request asks for the body as it is.
    content = bytearray()
    end = time.monotonic() + limit
    for part in cast("Iterable[bytes]", response.stream):
        content += part
        if len(content) > _LONGEST_ANSWER:
            raise httpx2.RemoteProtocolError(
                f"the answer is longer than {_LONGEST_ANSWER >> 20} MiB"
            )
        if time.monotonic() > end:
            raise httpx2.ReadTimeout(f"the answer did not end within {limit:g} s")
    return content.decode(errors="surrogateescape")


def _spellings(key: str) -> str:
    """A pattern for a key as it is, as JSON or a URL escape it, and in base64."""
    patterns = [
        "".join(
            rf"\\{{0,4}}(?:{re.escape(letter)}|(?i:%(?:25)?{ord(letter):02x}|u00{ord(letter):02x}))"
            for letter in key
        )
    ]
    for before, start in ((0, 0), (1, 2), (2, 3)):  # the place in a group of three bytes
        coded = b64encode(b" " * before + key.encode()).decode()
        whole = coded[start : (before + len(key)) * 8 // 6]
        patterns.append(whole.replace("+", "[+-]").replace("/", "[/_]"))
    return "|".join(patterns)


def _checked(key: str | None) -> str:
    key = (key or "").removesuffix("\n")  # files that hold a secret often end with one
    if not (key.isascii() and key.isprintable()):
        raise InvalidSettingsError(
            "an API key has a character that is not printable ASCII, such as a line break or an "
            "accent. Check SYNCD_API_KEY and SYNCD_ADMIN_API_KEY, or the arguments"
        )
    return key


def objects(value: object) -> list[dict[str, Any]]:
    """The JSON objects in a list; empty if the value is no list."""
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def check_label(said: object, name: str) -> None:
    """Refuse generated text whose label, if any, is not ``name``."""
    if said not in (None, name):
        raise ServerRefusedError(
            f"the server generates with the weights {shown(str(said))} instead of {name}"
        )


def label_of(said: object) -> str:
    """The label in a server's answer; empty if the server has no labels."""
    return (shown(said) or "unlabelled") if isinstance(said, str) else ""
