"""Make a delta: a child process compares two versions. Fold links: a child does all of it."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import xxhash

from syncd.checkpoint.merging.options import Work
from syncd.checkpoint.sandbox.child_process import SAME_MODULES, ChildProcess, EndedError, described
from syncd.checkpoint.tensor_rules import ITEMSIZE, shown
from syncd.checkpoint.version import read_manifest
from syncd.closing import Closing
from syncd.deltas.delta_folder import BLOCKS, ENTRY, INDEX
from syncd.deltas.delta_wire import CHANGED, DIFFERS, DONE, MESSAGE, PLAN, REFUSED, TENSOR
from syncd.deltas.ends import NoDeltaError, delta_end, elements_of, in_order, why_no_delta
from syncd.deltas.whole_version import Places, WholeVersion, open_weights
from syncd.protocol.names import DELTA
from syncd.protocol.records import Delta, Manifest, VersionFile, encode
from syncd.storage.fsio import Storage, named
from syncd.storage.job import Job

#: Seconds to wait for one block; long, because the machine or the storage may be blocked.
_WALL_SECONDS: Final = 300.0
#: Bytes between two calls of fsync, because one fsync of gigabytes could not be interrupted.
_SYNC_EVERY: Final = 256 * 1024 * 1024


def why_not_here() -> str | None:
    """The reason, as a clause, why this host cannot use deltas; None if it can.

    Imports neither NumPy nor zstd.
    """
    missing = [] if find_spec("numpy") else ["numpy"]
    if sys.version_info >= (3, 14):
        if not find_spec("_zstd"):  # without it, compression.zstd exists, but cannot be imported
            return "this Python was built without zstd: install a Python with compression.zstd"
    elif not find_spec("zstandard"):
        missing.append("zstandard")
    if not missing:
        return None
    return f"{' and '.join(missing)} cannot be imported: pip install 'syncd[deltas]'"


class DeltaChild(Closing):
    """A child process that compares two versions. Close it, or use it in ``with``.

    Only the child imports NumPy. Nobody may delete the base while the child works.

    Attributes:
        done: the bytes of the target's tensors compared so far.
        total: the bytes of all the target's tensors.

    Raises:
        NoDeltaError: these versions can have no delta, or this host cannot make deltas.
        OSError: a file cannot be opened, or the child cannot be started.
    """

    def __init__(
        self,
        storage: Storage,
        base: WholeVersion,
        target: WholeVersion,
        *,
        python: str = sys.executable,
    ) -> None:
        self._storage = storage
        self._target = target
        why = why_no_delta(base.manifest, target.manifest) or why_not_here()
        base_end, target_end = delta_end(base.manifest), delta_end(target.manifest)
        if why is not None or base_end is None or target_end is None:
            raise NoDeltaError(why)
        self._base_end, self._target_end = base_end, target_end
        self._where = str(target.folder)
        self._names = [tensor.name for tensor in in_order(target.manifest)]
        self._elements = sum(map(elements_of, target.manifest.tensors))
        self.done = 0
        self.total = sum(elements_of(t) * ITEMSIZE[t.dtype] for t in target.manifest.tensors)
        with ExitStack() as stack:
            old = stack.enter_context(open_weights(storage, base))
            new = stack.enter_context(open_weights(storage, target))
            self._plan = self._planned(base, old, new)
            self._child = ChildProcess(
                "deltas.delta_child",
                (),
                self._where,
                task="compare",
                flags=SAME_MODULES,
                pass_fds=sorted({file.fd for places in (old, new) for file, _ in places.values()}),
                cancel=lambda: None,  # each call of the child's methods has its own
                wall_seconds=_WALL_SECONDS,
                python=python,
            )
            stack.callback(self._child.close)
            self._stack = stack.pop_all()

    def _planned(self, base: WholeVersion, old: Places, new: Places) -> bytes:
        numbers = {name: number for number, name in enumerate(self._names)}
        before = {tensor.name: tensor.digest for tensor in base.manifest.tensors}
        plan = bytearray(PLAN.pack(len(numbers), self._elements))
        # In the order of the target's files, so that both versions are read from front to back.
        for tensor in self._target.manifest.tensors:
            from_file, from_entry = old[tensor.name]
            to_file, to_entry = new[tensor.name]
            plan += TENSOR.pack(
                numbers[tensor.name],
                ITEMSIZE[tensor.dtype],
                elements_of(tensor),
                from_file.fd,
                from_entry.begin,
                to_file.fd,
                to_entry.begin,
                bytes.fromhex(before[tensor.name] or ""),
                bytes.fromhex(tensor.digest or ""),
            )
        return bytes(plan)

    @property
    def pid(self) -> int:
        """The child's process ID."""
        return self._child.pid

    def close(self) -> None:
        """End the child, and close the versions' files. Safe to call twice."""
        self._stack.close()

    def write(self, draft: Path, work: Work) -> Delta:
        """Write the delta durably, and return its record. Call this method only once.

        Args:
            draft: an empty folder. The caller must sync its parent, or remove the draft on errors.
            work: ``cancel`` is called at least every 50 ms while the child works. ``progress`` is
                called with :attr:`done` and :attr:`total`.

        Raises:
            NoDeltaError: too many elements differ, a file differs from its manifest, or the child
                ended too early.
            OSError: the storage failed, or the child sent nothing for five minutes.
        """
        index = bytearray()
        changed = size = unsynced = 0
        hasher = xxhash.xxh3_128()
        fd = self._storage.create(draft / BLOCKS)
        with self._storage.closing(fd):
            self._send(self._plan, work)
            while True:
                kind, self.done, number, block, length, count, digest = MESSAGE.unpack(
                    self._receive(MESSAGE.size, work)
                )
                work.progress(self.done, self.total)
                if kind == DONE:
                    break
                if kind == DIFFERS:
                    raise self._differs(number, block)
                encoded = self._receive(length, work)
                if kind == REFUSED:
                    raise NoDeltaError(encoded.decode())
                if kind == CHANGED:
                    with named(draft / BLOCKS):
                        self._storage.write_all(fd, encoded)
                    hasher.update(encoded)
                    index += ENTRY.pack(number, block, length, count, digest)
                    changed += count
                    size += length
                    unsynced += length
                if unsynced >= _SYNC_EVERY:
                    self._storage.fsync(fd)
                    unsynced = 0
            self._storage.fsync(fd)
        self._storage.write_new(draft / INDEX, bytes(index))
        delta = Delta(
            base=self._base_end,
            target=self._target_end,
            files=(
                VersionFile(name=BLOCKS, size=size, digest=hasher.hexdigest()),
                VersionFile(name=INDEX, size=len(index), digest=xxhash.xxh3_128_hexdigest(index)),
            ),
            changed=changed,
            elements=self._elements,
        )
        self._storage.write_new(draft / DELTA, encode(delta))
        return delta

    def _send(self, data: bytes, work: Work) -> None:
        try:
            self._child.write(data, cancel=work.cancel)
        except EndedError:
            raise self._ended() from None

    def _receive(self, count: int, work: Work) -> bytes:
        self._child.expect(self._where)
        try:
            return self._child.read(count, cancel=work.cancel)
        except EndedError:
            raise self._ended() from None

    def _ended(self) -> NoDeltaError:
        return NoDeltaError(
            f"the process that compares the two versions ended with "
            f"{described(self._child.end())}: check that the host has enough memory"
        )

    def _differs(self, number: int, in_target: int) -> NoDeltaError:
        sequence = (self._target_end if in_target else self._base_end).sequence
        return NoDeltaError(
            f"{shown(self._names[number])} of version {sequence} does not have the bytes "
            "that the manifest says: run 'syncd verify'"
        )


class FoldChild(Closing):
    """A child process that does :func:`~.folding.fold_version`, because this one has no NumPy.

    Attributes:
        done, total: the bytes of tensors that are written, and of all tensors.
    """

    def __init__(self, job: Job, base: int, chain: Sequence[int], folder: Path) -> None:
        self.done = self.total = 0
        self._storage, self._folder, self._line = job.storage, folder, b""
        self._child = ChildProcess(
            "deltas.fold_child", (base, *chain), str(folder), task="fold links for",
            flags=SAME_MODULES, cancel=lambda: None, wall_seconds=_WALL_SECONDS,
        )  # fmt: skip
        self._child.write(f"{json.dumps([str(job.layout.root), str(folder)])}\n".encode())

    def poll(self) -> Manifest | None:
        """The new version, once it is there.

        Raises:
            NoDeltaError: a link or the base is damaged.
            OSError: the storage failed, or the child has ended.
        """
        try:
            *lines, self._line = (self._line + self._child.read_some()).split(b"\n")
        except EndedError:
            why = f"the process that folds links ended with {described(self._child.end())}"
            raise OSError(errno.ECHILD, why) from None
        for line in lines:
            code, self.done, self.total, why = json.loads(line)
            if why:
                raise OSError(code, why) if code else NoDeltaError(why)
        whole = lines and self.done == self.total
        return read_manifest(self._storage, self._folder) if whole else None

    def close(self) -> None:
        """End the child. Safe to call twice."""
        self._child.close()
