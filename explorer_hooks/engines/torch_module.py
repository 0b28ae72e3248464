"""The engine for a torch module in this process, which it fills in place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final, Literal

import torch

from explorer_hooks.broadcast import WeightReceiver
from explorer_hooks.engines.base import InProcessEngine
from explorer_hooks.engines.fitting import check_kind, named
from explorer_hooks.engines.in_place import CPU, HostBuffer
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
from syncd.protocol.reports import Rendezvous

if TYPE_CHECKING:
    from torch import Tensor, nn

InPlace = Literal["staged", "direct"]

_WAYS: Final = ("staged", "direct")


class TorchModule(InProcessEngine):
    """Copies versions into a live ``nn.Module``, in place. It also takes broadcasts (``nccl``).

    Promised:

    - Parameters and buffers stay the same objects with the same data pointers. So CUDA graphs,
      compiled code and optimizers stay valid.
    - Every tensor gets the bits of the version, except with ``cast``.
    - A DTensor gets only this rank's part, and only that part is read. Each mesh dimension may be
      ``Shard``, ``_StridedShard`` or ``Replicate``.
    - After :meth:`load`, the copies are complete on every device. Earlier work on a device has seen
      only the old weights.

    Not promised:

    - That a forward in another thread sees only one version. To ensure this, let that thread hold
      ``lock``.
    - That all ranks of one model change at the same moment. To ensure this, let all ranks pull
      between two batches.

    ``in_place`` selects how the bytes are copied:

    - ``staged``: all bytes are first read into host memory, and then copied into the module. If
      storage fails, the module is unchanged. The host memory is as large as this rank's part of the
      module, is kept between loads, and is pinned for a GPU. A hook reads ahead, so a pause lasts
      as long as one copy.
    - ``direct``: no second copy of the model is needed. Parameters on the CPU are filled by the
      reads themselves, other parameters through 256 MiB of host memory. If storage fails half-way,
      the module is torn: it has parts of two versions. The hook then loads the previous version
      again. If that fails too, the module stays torn.

    Args:
        module: the module. Its ``state_dict()`` must have exactly the names, shapes and dtypes of
            the versions. If a version also lists other names (the hub's or the trainer's), the
            module can have those. Then the tensors are filled part by part.
        rename: a mapping or a function from the version's name of each tensor to the module's name.
            A name that is not in the mapping does not change. The function returns None for a
            tensor that the module does not take. It is also called with the version's other names.
        prefix: only tensors whose names in the version begin with the prefix belong to the module.
            The prefix is removed before ``rename`` is applied.
        cast: whether to cast values between floating dtypes, except fp8. By default a version with
            other dtypes is refused.
        in_place: ``staged`` or ``direct``.
        lock: held while the module changes, for example a ``threading.Lock`` that another thread
            holds while it computes. With FSDP2 the lock is also held briefly while a version is
            compared with the module.
        threads: the most threads that read at a time; never more than there are processors.

    Raises:
        InvalidSettingsError: ``in_place`` is neither ``staged`` nor ``direct``, or an argument has
            a wrong type.
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
        threads: int = 4,
    ) -> None:
        if in_place not in _WAYS:
            raise InvalidSettingsError(
                f"in_place is {in_place!r}: it must be one of {', '.join(_WAYS)}"
            )
        if not isinstance(module, torch.nn.Module):
            raise InvalidSettingsError(
                f"module is of type {type(module).__name__}, but it must be a torch.nn.Module. "
                "Pass the model itself, not its state_dict()"
            )
        if not (rename is None or isinstance(rename, Mapping) or callable(rename)):
            raise InvalidSettingsError(
                f"rename is {rename!r}: it must be a mapping, or a function, from a version's name "
                "of a tensor to the module's name"
            )
        if not isinstance(cast, bool):
            raise InvalidSettingsError(
                f"cast is {cast!r}: it must be True or False. With True, values are cast to the "
                "dtypes that the module has"
            )
        self._module = module
        self._rename = rename
        self._prefix = prefix
        self._cast = cast
        self._in_place = in_place
        self._lock = lock if lock is not None else nullcontext()
        self._buffer = HostBuffer(threads)
        self._prepared: object = None
        self._group = KeptGroup()
        self._known: WeightMeta | None = None
        self._names = SAME_NAMES

    def check(self, version: LeasedVersion) -> None:
        """Compare every name, shape and dtype.

        Raises:
            EngineMismatchError: the version's kind or some tensors do not fit.
            VerificationError, ShardFormatError, OSError: tied weights cannot be read. They are read
                only if the manifest has no digests.
        """
        compare_tied(version, self._fit(version).unknown, self._whose)

    def prepare(self, version: LeasedVersion) -> None:
        """With ``staged``, read the version into host memory, without changing the module."""
        targets = self._fit(version).targets
        if self._in_place == "staged":
            self._read_ahead(version, targets)

    def load(self, version: LeasedVersion) -> None:
        """Fill the module.

        Raises:
            EngineMismatchError: the version does not fit. The module is unchanged.
            VerificationError, ShardFormatError, OSError: the version cannot be read. With
                ``direct``, the module may be torn, and a note on the error says so.
        """
        targets = self._fit(version).targets
        if self._in_place == "staged":
            if self._prepared != _reading(version, targets):
                self._read_ahead(version, targets)
            self._prepared = None
            with self._changing():
                self._buffer.copy(targets)
            return
        with WeightsReader(version) as reader:
            reader.open({target.name for target in targets})
            with self._changing():
                try:
                    self._buffer.fill(reader, targets)
                except Exception as error:
                    error.add_note(
                        f"{self._whose} now has a mix of {named(version)} and its previous "
                        "weights. Load the previous version again"
                    )
                    raise

    # -- by broadcast ------------------------------------------------------------------------------

    @property
    def workers(self) -> int:
        """Always 1, even if several processes share the module."""
        return 1

    def receive(self, rendezvous: Rendezvous, rank_offset: int, deadline: float) -> None:
        """Join the weight group, or stay in it, and fill the module with the broadcast weights.

        With ``staged``, the module is unchanged until every member has confirmed the last byte.
        With ``direct``, the module is filled as bytes arrive, and the lock is held during that
        time.

        Raises:
            BroadcastError: the transfer failed, or its tensors do not fit. The module is unchanged.
            EngineBrokenError: with ``direct``, the transfer failed half-way. The module may be
                torn.
        """
        self._prepared = None
        devices = (value.device for value in self._module.parameters())
        cuda = (device for device in devices if device.type == "cuda")
        device = next(cuda, CPU) if rendezvous.backend == "nccl" else CPU
        try:
            group = self._group.open(rendezvous, rank_offset, deadline=deadline, device=device)
            receiver = WeightReceiver(group, self._known)
            if self._in_place == "staged":
                targets = receiver.receive_into(self._buffer, self._fit_received)
                with self._changing():
                    self._buffer.copy(targets)
            else:
                receiver.fill(self._fit_received, self._changing())
            self._known = receiver.meta
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """Leave the weight group, if there is one."""
        self._group.close()

    def _fit_received(self, meta: WeightMeta) -> Fit:
        if "full" not in self.kinds:
            raise EngineMismatchError(
                f"the broadcast has a full model, but {self._whose} loads only adapters"
            )
        with self._lock_to_look():
            tensors = tensors_of(self._module)
        # A broadcast has the trainer's names; the last version's map has the hub's names, too.
        names = GivenNames(self._names.name_map, "trainer")
        return self._compared(meta.tensors, tensors, names, "the broadcast")

    def close(self) -> None:
        """Release the host memory, and leave the weight group. The module is unchanged."""
        self._prepared = None
        self._buffer.close()
        self.leave()

    def _read_ahead(self, version: LeasedVersion, targets: list[Target]) -> None:
        self._prepared = None
        with WeightsReader(version) as reader:
            self._buffer.read(reader, targets)
        self._prepared = _reading(version, targets)

    def _lock_to_look(self) -> AbstractContextManager[Any]:
        """The lock with FSDP2, whose ``state_dict`` frees parameters that a forward needs."""
        return self._lock if gathers(self._module) else nullcontext()

    @contextmanager
    def _changing(self) -> Iterator[None]:
        with self._lock:
            cut_again(self._module)
            yield
            # The cache of autocast holds casts of the old weights.
            torch.clear_autocast_cache()
            self._loaded()

    def _loaded(self) -> None:
        """Update state that depends on the weights. Called under the lock. Must not fail."""

    def _tensors(self, version: LeasedVersion) -> dict[str, Tensor]:  # noqa: ARG002 - for subclasses
        """The module's tensors that a version fills, by name."""
        return tensors_of(self._module)

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


def _reading(version: LeasedVersion, targets: list[Target]) -> object:
    """A value that is equal for reads of the same bytes into the same places."""
    parts = [(target.name, target.dtype, target.box) for target in targets]
    return version.sequence, version.folder, parts
