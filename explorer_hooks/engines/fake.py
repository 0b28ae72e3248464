"""An engine without a model, for tests. It reads versions, records calls, and fails on demand."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import xxhash

from explorer_hooks.engines.fitting import TensorSpec, check_kind, compare_tensors, tensor_specs
from explorer_hooks.reader import LeasedVersion
from syncd.checkpoint.whole_files import digest_file
from syncd.protocol.errors import SyncdError

__all__ = ["Call", "FakeEngine", "Hang", "Served"]


class Call(NamedTuple):
    """A call of the method ``what``; ``sequence`` is None if the method takes no version."""

    what: str
    sequence: int | None = None


class Served(NamedTuple):
    """The version that the engine serves.

    Attributes:
        sequence, step: the version's sequence and step.
        folder: the folder that the version was read from, perhaps a copy in a stage folder.
        digest: xxh3-128 of the digests of the version's weight files, in the manifest's order.
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

    After the first load, :meth:`check` refuses versions with other tensors.

    Args:
        kinds, is_local: the values of the engine's properties.

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
    ) -> None:
        self.kinds = kinds
        self.is_local = is_local
        self.calls: list[Call] = []
        self.served: Served | None = None
        self.is_paused = False
        self._tensors: Mapping[str, TensorSpec] | None = None
        self._faults: list[_Fault] = []
        self._hangs: dict[str, Hang] = {}

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
        getattr(self, what)  # raises an error if there is no such method
        self._faults += times * [_Fault(what, error, sequence, torn)]

    @contextmanager
    def hanging(self, what: str) -> Iterator[Hang]:
        """In the ``with`` block, let calls of the method ``what`` hang until they are released."""
        getattr(self, what)  # likewise
        self._hangs[what] = hang = Hang()
        try:
            yield hang
        finally:
            del self._hangs[what]
            hang.release()

    def answer(self) -> Served:
        """Serve one request.

        Raises:
            SyncdError: the engine is paused, has loaded no version yet, or has lost its weights.
        """
        if self.is_paused or self.served is None:
            raise SyncdError(f"the engine {'is paused' if self.is_paused else 'has no weights'}")
        return self.served

    def restart(self) -> None:
        """Lose all weights, like a server that was restarted."""
        self.served = None
        self.is_paused = False

    def asked(self, what: str) -> list[int | None]:
        """The sequence in each call of the method ``what``, in order."""
        return [call.sequence for call in self.calls if call.what == what]

    # -- the engine ------------------------------------------------------------------------------

    def attach(self) -> None:
        """Resume, because a killed hook may have left the engine paused."""
        self._enter("attach")
        self.is_paused = False

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
        """Make requests fail."""
        self._enter("pause")
        self.is_paused = True

    def load(self, version: LeasedVersion) -> None:
        """Read all weights, and serve the version."""
        self._enter("load", version)
        self.served = Served(version.sequence, version.step, version.folder, content_of(version))
        if self._tensors is None:
            self._tensors = tensor_specs(version.manifest)

    def reset_cache(self) -> None:
        """Only record the call."""
        self._enter("reset_cache")

    def resume(self) -> None:
        """Serve requests again."""
        self._enter("resume")
        self.is_paused = False

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
            if fault.what == what and fault.sequence in {None, sequence}:
                self._faults.remove(fault)
                if fault.torn:
                    self.served = None
                raise fault.error


class _Fault(NamedTuple):
    what: str
    error: BaseException
    sequence: int | None
    torn: bool


def content_of(version: LeasedVersion) -> str:
    """Compute the digest of a version's weight files."""
    hasher = xxhash.xxh3_128()
    for file in version.open_weights():
        whole, _ = digest_file(file.storage, file, cancel=lambda: None)
        hasher.update(str(whole.digest).encode())
    return hasher.hexdigest()
