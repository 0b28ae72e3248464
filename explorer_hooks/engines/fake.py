"""An engine without a model, for tests. It reads versions, records calls, and fails on demand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import xxhash

from explorer_hooks.engines.fitting import TensorSpec, check_kind, compare_tensors, tensor_specs
from explorer_hooks.reader import LeasedVersion
from syncd.protocol.errors import SyncdError, VerificationError

__all__ = ["Call", "FakeEngine", "Hang", "Served"]

_CALLS: Final = frozenset(
    {"attach", "check", "prepare", "pause", "load", "reset_cache", "resume", "close"}
)
_BUFFER: Final = 1024 * 1024


class Call(NamedTuple):
    """A call of the method ``what``; ``sequence`` is None if the method takes no version."""

    what: str
    sequence: int | None = None


class Served(NamedTuple):
    """The version that the engine serves.

    Attributes:
        sequence, step: the version's sequence and step.
        folder: the folder that the version was read from, perhaps a copy in a stage folder.
        digest: xxh3-128 of all bytes of the version's weight files, in the manifest's order.
    """

    sequence: int
    step: int
    folder: Path
    digest: str


class Hang:
    """Makes calls block until they are released.

    Attributes:
        reached: an event, set when a call has begun to block.
    """

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._free = threading.Event()

    def release(self) -> None:
        """Let the call, and all later calls, continue."""
        self._free.set()

    def wait(self) -> None:
        """Block until :meth:`release` is called."""
        self.reached.set()
        self._free.wait()


class FakeEngine:
    """Serves a digest of the version's weights instead of a model. Needs no torch and no server.

    Args:
        kinds, is_local: the values of the engine's properties.
        tensors: the tensors that the engine takes; by default those of the first loaded version.

    Attributes:
        calls: all calls in order, including calls that failed.
        served: the served version; None before the first version, and while the weights are lost.
        is_paused: whether the engine is paused now.
    """

    def __init__(
        self,
        *,
        kinds: frozenset[str] = frozenset({"full"}),
        is_local: bool = True,
        tensors: Mapping[str, TensorSpec] | None = None,
    ) -> None:
        self.kinds = kinds
        self.is_local = is_local
        self.calls: list[Call] = []
        self.served: Served | None = None
        self.is_paused = False
        self._tensors = tensors
        self._faults: list[_Fault] = []
        self._hangs: dict[str, Hang] = {}
        self._changed = threading.Condition()

    # -- for the test --------------------------------------------------------------------

    def fail(
        self,
        what: str,
        error: BaseException,
        *,
        times: int = 1,
        sequence: int | None = None,
        torn: bool = False,
    ) -> None:
        """Let the next ``times`` calls of the method ``what`` raise ``error``.

        With ``sequence``, only calls with this version fail. With ``torn``, a failing ``load``
        loses the served weights, as in a half-filled module.
        """
        _known(what)
        self._faults.append(_Fault(what, error, times, sequence, torn))

    @contextmanager
    def hanging(self, what: str) -> Iterator[Hang]:
        """In the ``with`` block, let calls of the method ``what`` hang until they are released."""
        _known(what)
        self._hangs[what] = hang = Hang()
        try:
            yield hang
        finally:
            del self._hangs[what]
            hang.release()

    def answer(self, timeout: float = 60.0) -> Served:
        """Serve one request; the request waits while the engine is paused.

        Raises:
            TimeoutError: the engine was still paused after ``timeout`` seconds.
            SyncdError: the engine has loaded no version yet, or its weights are lost.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self.is_paused, timeout):
                raise TimeoutError("the engine is paused")
            if self.served is None:
                raise SyncdError("the engine has no weights")
            return self.served

    def restart(self) -> None:
        """Lose all weights, like a server that was restarted."""
        with self._changed:
            self.served = None
            self.is_paused = False

    def asked(self, what: str) -> list[int | None]:
        """The sequence in each call of the method ``what``, in order."""
        return [call.sequence for call in self.calls if call.what == what]

    # -- the engine ------------------------------------------------------------------------------

    def attach(self) -> None:
        """Resume, because a killed hook may have left the engine paused."""
        self._enter("attach")
        self._set_paused(False)

    def check(self, version: LeasedVersion) -> None:
        """Compare the version with the tensors that the engine takes."""
        self._enter("check", version)
        check_kind(version, self.kinds)
        if self._tensors is not None:
            compare_tensors(version, tensor_specs(version.manifest), self._tensors, "this engine")

    def prepare(self, version: LeasedVersion) -> None:
        """Only record the call."""
        self._enter("prepare", version)

    def pause(self) -> None:
        """Make requests wait."""
        self._enter("pause")
        self._set_paused(True)

    def load(self, version: LeasedVersion) -> None:
        """Read all weights, and serve the version."""
        self._enter("load", version)
        served = Served(version.sequence, version.step, version.folder, content_of(version))
        with self._changed:
            self.served = served
        if self._tensors is None:
            self._tensors = tensor_specs(version.manifest)

    def reset_cache(self) -> None:
        """Only record the call."""
        self._enter("reset_cache")

    def resume(self) -> None:
        """Let requests continue."""
        self._enter("resume")
        self._set_paused(False)

    def still_serves(self, version: LeasedVersion) -> bool:
        """True if this version is served; False after :meth:`restart`."""
        return self.served is not None and self.served.sequence == version.sequence

    def close(self) -> None:
        """Only record the call."""
        self._enter("close")

    def _enter(self, what: str, version: LeasedVersion | None = None) -> None:
        sequence = version.sequence if version is not None else None
        self.calls.append(Call(what, sequence))
        hang = self._hangs.get(what)
        if hang is not None:
            hang.wait()
        for fault in self._faults:
            is_due = fault.times > 0 and fault.what == what
            if is_due and fault.sequence in {None, sequence}:
                fault.times -= 1
                if fault.torn:
                    with self._changed:
                        self.served = None
                raise fault.error

    def _set_paused(self, paused: bool) -> None:
        with self._changed:
            self.is_paused = paused
            self._changed.notify_all()


@dataclass
class _Fault:
    what: str
    error: BaseException
    times: int
    sequence: int | None
    torn: bool


def content_of(version: LeasedVersion, look: Callable[[], None] = lambda: None) -> str:
    """Compute the digest of a version's weight files. ``look`` is called before each read."""
    hasher = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_BUFFER))
    for file in version.open_weights():
        at = 0
        while at < file.size:
            look()
            part = buffer[: file.size - at]
            if file.storage.pread_fully(file.fd, part, at) < len(part):
                raise VerificationError(
                    f"{file.path} is shorter than its header says", sequence=version.sequence
                )
            hasher.update(part)
            at += len(part)
    return hasher.hexdigest()


def _known(what: str) -> None:
    if what not in _CALLS:
        raise ValueError(
            f"{what!r} is not a method of an engine; choose one of {', '.join(sorted(_CALLS))}"
        )
