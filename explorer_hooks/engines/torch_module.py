"""A torch module in this process, loaded in place."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import torch

from explorer_hooks.broadcast import WeightReceiver
from explorer_hooks.engines.base import InProcessEngine
from explorer_hooks.engines.changes import (
    CannotCompareError,
    Changes,
    find_changes,
    write_changes,
)
from explorer_hooks.engines.fitting import check_kind, named
from explorer_hooks.engines.in_place import HostStage, fill_directly
from explorer_hooks.engines.targets import (
    DescribedTensor,
    Fit,
    Rename,
    Target,
    compare_tied,
    cut_again,
    find_targets,
    gathers,
    tensors_of,
)
from explorer_hooks.given_names import SAME_NAMES, GivenNames, names_of
from explorer_hooks.reader import LeasedVersion
from explorer_hooks.weights import WeightsReader
from syncd.coordination.broadcast.group import KeptGroup
from syncd.coordination.broadcast.weight_meta import WeightMeta
from syncd.protocol.errors import EngineMismatchError, InvalidSettingsError
from syncd.protocol.participants import Rendezvous

if TYPE_CHECKING:
    from torch import Tensor, nn

InPlace = Literal["staged", "direct"]

log = logging.getLogger(__name__)
_WAYS: Final = ("staged", "direct")
_THREADS: Final = 4


class TorchModule(InProcessEngine):
    """Copies versions into a live ``nn.Module``, in place.

    It takes broadcasts of method ``nccl``, too.

    Promised: parameters and buffers stay the same objects with the same data pointers, so that CUDA
    graphs, compiled code and optimizers that hold them stay valid. Every tensor is filled, with the
    bits of the version. A DTensor gets this rank's own part, and only that part is read, for any
    mesh of ``Shard``, ``_StridedShard`` and ``Replicate``. On return the copies are complete on
    every device: work that is launched later sees the new weights, and work that was launched
    before has seen only the old ones.

    Not promised: that a model that computes in another thread meanwhile sees one version alone; for
    that, give its lock. Nor that ranks that share a model change it at the same moment; let them
    pull between two batches.

    ``in_place`` selects the way of the bytes:

    - ``staged``: all bytes are first read into host memory, and then copied. The memory is kept
      from one load to the next; it is as large as this rank's part of the module, and pinned if
      that is on a GPU. All or nothing: if storage fails, the module is unchanged. A hook reads
      ahead while the module still serves, so a pause is as long as one copy of the bytes.
    - ``direct``: bytes are read into the parameters themselves if these are on the CPU, else
      through 256 MiB of host memory. Half the copies, and no second copy of the model in memory. If
      storage fails half-way, the module is torn. The hook then loads the previous version again; if
      there is none, or it cannot be read either, the module stays torn.

    With ``sparse``, only the elements are written in which a version differs from the one before.
    Both are compared while the module serves, so a pause is shorter on a GPU: fewer bytes are
    copied to it. On a CPU there is little to gain, and memory bandwidth to lose. The version before
    is read once more, so let the hook stage versions on this host. The whole version is loaded if
    over about a tenth of the elements differ, if it has other tensors, and if anything but this
    engine has changed the module since: a broadcast, an error, or an in-place operation of torch.
    Not noticed: writes past torch's counters of changes, for example to ``.data``, or by a kernel
    of your own.

    Args:
        module: its ``state_dict()`` must have exactly the names, shapes and dtypes of the versions;
            or their other names (the hub's or the trainer's) that the versions list: then tensors
            are filled part by part, without a copy of them.
        rename: the module's name of each tensor by the version's (or its other name, if that is the
            module's), or a function from one to the other, which returns None for a tensor that the
            module does not take. Names that are not in a mapping stay.
        prefix: only the version's names that begin with it are the module's, and it is cut off
            there, before ``rename``.
        cast: whether to cast floating values if the module has another floating dtype (never from
            or to fp8); by default such a version is refused.
        in_place: as above.
        lock: held while the module changes, e.g. the ``threading.Lock`` of the thread that
            computes; with FSDP2 also for a moment while a version is compared with the module.
        threads: the most threads that read at a time; never more than there are processors.
        sparse: as above.

    Attributes:
        changed: the part of the elements that the last load has written: 1 for all of them, None
            before the first.

    Raises:
        InvalidSettingsError: ``in_place`` is neither of the two.
    """

    _whose = "the module"
    hub_names = True

    def __init__(
        self,
        module: nn.Module,
        *,
        rename: Mapping[str, str] | Rename | None = None,
        prefix: str = "",
        cast: bool = False,
        in_place: InPlace = "staged",
        lock: AbstractContextManager[Any] | None = None,
        threads: int = _THREADS,
        sparse: bool = False,
    ) -> None:
        if in_place not in _WAYS:
            raise InvalidSettingsError(f"in_place is {in_place!r}: it is one of {', '.join(_WAYS)}")
        self._module = module
        self._rename = rename
        self._prefix = prefix
        self._cast = cast
        self._in_place = in_place
        self._lock = lock if lock is not None else nullcontext()
        self._threads = threads
        self._stage = HostStage(threads)
        self._prepared: object = None
        self._sparse = sparse
        self._filled: _Filled | None = None
        self._changes: Changes | None = None
        self.changed: float | None = None
        self._group = KeptGroup()
        self._known: WeightMeta | None = None
        self._names = SAME_NAMES

    def check(self, version: LeasedVersion) -> None:
        """Compare every name, shape and dtype.

        Raises:
            EngineMismatchError: some differ, and the message lists them; or the module cannot take
                versions of this kind.
            VerificationError, ShardFormatError, OSError: tied weights had to be compared by
                reading them, because the manifest has no digests, and they cannot be read.
        """
        compare_tied(version, self._fit(version).unknown, self._whose)

    def prepare(self, version: LeasedVersion) -> None:
        """Read the version, or its changes, into host memory; the module is not touched."""
        targets = self._targets(version)
        if self._in_place == "staged" or self._sparse:
            self._read_ahead(version, targets)

    def load(self, version: LeasedVersion) -> None:
        """Fill the module.

        Raises:
            EngineMismatchError: the version does not fit; nothing was changed.
            VerificationError, ShardFormatError, OSError: it cannot be read; nothing was changed, or
                with ``direct`` the module may be torn; a note of the error then says so.
        """
        targets = self._targets(version)
        if self._prepared != _reading(version, targets) or not self._holds_base(targets):
            self._read_ahead(version, targets)
        changes = self._changes
        self._forget()
        with ExitStack() as stack:
            reader = None
            if changes is None and self._in_place == "direct":
                reader = stack.enter_context(WeightsReader(version))
                reader.open({target.name for target in targets})
            stack.enter_context(self._changing())
            self._fill(version, targets, changes, reader)
            self._filled = _Filled(version, _state(targets)) if self._sparse else None
        self.changed = 1.0 if changes is None else changes.changed / max(changes.elements, 1)

    def _fill(
        self,
        version: LeasedVersion,
        targets: list[Target],
        changes: Changes | None,
        reader: WeightsReader | None,
    ) -> None:
        if changes is not None:
            write_changes(targets, changes)
        elif reader is None:
            self._stage.copy(targets)
        else:
            try:
                fill_directly(reader, targets, self._stage, self._threads)
            except Exception as error:
                error.add_note(
                    f"{self._whose} has parts of {named(version)} now: load the previous version "
                    "again"
                )
                raise

    # -- by broadcast ------------------------------------------------------------------------------

    @property
    def workers(self) -> int:
        """One: this process. A module that is sharded over several processes has one in each."""
        return 1

    def receive(self, rendezvous: Rendezvous, rank_offset: int, deadline: float) -> None:
        """Join the weight group, or stay in it, and fill the module with the broadcast weights.

        ``staged``: the module is unchanged until every member has confirmed the last byte.
        ``direct``: the module is filled as bytes arrive, and the lock is held all that time.

        Args:
            rendezvous: the record with the group's address.
            rank_offset: the rank of this process in it.
            deadline: the limit in seconds of joining, and of the transfer.

        Raises:
            BroadcastError: the transfer failed, or does not fit; nothing was changed.
            EngineBrokenError: the transfer failed half-way with ``direct``: the module is torn.
        """
        self._forget()
        device = self._receives_on(rendezvous.backend)
        try:
            group = self._group.open(rendezvous, rank_offset, deadline=deadline, device=device)
            receiver = WeightReceiver(group, known=self._known)
            if self._in_place == "staged":
                targets = receiver.receive_into(self._stage, self._fit_received)
                with self._changing():
                    self._stage.copy(targets)
            else:
                receiver.fill(self._fit_received, self._changing())
            self._known = receiver.meta
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """Leave the weight group, without waiting for others. Safe to call without one."""
        self._group.close()

    def _receives_on(self, backend: str) -> torch.device:
        """The device whose memory the backend can receive into: for NCCL the module's."""
        devices = (value.device for value in self._module.parameters())
        cuda = (device for device in devices if device.type == "cuda")
        return next(cuda, torch.device("cpu")) if backend == "nccl" else torch.device("cpu")

    def _fit_received(self, meta: WeightMeta) -> Fit:
        if "full" not in self.kinds:
            raise EngineMismatchError(
                f"the broadcast is of a full model, and {self._whose} takes adapters"
            )
        with self._lock_to_look():
            tensors = tensors_of(self._module)
        # Trainers broadcast their own tensors; the map of the last version has the hub's names for
        # them.
        names = self._names.of_trainer
        return self._compared(meta.tensors, tensors, names, "what is broadcast")

    def close(self) -> None:
        """Release the host memory, and leave the weight group; the module stays as it is."""
        self._forget()
        self._stage.close()
        self.leave()

    def _read_ahead(self, version: LeasedVersion, targets: list[Target]) -> None:
        self._prepared = None
        self._changes = self._find_changes(version, targets) if self._sparse else None
        if self._changes is None and self._in_place == "staged":
            with WeightsReader(version) as reader:
                self._stage.read(reader, targets)
        self._prepared = _reading(version, targets)

    def _find_changes(self, version: LeasedVersion, targets: list[Target]) -> Changes | None:
        """The changes since the version that the module holds; None if all of it has to be read."""
        if self._filled is None:
            return None
        why = "it was changed since"
        if self._holds_base(targets):
            try:
                return find_changes(self._filled.version, version, targets, self._threads)
            except CannotCompareError as error:
                why = str(error)
        log.info("loading all of version %d into %s: %s", version.sequence, self._whose, why)
        return None

    def _holds_base(self, targets: list[Target]) -> bool:
        """Whether the module has the weights that the changes begin with, if there are changes."""
        return self._filled is None or self._filled.state == _state(targets)

    def _forget(self) -> None:
        """Read no changes, until the module is filled again: nothing is known of its weights."""
        self._prepared = self._changes = self._filled = None

    def _lock_to_look(self) -> AbstractContextManager[Any]:
        """The lock for FSDP2: there ``state_dict`` frees parameters that a forward needs."""
        return self._lock if gathers(self._module) else nullcontext()

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """The module may change inside; no forward runs there."""
        with self._lock:
            cut_again(self._module)
            yield
            # Drop casts of the old weights before a forward uses the new ones: inside autocast all
            # threads keep them.
            torch.clear_autocast_cache()
            self._loaded()

    def _loaded(self) -> None:
        """Change the rest that belongs to the weights, under the lock. Must not fail."""

    def _tensors(self, version: LeasedVersion) -> dict[str, Tensor]:  # noqa: ARG002 - for subclasses
        """The module's tensors that a version fills, by their names after renaming."""
        return tensors_of(self._module)

    def _targets(self, version: LeasedVersion) -> list[Target]:
        return self._fit(version).targets

    def _fit(self, version: LeasedVersion) -> Fit:
        check_kind(version, self.kinds)
        with self._lock_to_look():
            tensors = self._tensors(version)
        self._names = names_of(version)
        return self._compared(version.manifest.tensors, tensors, self._names, named(version))

    def _compared(
        self,
        entries: Iterable[DescribedTensor],
        tensors: Mapping[str, Tensor],
        names: GivenNames,
        what: str,
    ) -> Fit:
        return find_targets(
            entries,
            tensors,
            self._renamed,
            names=names,
            cast=self._cast,
            what=what,
            whose=self._whose,
        )

    def _renamed(self, name: str) -> str | None:
        if not name.startswith(self._prefix):
            return None
        name = name.removeprefix(self._prefix)
        if self._rename is None:
            return name
        if isinstance(self._rename, Mapping):
            renamed: str = self._rename.get(name, name)
            return renamed
        return self._rename(name)


class _Filled(NamedTuple):
    """The version that the module was filled with, and how its tensors were right after that."""

    version: LeasedVersion
    state: list[object]


def _state(targets: list[Target]) -> list[object]:
    """Equal as long as the same tensors lie in the same memory, and torch has not changed them."""
    return [
        (
            target.name,
            target.dtype,
            target.box,
            target.tensor.device,
            target.tensor.dtype,
            target.tensor.data_ptr(),
            target.tensor.stride(),
            None if target.tensor.is_inference() else target.tensor._version,  # noqa: SLF001 - torch documents it for this
        )
        for target in targets
    ]


def _reading(version: LeasedVersion, targets: list[Target]) -> object:
    """The identity of a read: equal if it reads the same bytes into the same places."""
    parts = [(target.name, target.dtype, target.box) for target in targets]
    return version.sequence, version.folder, parts
