"""A small model by two sets of names: each way in which these can lie to each other, once."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from explorer_hooks.engines.conformance import TensorBytes
from syncd.checkpoint.name_map import NameMap
from syncd.coordination.tensors import bytes_of
from syncd.protocol.tensor_names import HubPiece, MappedTensor, NameMapRecord

#: The trainer's tensors, all of them in BF16.
SHAPES: Mapping[str, tuple[int, ...]] = {
    "experts.gate_up_proj": (3, 6, 4),
    "experts.down_proj": (3, 4, 3),
    "q_proj": (3, 4),
    "k_proj": (2, 4),
    "norm": (4,),
    "head": (5, 4),
}


def _mapped(*pieces: HubPiece, shape: tuple[int, ...]) -> MappedTensor:
    return MappedTensor(shape=shape, pieces=pieces)


#: Split and cut into rows, split and transposed, joined, renamed; the head has one name.
NAMES = NameMap(
    NameMapRecord(
        tensors={
            "experts.gate_up_proj": _mapped(
                HubPiece(name="experts.{}.gate.weight", first=0, rows=(0, 3)),
                HubPiece(name="experts.{}.up.weight", first=0, rows=(3, 6)),
                shape=SHAPES["experts.gate_up_proj"],
            ),
            "experts.down_proj": _mapped(
                HubPiece(name="experts.{}.down.weight", first=0, transposed=True),
                shape=SHAPES["experts.down_proj"],
            ),
            "q_proj": _mapped(HubPiece(name="qk", at=0), shape=SHAPES["q_proj"]),
            "k_proj": _mapped(HubPiece(name="qk", at=3), shape=SHAPES["k_proj"]),
            "norm": _mapped(HubPiece(name="layernorm"), shape=SHAPES["norm"]),
        }
    )
)


def on_the_hub(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The trainer's tensors under the hub's names, as the map's description has it."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        for part in NAMES.hub(name, tuple(tensor.shape)):
            value = tensor if part.index is None else tensor[part.index]
            value = value if part.rows is None else value[slice(*part.rows)]
            value = value.swapaxes(-1, -2) if part.transposed else value
            value = torch.cat([found[part.name], value]) if part.name in found else value
            found[part.name] = value.contiguous()
    return found


def state(seed: int = 0) -> dict[str, Tensor]:
    """Random tensors under the trainer's names."""
    made = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=made).bfloat16() for name, shape in SHAPES.items()}


def as_bytes(tensors: Mapping[str, Tensor]) -> dict[str, TensorBytes]:
    """Tensors as a version is made of them."""
    return {
        name: TensorBytes("BF16", tuple(value.shape), bytes(bytes_of(value.contiguous())))
        for name, value in tensors.items()
    }


class Named(nn.Module):
    """A module with tensors of any names, dots or not."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, value in tensors.items():
            *path, last = name.split(".")
            inner = self
            for part in path:
                if part not in inner._modules:
                    inner.add_module(part, nn.Module())
                inner = inner.get_submodule(part)
            inner.register_parameter(last, nn.Parameter(torch.zeros_like(value)))


#: Which names a version has → how to have them of the trainer's tensors.
BY_NAMES: Mapping[str, Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]] = {
    "hub": on_the_hub,
    "trainer": lambda tensors: tensors,
}
