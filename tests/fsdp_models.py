"""Models of a few hundred bytes with what makes shards difficult: sizes, dtypes, ties, buffers."""

import json
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

#: Those that gloo moves, and optimizers train.
TRAINED = (torch.bfloat16, torch.float32, torch.float16)
#: Those that are only carried along.
CARRIED = (
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu, torch.float4_e2m1fn_x2, torch.complex64,
    torch.float64, torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8,
    torch.int16, torch.int32, torch.int64,
)  # fmt: skip


def values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Different values of any dtype."""
    if dtype is torch.bool:
        return torch.rand(shape) > 0.5
    if dtype.is_floating_point and dtype.itemsize > 1:
        return torch.randn(shape).to(dtype)
    if dtype.is_floating_point:
        return torch.randint(0, 100, shape, dtype=torch.uint8).view(dtype)
    return torch.randint(0, 100, shape).to(dtype)


def frozen(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """A parameter of any dtype that is not trained."""
    return nn.Parameter(values(*shape, dtype=dtype), requires_grad=False)


class Block(nn.Module):
    """Parameters of one dtype whose rows no number of ranks divides, and buffers of others."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10, dtype=dtype)
        self.experts = nn.Parameter(values(3, 4, 2, dtype=dtype))
        self.one_row = nn.Parameter(values(1, 6, dtype=dtype))
        self.one_extra_state = nn.Parameter(values(1, dtype=dtype))
        self.register_buffer("steps", torch.tensor(12345678901))
        self.register_buffer("mask", torch.tensor([True, False, True, True, False]))
        self.register_buffer("scale_extra_state", torch.tensor(-0.0))
        self.register_buffer("unusual", torch.tensor([float("nan"), float("inf"), 1e-40]))
        self.register_buffer("nothing", torch.empty(0, 3, dtype=torch.float16))


class Trunk(nn.Module):
    """An embedding and a block of each dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(17, 8, dtype=torch.bfloat16)
        self.layers = nn.ModuleList(map(Block, TRAINED))


class Language(nn.Module):
    """A language model by Hugging Face's names, whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Trunk()
        self.lm_head = nn.Linear(8, 17, bias=False, dtype=torch.bfloat16)
        self.lm_head.weight = self.model.embed_tokens.weight

    def get_extra_state(self) -> dict[str, str]:
        """What is in state dicts and is no tensor."""
        return {"left": "out"}

    def set_extra_state(self, state: Any) -> None:
        """Nothing is kept of it."""


class Laden(Language):
    """A language model that carries every other dtype along, frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.carried = nn.ParameterDict(
            {str(dtype).split(".")[1]: frozen(7, 3, dtype=dtype) for dtype in CARRIED}
        )


class Columns(nn.Module):
    """Parameters whose last dimension four ranks divide."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(12, 5, dtype=torch.bfloat16)
        self.experts = nn.Parameter(values(3, 8, 4))
        self.one_row = nn.Parameter(values(1, 4, dtype=torch.float16))
        self.carried = frozen(3, 8, dtype=torch.float8_e4m3fn)


class Parallel(nn.Module):
    """Layers for tensor parallelism; 41 rows are cut one way by TP first, another by FSDP first."""

    def __init__(self, *, even: bool = False) -> None:
        super().__init__()
        hidden = 48 if even else 41
        self.norm = nn.LayerNorm(7, dtype=torch.bfloat16)
        self.up = nn.Linear(7, hidden)
        self.down = nn.Linear(hidden, 7)
        self.gate = nn.Linear(7, hidden, bias=False, dtype=torch.bfloat16)
        self.alone = nn.Linear(5, 8 if even else 9)
        self.norm_after = nn.LayerNorm(7)
        self.experts = nn.Parameter(values(6, 4, 3))
        self.register_buffer("scale", torch.tensor(0.5))


class Config:
    """A config of transformers, for our purposes."""

    def __init__(self, **fields: object) -> None:
        self._fields = fields

    def to_json_string(self) -> str:
        """As transformers has it."""
        return json.dumps(self._fields)


def tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all tensors of a state dict, whole. Collective where they are cut."""
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().cpu().clone()
        for name, value in module.state_dict().items()
        if isinstance(value, torch.Tensor)
    }
