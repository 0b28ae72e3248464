"""The base class of engines for servers."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

from explorer_hooks.engines.fitting import check_kind
from explorer_hooks.engines.http_server import HttpServer, ServerAccess, ServerTimeouts
from explorer_hooks.reader import LeasedVersion
from explorer_hooks.server_fit import Fits, check_names
from syncd.protocol.errors import (
    EngineBrokenError,
    InvalidSettingsError,
    ServerError,
    ServerRefusedError,
    ServerUnreachableError,
    SyncdError,
    VerificationError,
)

if TYPE_CHECKING:
    import httpx2

log = logging.getLogger(__name__)

T = TypeVar("T")

LABEL: Final = "POST /update_weight_version"
#: The beginning of a label during a load. If a server keeps such a label, a hook was killed, and
#: the weights are unknown.
LOADING: Final = "syncd-loading"
#: The beginning of the label of a loaded version.
_STEP: Final = "step-"
#: The label after a refused load, if the server had no usable label before.
_GIVEN_BACK: Final = "given-back"


class ServerEngine(ABC):
    """Loads versions into a server, from folders that the server can read.

    Promised:

    - A version that does not fit the server's model is never loaded, except if ``base`` is unknown.
    - A version counts as served only after the server has generated one token.
    - The server stays paused while its weights are unknown, or its caches hold results of old
      weights.
    - If the server refuses a load, the previous version is loaded again.

    Not promised: that a server whose hook was killed serves before another hook runs, or that
    nothing else changes the server's weights. syncd notices a second hook only while or after the
    second hook loads a version.

    The server shows the :func:`label` of the loaded version beside generated text. If the server
    does not answer a request, ServerUnreachableError is raised. If this happens in :meth:`load`,
    the server's weights are unknown.

    Args:
        url: the address of one server, not of a load balancer.
        mode: how to treat running requests; the first of :attr:`modes` by default.
        base: the model folder that the server was started with, if the folder that the server names
            is not on this host. Without either folder, the first version is loaded unchecked.
        is_local: whether the server reads files on this host only; by default True if ``url`` is a
            loopback address. False switches staging off: use it for a server on several hosts.
        access: the server's keys, and whom to trust.
        lora_name: the model name under which the server serves adapters.
        timeouts: how long to wait for the server.
        cancel: called every half second while the server is not up yet. If it raises an error, the
            wait ends.
        transport: replaces the HTTP transport in tests.

    Attributes:
        modes: the possible ways to treat running requests.

    Raises:
        InvalidSettingsError: ``url``, ``mode`` or ``base`` is wrong.
    """

    modes: ClassVar[tuple[str, ...]]
    #: The routes that need the admin key, if the server has one.
    _admin: ClassVar[tuple[str, ...]] = ()
    #: The route that reports the label, and what else a request to set the label has.
    _info: str
    _label_options: ClassVar[dict[str, object]] = {}
    hub_names = True
    _torn: str | None = None
    _model_is_torn = False
    _uncached: str | None = None
    _others: tuple[str, float] | None = None
    _has_adapters = False
    _received: str | None = None
    _proof: Callable[[], None] | None = None

    def __init__(
        self,
        url: str,
        *,
        mode: str | None = None,
        base: str | Path | None = None,
        is_local: bool | None = None,
        access: ServerAccess | None = None,
        lora_name: str = "syncd",
        timeouts: ServerTimeouts | None = None,
        cancel: Callable[[], None] = lambda: None,
        transport: httpx2.BaseTransport | None = None,
    ) -> None:
        if mode not in {None, *self.modes}:
            raise InvalidSettingsError(
                f"unknown mode {mode!r}: choose one of {', '.join(self.modes)}"
            )
        self._mode = mode or self.modes[0]
        self._server = HttpServer(url, access, timeouts, admin=self._admin, transport=transport)
        self._load_timeout = self._server.timeouts.load
        self._whose = f"the server at {self._server.url}"
        self._fits = Fits(base, casts=True, whose=self._whose)
        self._is_local = self._server.is_here if is_local is None else is_local
        self._lora_name = lora_name
        self._cancel = cancel
        self._kinds = frozenset({"full", "adapter"})
        self._loaded: dict[str, str | LeasedVersion] = {}
        self._told_waiting: Callable[[str], object] = lambda _: None

    # -- the engine's protocol ---------------------------------------------------------------------

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds that the server can load; before :meth:`attach`, all possible kinds."""
        return self._kinds

    @property
    def is_local(self) -> bool:
        """True if the server reads files on this host only."""
        return self._is_local

    def on_waiting(self, told: Callable[[str], object]) -> None:
        """Make :meth:`attach` call ``told`` with the reason when a wait begins, and every 30 s."""
        self._told_waiting = told

    def attach(self) -> None:
        """Wait until the server is up, find out its features, and resume a paused server.

        If a hook was killed during a load, the server stays paused until a version is loaded.

        Raises:
            ServerUnreachableError: the server did not come up in time.
            InvalidSettingsError: the server lacks a route that is needed.
            ServerRefusedError: syncd cannot understand an answer of the server.
        """
        waits = f"waiting up to {self._server.timeouts.start:g} s for {self._whose} to answer"
        self._told_waiting(waits)
        log.info("%s", waits)
        self._server.wait_until_up(self._say_waiting, self._cancel)
        self._kinds = frozenset({"full", "adapter"} if self._takes_adapters() else {"full"})
        named = self._read_model()
        if not self._fits.is_known:
            log.warning(
                "%s reports no model folder of this host, so the first version is not checked. To "
                "check it, set base (--base) to the folder that the server was started with",
                self._whose,
            )
        said = self._said_label()
        if said.startswith(LOADING):
            self._was_left(said)
            self._pause()
            return
        if named is not None and self._serves_what_it_names(said):
            self._loaded = {"full": named}
        if not self._can_label() and self._may_be_paused():
            self._torn = "a load was perhaps interrupted, which this server cannot report"
            self._model_is_torn = True
            log.warning("not resuming %s until the next load: %s", self._whose, self._torn)
        else:
            self._resume()

    def check(self, version: LeasedVersion) -> None:
        """Compare a full model with the base model, or else with the first full model loaded."""
        check_kind(version, self._kinds)
        if not self._takes_names_of(version):
            check_names(version, self._whose)
        self._fits.check(version)

    def prepare(self, version: LeasedVersion) -> None:
        """Check the server again, because another server may have replaced it.

        EngineBrokenError if another hook is loading into the server.
        """
        self._server.forget_routes()
        self._takes_adapters()
        said = self._must(self._said_label)
        is_ours = (self._torn or self._uncached) is not None
        if said.startswith(LOADING) and not is_ours:
            self._check_left(said)
        else:
            self._others = None
        self._has_adapters |= version.kind == "adapter" or self._serves_adapter()

    def pause(self) -> None:
        """Hold, finish or abort running requests, depending on the mode.

        Raises:
            ServerBusyError: the server cannot be paused with empty caches now. Try again.
            EngineBrokenError: the server refuses to pause.
        """
        self._must(self._pause)

    def load(self, version: LeasedVersion) -> None:
        """Let the server load the version's folder. If it refuses, let it load the previous folder.

        The load counts as finished only after :meth:`reset_cache`.

        Raises:
            ServerRefusedError: the server refused the load. It has its previous version again, or
                else :meth:`resume` raises EngineBrokenError.
            EngineBrokenError: the server failed, and the version is not the cause.
        """
        before = self._must(self._said_label)
        if before.startswith(LOADING):
            before = ""
        if before:
            self._model_is_torn = False  # the server was restarted since
            if not before.startswith((_STEP, _GIVEN_BACK)):
                self._torn = self._uncached = self._proof = None
                named = self._must(self._read_model)
                self._loaded = {} if named is None else {"full": named}
                self.check(version)  # it may have another model now
        torn = self._torn
        if version.kind == "adapter" and self._model_is_torn:
            raise EngineBrokenError(
                f"cannot load an adapter into {self._whose}: {torn}. Load a full model first"
            )
        self._torn = f"it has not loaded v{version.sequence}"
        loading = f"{LOADING}-{version.kind}"
        self._must(lambda: self._set_label(f"{loading}-{label(version)}"))
        self._model_is_torn |= version.kind == "full"
        # The caches still hold results of old weights, so the server must not serve yet.
        name = f"{loading}-taken-{label(version)}" if self._can_label() else label(version)
        try:
            self._load_folder(version.kind, str(version.folder), name)
            self._loaded_well(version)
        except ServerRefusedError as error:
            name = f"{loading}-{_GIVEN_BACK}" if self._uncached else before or _GIVEN_BACK
            if self._give_back(version, name, error):
                if version.kind == "full":
                    self._must(self._reset_cache)  # a hook without a previous version does not
                self._set_label(name)
                self._torn = torn if version.kind == "adapter" else None
                self._model_is_torn &= version.kind == "adapter"
            raise
        self._has_loaded(version.kind, label(version))
        self._received = None
        if version.kind == "full":
            self._loaded = {}  # adapters of the previous model do not fit this one
            self._fits.learn(version.manifest)
        self._loaded[version.kind] = version

    def reset_cache(self) -> None:
        """Empty all of the server's caches of results; EngineBrokenError if it refuses to."""
        self._must(self._reset_cache)
        if (name := self._uncached) is not None:
            self._must(lambda: self._set_label(name))
            self._uncached = None

    def resume(self) -> None:
        """Serve again. After a load, also generate a token.

        Raises:
            EngineBrokenError: the server generates no token. Or the server stays paused, because
                its weights are unknown or its caches hold results of old weights.
        """
        if self._torn is not None:
            raise EngineBrokenError(f"{self._whose} stays paused: {self._torn}")
        if self._uncached is not None:
            raise EngineBrokenError(
                f"{self._whose} stays paused: it has loaded {self._uncached}, but its caches hold "
                "results of the previous weights"
            )
        self._must(self._resume)
        if self._proof is not None:
            self._must(self._proof)
            self._proof = None

    def still_serves(self, version: LeasedVersion) -> bool:
        """True if the server reports this version, weights of a later broadcast, or no label.

        False if its workers do not answer.
        """
        if self._torn is not None or self._uncached is not None:
            return False
        try:
            reported = self._said_label()
            self._ask_workers()
        except (ServerRefusedError, OSError) as error:
            log.warning("%s does not report the version that it serves: %s", self._whose, error)
            return False
        given = self._received or label(version)
        if reported != given and reported.startswith((_STEP, LOADING)):
            log.warning(
                "%s has %s, but this hook loaded %s. Use only one hook for each server",
                self._whose,
                reported,
                given,
            )
        return reported in {"", given}

    def is_loaded(self) -> bool:
        """True if the server answers, and has a label of syncd, or no labels. Needs no attach."""
        try:
            self._takes_adapters()
            said = self._said_label()
        except SyncdError:
            return False
        return not said or said.startswith((_STEP, LOADING))

    def is_away(self) -> bool:
        """True if the server does not answer."""
        try:
            self._server.read_routes()
        except ServerError as error:  # an error that it answers is reported by the next pull
            return isinstance(error, ServerUnreachableError)
        return False

    def close(self) -> None:
        """Close the connections; the server keeps running."""
        self._server.close()

    def _ask(self, route: str, body: object = None, **params: str) -> dict[str, Any]:
        """Send a request that can take as long as a load."""
        return self._server.ask(route, body, params=params, timeout=self._load_timeout)

    def _read_model(self) -> str | None:
        """Read the model folder that the server names, if it is on this host; return its path."""
        if (named := self._named_folder()) is not None:
            self._fits.read_if_here(named)
        return named

    # -- the calls that differ between kinds of servers --------------------------------------------

    @abstractmethod
    def _takes_names_of(self, version: LeasedVersion) -> bool:
        """True if the server finds tensors by their names in the version."""

    @abstractmethod
    def _takes_adapters(self) -> bool:
        """True if the server can load adapters, too; raise an error if it lacks a route."""

    @abstractmethod
    def _named_folder(self) -> str | None:
        """The model folder that the server reports. It has the served tensors' names and shapes."""

    @abstractmethod
    def _serves_what_it_names(self, said: str) -> bool:
        """True if the label ``said`` shows that the server serves :meth:`_named_folder`."""

    @abstractmethod
    def _said_label(self) -> str:
        """The label of the server's weights; empty if they have none."""

    def _ask_workers(self) -> None:  # noqa: B027 # not every server can ask them
        """Wait for an answer of the server's workers."""

    def _can_label(self) -> bool:
        return self._server.has(self._info) and self._server.has(LABEL)

    def _set_label(self, text: str) -> None:
        if self._can_label():
            self._server.ask(LABEL, {"new_version": text, **self._label_options})

    @abstractmethod
    def _may_be_paused(self) -> bool:
        """True if the server is perhaps paused. Only called for a server without labels."""

    @abstractmethod
    def _serves_adapter(self) -> bool:
        """True if running requests can use an adapter from syncd."""

    @abstractmethod
    def _pause(self) -> None:
        """Hold, finish or abort running requests, by the mode, and let new requests wait."""

    @abstractmethod
    def _resume(self) -> None:
        """Serve again. Must work if the server is not paused."""

    @abstractmethod
    def _reset_cache(self) -> None:
        """Empty all caches of results of the weights, also the encoder's."""

    @abstractmethod
    def _load_folder(self, kind: str, folder: str, name: str) -> None:
        """Load an adapter, or a full model and unload the adapter; some servers set the label."""

    def _loaded_well(self, version: LeasedVersion) -> None:  # noqa: B027 # not every server can check
        """Check the loaded weights during the pause."""

    @abstractmethod
    def _prove(self, kind: str, name: str) -> None:
        """Generate one token. If the server reports the label of its weights, check the label."""

    def _say_waiting(self, why: str) -> None:
        self._told_waiting(why)
        log.warning("%s", why)

    def _check_left(self, reported: str) -> None:
        """Raise EngineBrokenError in the first ``timeouts.load`` seconds of another hook's load."""
        now = time.monotonic()
        if self._others is None or self._others[0] != reported:
            self._others = reported, now
        if now < self._others[1] + self._load_timeout:
            raise EngineBrokenError(
                f"{self._whose} is in the middle of a load by another hook ({reported}). Stop that "
                f"hook. After {self._load_timeout:g} s this hook loads its own version"
            )
        self._was_left(reported)

    def _was_left(self, reported: str) -> None:
        """Treat the server as if its hook had been killed during a load."""
        self._torn = f"its hook was stopped in the middle of a load ({reported})"
        self._model_is_torn = not reported.startswith(f"{LOADING}-adapter")
        log.warning("%s stays paused until the next load: %s", self._whose, self._torn)

    @contextmanager
    def _receiving(self, name: str) -> Iterator[None]:
        """In the block the server loads a full model that its workers have received.

        After a failure it stays paused until a load (EngineBrokenError): the weights are unknown,
        and the folder of the old weights may be deleted.
        """
        self._torn = f"it has not loaded {name}"
        self._model_is_torn = True
        self._loaded, self._received = {}, None
        try:
            self._set_label(f"{LOADING}-full-{name}")
            yield
        except ServerError as error:
            raise EngineBrokenError(f"{self._whose} did not load {name}: {error}") from error
        self._has_loaded("full", name)
        self._received = name

    def _has_loaded(self, kind: str, name: str) -> None:
        self._torn = None
        self._model_is_torn = False
        self._uncached = name
        self._proof = lambda: self._prove(kind, name)

    def _give_back(self, version: LeasedVersion, name: str, error: ServerRefusedError) -> bool:
        """Load the old weights again after a refused load; return True if the server has them."""
        before = self._loaded.get(version.kind)
        if before is None:
            # Without a previous adapter nothing was lost. A model's weights are unknown.
            return version.kind == "adapter"
        folder = before if isinstance(before, str) else str(before.folder)
        log.warning(
            "%s refused a load, so the previous weights in %s are loaded again: %s",
            self._whose,
            folder,
            error,
        )
        try:
            if isinstance(before, LeasedVersion):
                before.verify()  # its files may have been damaged since they were loaded
            self._load_folder(version.kind, folder, name)
        except (ServerRefusedError, VerificationError, OSError) as again:
            self._torn = f"it failed to load v{version.sequence}, and then {folder}: {again}"
            return False
        return True

    def _must(self, call: Callable[[], T]) -> T:
        """Make a call that does not depend on a version, so a refusal raises EngineBrokenError."""
        try:
            return call()
        except ServerRefusedError as error:
            raise EngineBrokenError(
                f"{self._whose} refused a request that should succeed: {error}"
            ) from error


def label(version: LeasedVersion) -> str:
    """The label of a version in a server, for example ``step-3-version-17``."""
    return f"{_STEP}{version.step}-version-{version.sequence}"
