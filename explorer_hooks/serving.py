"""What an engine serves now, who waits for it, and what is said of it."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from explorer_hooks.fast_path import FastPath
from explorer_hooks.reader import LeasedVersion
from explorer_hooks.staging import Staging
from syncd.coordination.explorer import ExplorerSynchronizer
from syncd.protocol.errors import InvalidSettingsError
from syncd.protocol.policy import Version
from syncd.protocol.records import SaveId
from syncd.protocol.reports import Reload

log = logging.getLogger(__name__)

#: Seconds between two looks of who waits for what is served, at most.
_LOOK: Final = 0.1


class Serving:
    """What an engine serves. Any thread may look at it; a pipeline changes it.

    Args:
        sync: this explorer, registered: it holds versions, and reports.
        staging: where copies on this host are; None where there are none.
        fast_path: how the engine takes broadcasts; None where it takes none.

    Attributes:
        held: the version that the engine serves, held; None before the first. Where the engine has
            newer weights by a broadcast, the newest version before them, or of them.
        last: how it came to what it serves.
    """

    def __init__(
        self, sync: ExplorerSynchronizer, staging: Staging | None, fast_path: FastPath | None
    ) -> None:
        self._sync = sync
        self._staging = staging
        self._fast_path = fast_path
        self.held: LeasedVersion | None = None
        self.last: Reload | None = None
        self._received: SaveId | None = None
        self._broken: str | None = None
        self._abandoned: str | None = None
        self._refused: tuple[Version, str] | None = None
        self._leaving: list[LeasedVersion] = []
        self._changed = threading.Condition()
        #: Had while versions are let go. Not the other one: storage may take for ever.
        self._letting_go = threading.RLock()

    @property
    def version(self) -> Version | None:
        """What the engine serves."""
        with self._changed:
            held, received = self.held, self._received
        if held is None:
            return None
        return Version(held.sequence, received.step if received else held.step)

    @property
    def fault(self) -> str | None:
        """Why the explorer cannot be relied on; None while all is well."""
        return self._broken or self._abandoned

    @property
    def is_broken(self) -> bool:
        """Whether what the engine serves is not known."""
        return self._broken is not None

    @property
    def floor(self) -> Version | None:
        """What is served, or the newer one that was refused: what comes next is above it."""
        served = self.version
        if self._refused is None or (served and served.sequence > self._refused[0].sequence):
            return served
        return self._refused[0]

    @property
    def joins(self) -> bool:
        """Whether it takes part in broadcasts now.

        Not before the first version: where a broadcast leaves an engine broken, that is what it is
        given back.
        """
        fast_path = self._fast_path
        return fast_path is not None and fast_path.fits and bool(self.held) and not self.is_broken

    @contextmanager
    def hold_again(self) -> Iterator[LeasedVersion]:
        """What is served now, held once more, whatever is served after.

        Raises:
            InvalidSettingsError: nothing is served yet.
        """
        with self._changed:  # while it cannot be let go
            held = self.held
            if held is None:
                raise InvalidSettingsError(f"{self._sync.name} serves nothing yet: pull() first")
            if self._staging is not None and held.source != held.folder:
                again = self._staging.hold_again(held)
            else:
                again = self._sync.hold(Version(held.sequence, held.step))
        try:
            yield again
        finally:
            self._let_go(again)

    def wait(
        self, until: Callable[[Version | None], bool], timeout: float | None
    ) -> Version | None:
        """Wait until what is served is enough, or the time is up; returns what is served then.

        What ``until`` looks at besides is looked at ten times a second: a signal handler may change
        it between a look and a wait of the same thread, and must take no lock to say so.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not until(self.version) and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(min(left, _LOOK))
            return self.version

    def follows(self) -> None:
        """Something follows the job in the background from now on."""
        if self._abandoned is not None:
            self._abandoned = None
            self.report()

    def follows_no_more(self, why: str) -> None:
        """What followed the job has died."""
        with self._changed:
            self._abandoned = why
            self._changed.notify_all()
        self.report()

    def report(self) -> None:
        """Say what this explorer does; an engine goes on serving where that cannot be said.

        Raises:
            NameTakenError: another explorer took the name while this one counted as dead.
        """
        try:
            self._sync.report(
                self.version,
                refused=self._refused[1] if self._refused else None,
                reload=self.last,
                fault=self.fault,
                received=str(self._received) if self._received else None,
                workers=self._fast_path.workers if self._fast_path and self.joins else 0,
                group=self._fast_path.group if self._fast_path else None,
            )
        except OSError as error:
            log.warning("%s cannot report: %s", self._sync.name, error)

    def close(self) -> None:
        """Let go of what is held."""
        with self._changed:
            held, self.held = self.held, None
        if held is not None:
            self._let_go(held)
        if self._staging is not None:
            self._staging.tidy()

    def _let_go(self, *versions: LeasedVersion) -> None:
        """Release versions, and those that storage did not let go of before."""
        with self._letting_go:
            self._leaving.extend(versions)
            try:
                while self._leaving:
                    self._leaving[-1].release()
                    self._leaving.pop()
            except OSError as error:
                log.warning("a lease stays until the next pull: %s", error)
