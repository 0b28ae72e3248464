"""Weights on their way from a trainer into an engine, by broadcast."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from explorer_hooks.arriving import Arriving, as_tensor, greet
from explorer_hooks.engines.in_place import HostStage, synchronize
from explorer_hooks.engines.targets import Fit, Target, differ
from syncd.checkpoint.boxes import whole as whole_box
from syncd.coordination.host_memory import HostMemory
from syncd.coordination.weight_meta import Image, WeightMeta
from syncd.protocol.errors import EngineBrokenError

if TYPE_CHECKING:
    from syncd.coordination.broadcast import WeightGroup

T = TypeVar("T")


class WeightReceiver:
    """Receives transfers; each call of a method below is one, with all other members of the group.

    Promised: no byte of a tensor is sent before every receiver knows the names, dtypes and shapes
    and has found that they fit; a transfer counts only where every member has the last byte and has
    said so. After an error the group is of no use any more: leave it.

    Not promised: that several threads may call it.

    Args:
        group: as this process's rank in it.
        known: the meta of a transfer before, which is not sent again where it is still the same.

    Attributes:
        meta: of the transfer that was begun last, or what was known before.
    """

    def __init__(self, group: WeightGroup, *, known: WeightMeta | None = None) -> None:
        self.meta = known
        self._group = group

    def receive(self, fits: Callable[[WeightMeta], object]) -> Iterator[tuple[str, Tensor]]:
        """All tensors, in host memory, once every receiver has the last byte and has said so.

        The first ``next()`` takes as long as the transfer; after it nothing can fail here. As much
        host memory as the model has is held for as long as the iterator or a tensor of it is.

        Args:
            fits: is given the names, dtypes and shapes before any byte of a tensor is sent, and
                raises where they cannot be loaded.

        Yields:
            Name and whole tensor, contiguous, on the CPU: views of one block of memory.

        Raises:
            BroadcastError: this or another receiver did not get it, or refused; nothing was
                yielded.
        """

        def prepare(meta: WeightMeta, image: Image) -> HostMemory:
            fits(meta)
            return HostMemory(image.size, self._group.device)

        arriving = self._greet(prepare)
        memory = arriving.prepared
        arriving.fill_image(memory.content)
        arriving.end()
        for offset, spec in zip(arriving.image.offsets, arriving.meta.tensors, strict=True):
            yield spec.name, as_tensor(memory.content[offset:][: spec.nbytes], spec)

    def receive_into(self, stage: HostStage, fit: Callable[[WeightMeta], Fit]) -> list[Target]:
        """What targets are to have, into host memory that is kept; they are not changed.

        Of a tensor of which a target is a part, that part alone is kept.

        Args:
            stage: laid out anew; on an error it is closed, as bytes may still arrive in its memory.
            fit: says what the tensors fill, or raises.

        Returns:
            The targets, for ``stage.copy``, once every receiver has the last byte.

        Raises:
            BroadcastError: as of :meth:`receive`; also where two tensors differ that are one here.
        """

        def prepare(meta: WeightMeta, _: Image) -> tuple[Fit, Tensor]:
            found = fit(meta)
            return found, stage.lay_out(found.targets)

        try:
            arriving = self._greet(prepare)
            found, content = arriving.prepared
            if _is_image(found.targets, arriving):
                arriving.fill_image(content)
            else:
                _receive_parts(arriving, found, stage.views)
            arriving.end()
        except BaseException:
            stage.close()
            raise
        return found.targets

    def fill(
        self, fit: Callable[[WeightMeta], Fit], changing: AbstractContextManager[object]
    ) -> None:
        """Fill targets themselves, tensor by tensor as they arrive; complete on every device.

        Args:
            fit: as of :meth:`receive_into`.
            changing: entered before the first change, and left after the last.

        Raises:
            BroadcastError: as of :meth:`receive`; nothing was changed.
            EngineBrokenError: it came to nothing in the middle: the targets have parts of it.
        """
        arriving = self._greet(lambda meta, _: fit(meta))
        found = arriving.prepared
        with changing:
            try:
                _receive_parts(arriving, found, [target.tensor for target in found.targets])
                arriving.end()
            except Exception as error:
                raise EngineBrokenError(
                    f"a broadcast ended after parts of it were filled in ({error}): load a version "
                    "from the files"
                ) from error

    def _greet(self, prepare: Callable[[WeightMeta, Image], T]) -> Arriving[T]:
        arriving = greet(self._group, self.meta, prepare)
        self.meta = arriving.meta
        return arriving


@torch.no_grad()
def _receive_parts(arriving: Arriving[T], found: Fit, views: Sequence[Tensor]) -> None:
    """Copy of each tensor what its target is to have; complete on every device.

    Args:
        arriving: the transfer.
        found: what its tensors fill.
        views: for each target the memory that is filled, of the target's shape.
    """
    parts = {target.name: (target, view) for target, view in zip(found.targets, views, strict=True)}
    tied = {other: parts[one] for one, other in found.unknown if one in parts}
    for name, whole in arriving.tensors():
        if (part := parts.get(name)) is not None:
            target, view = part
            view.copy_(target.of(whole))
        elif (part := tied.get(name)) is not None:
            target, view = part
            own = target.of(whole).to(view.device, view.dtype)
            if not torch.equal(_bytes(own), _bytes(view)):
                arriving.fault = differ(target.name, name, "the module")
    synchronize({view.device for view in views} - {torch.device("cpu")})


def _is_image(targets: Sequence[Target], arriving: Arriving[T]) -> bool:
    """Whether the targets, laid out one after the other, are the image."""
    return [(target.name, target.box) for target in targets] == [
        (spec.name, whole_box(spec.shape)) for spec in arriving.meta.tensors
    ]


def _bytes(tensor: Tensor) -> Tensor:
    """Of any contiguous or other tensor; a copy only where it is not contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
