from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from tests.fsdp_models import CARRIED, TRAINED, values
from tests.refusals import invalid
from trainer_hooks.state.host_buffers import HostBuffers, host_copy
from trainer_hooks.state.state_dict import fsdp_version, sharded_state_dict


class Nested(nn.Module):
    """Modules by the names that wrappers give to what is in them."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self._orig_mod = nn.Linear(2, 2)
        self.layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.register_buffer("count", torch.tensor(7))


# -- names -------------------------------------------------------------------------------------


def test_a_parameter_that_torch_takes_for_extra_state_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0]._extra_state = nn.Parameter(torch.ones(1))
    with invalid(r"^0\._extra_state has torch's name"):
        sharded_state_dict(model)


in_a_group = pytest.mark.usefixtures("group")


@pytest.mark.slow
@in_a_group
def test_names_are_those_of_the_plain_model_whatever_wraps_it() -> None:
    expected = list(Nested().state_dict())
    model = Nested()
    model.layers[0] = checkpoint_wrapper(torch.compile(model.layers[0]))
    model.layers[1] = torch.compile(checkpoint_wrapper(model.layers[1]))
    assert sorted(sharded_state_dict(model)) == sorted(expected)
    model = Nested()
    assert list(sharded_state_dict(DistributedDataParallel(torch.compile(model)))) == expected
    model.module = DistributedDataParallel(model.module)
    assert sorted(sharded_state_dict(torch.compile(nn.DataParallel(model)))) == sorted(expected)


@in_a_group
def test_a_name_that_a_hook_makes_up_is_kept() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_state_dict_post_hook(
        lambda _module, state, prefix, _: state.update({f"{prefix}weight.scale": torch.ones(1)})
    )
    wrapped = DistributedDataParallel(model)
    assert set(sharded_state_dict(wrapped)) == {"0.weight", "0.bias", "0.weight.scale"}


@in_a_group
def test_the_version_of_fsdp_is_told_wherever_in_the_model_it_is() -> None:
    assert fsdp_version(Nested()) is None
    model = Nested()
    fully_shard(model.module)
    assert fsdp_version(DistributedDataParallel(nn.Sequential(nn.Linear(2, 2)))) is None
    assert fsdp_version(model) == 2
    cpu = torch.device("cpu")
    assert fsdp_version(nn.Sequential(FullyShardedDataParallel(Nested(), device_id=cpu))) == 1


def test_a_state_is_not_copied() -> None:
    model = Nested()
    state = sharded_state_dict(model)
    for name, value in model.state_dict().items():
        assert state[name].data_ptr() == value.data_ptr()


# -- copies ------------------------------------------------------------------------------------


class Pair(NamedTuple):
    left: Tensor
    right: list[Tensor]


def same(found: Tensor, expected: Tensor) -> bool:
    """The same bytes: NaN is not equal to itself, and fp8 cannot be compared."""
    left, right = (
        t.resolve_neg().reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)
        for t in (found, expected)
    )
    return (
        found.dtype == expected.dtype and found.shape == expected.shape and torch.equal(left, right)
    )


def odd_tensors() -> dict[str, Tensor]:
    """Every dtype, and every way in which bytes are not simply there."""
    torch.manual_seed(1)
    whole = values(6, 4)
    found = {str(dtype): values(3, 5, dtype=dtype) for dtype in (*TRAINED, *CARRIED)}
    return found | {
        "scalar": torch.tensor(2.5),
        "flag": torch.tensor(True),
        "empty": torch.empty(0, 3),
        "transposed": whole.t(),
        "rows of a longer storage": whole[1:3],
        "expanded": torch.ones(1, 3).expand(4, 3),
        "negated": torch.tensor([1 + 2j]).conj().imag,
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
        "parameter": nn.Parameter(values(2)),
    }


def test_copies_are_contiguous_and_hold_nothing_but_their_bytes() -> None:
    state = odd_tensors()
    copied = HostBuffers().copy(state)
    assert list(copied) == list(state)
    for name, value in state.items():
        copy = copied[name]
        assert same(copy, value), name
        assert copy.is_contiguous()
        assert copy.untyped_storage().nbytes() == copy.nbytes
        assert type(copy) is Tensor
        assert not copy.requires_grad
        assert copy.data_ptr() == 0 or copy.data_ptr() != value.data_ptr()


def test_the_second_copy_is_into_the_memory_of_the_first() -> None:
    buffers = HostBuffers()
    state = {"model": odd_tensors(), "steps": [torch.tensor(1.0), Pair(values(2), [values(3)])]}
    first = buffers.copy(state)
    pointers = [tensor.data_ptr() for tensor in tensors_in(first)]
    size = buffers.nbytes
    assert size == sum(tensor.nbytes for tensor in tensors_in(first))
    changed = host_copy(state)
    changed["model"]["scalar"] += 1
    second = buffers.copy(changed)
    assert [tensor.data_ptr() for tensor in tensors_in(second)] == pointers
    assert buffers.nbytes == size
    assert second["model"]["scalar"] == 3.5
    assert isinstance(second["steps"][1], Pair)


def tensors_in(value: Any) -> list[Tensor]:
    match value:
        case Tensor():
            return [value]
        case dict():
            return [tensor for item in value.values() for tensor in tensors_in(item)]
        case list() | tuple():
            return [tensor for item in value for tensor in tensors_in(item)]
    return []


def test_what_is_no_tensor_is_passed_on() -> None:
    state = {"lr": 0.1, "betas": (0.9, 0.95), "names": ["a", None], 3: {"text": "x"}}
    assert HostBuffers().copy(state) == state
    assert host_copy(state) == state


def test_only_what_is_different_is_made_anew() -> None:
    buffers = HostBuffers()
    first = buffers.copy({name: values(4) for name in ("stays", "grows", "is cast", "goes")})
    pointers = {name: value.data_ptr() for name, value in first.items()}
    state = {
        "stays": values(4),
        "grows": values(5),
        "is cast": values(4, dtype=torch.float64),
        "comes": values(2),
    }
    second = buffers.copy(state)
    assert second["stays"].data_ptr() == pointers["stays"]
    assert all(same(second[name], value) for name, value in state.items())
    assert buffers.nbytes == 16 + 20 + 32 + 8


def test_tied_tensors_are_one_copy_for_as_long_as_they_are_tied() -> None:
    buffers = HostBuffers()
    weight = values(3, 2)
    tied = buffers.copy({"embedding": weight, "head": weight.view(3, 2), "rows": weight[:2]})
    assert tied["embedding"].data_ptr() == tied["head"].data_ptr() != tied["rows"].data_ptr()
    assert buffers.nbytes == 24 + 16
    apart = {"embedding": weight, "head": values(3, 2), "rows": weight[:2]}
    copied = buffers.copy(apart)
    assert all(same(copied[name], value) for name, value in apart.items())
    again = buffers.copy({"embedding": weight, "head": weight, "rows": weight[:2]})
    assert again["embedding"].data_ptr() == again["head"].data_ptr()
    assert same(again["head"], weight)


#: Of each name: a dtype, a shape, and which of three tensors it is, so that some are tied.
_ENTRIES = st.dictionaries(
    st.sampled_from("abcde"),
    st.tuples(
        st.sampled_from([torch.float32, torch.bfloat16, torch.bool]),
        st.lists(st.integers(0, 3), max_size=2).map(tuple),
        st.integers(0, 2),
    ),
)


@settings(max_examples=50)
@given(states=st.lists(_ENTRIES, min_size=1, max_size=5))
def test_any_states_one_after_the_other_are_copied_right(
    states: list[dict[str, tuple[torch.dtype, tuple[int, ...], int]]],
) -> None:
    buffers = HostBuffers()
    for entries in states:
        made: dict[object, Tensor] = {}
        state = {
            name: made.setdefault(entry, values(*entry[1], dtype=entry[0]))
            for name, entry in entries.items()
        }
        expected = {name: value.clone() for name, value in state.items()}
        copied = buffers.copy(state)
        for value in state.values():
            value.zero_()
        assert copied.keys() == expected.keys()
        assert all(same(copied[name], value) for name, value in expected.items())
        distinct = {id(value): value.nbytes for value in state.values()}
        # What is empty has no memory that could be shared.
        assert buffers.nbytes == sum(distinct.values())


@in_a_group
def test_sharded_tensors_stay_sharded_over_the_same_memory() -> None:
    plane = init_device_mesh("cpu", (1, 1), mesh_dim_names=("fsdp", "tp"))

    def state() -> dict[str, Any]:
        locals_ = (values(3, 2), values(2, 5), values(4, 3).t())
        placements = ([Shard(0), Shard(1)], [Replicate(), Shard(1)], [Shard(1), Replicate()])
        return {
            str(number): DTensor.from_local(local, plane, placed)
            for number, (local, placed) in enumerate(zip(locals_, placements, strict=True))
        }

    buffers = HostBuffers()
    first, second = state(), state()
    copied = buffers.copy(first)
    pointers = [value.to_local().data_ptr() for value in copied.values()]
    assert all(value.to_local().is_contiguous() for value in copied.values())
    again = buffers.copy(second)
    for name, value in second.items():
        assert isinstance(again[name], DTensor)
        assert again[name] is copied[name]  # nothing is made for it a second time
        assert (again[name].device_mesh, again[name].placements) == (plane, value.placements)
        assert again[name].shape == value.shape
        assert again[name].is_contiguous()
        assert same(again[name].to_local(), value.to_local())
        assert same(again[name].full_tensor(), value.full_tensor())
    assert [value.to_local().data_ptr() for value in again.values()] == pointers
    moved = {"0": DTensor.from_local(first["0"].to_local(), plane, [Shard(1), Shard(0)])}
    third = buffers.copy(moved)
    assert third["0"].placements == (Shard(1), Shard(0))
    assert third["0"].to_local().data_ptr() == pointers[0]
    assert host_copy(first)["0"].placements == (Shard(0), Shard(1))


def test_what_is_not_strided_is_copied_too() -> None:
    sparse = torch.eye(3).to_sparse()
    for copy in (HostBuffers().copy({"x": sparse})["x"], host_copy(sparse)):
        assert copy.layout is torch.sparse_coo
        assert torch.equal(copy.to_dense(), torch.eye(3))


@in_a_group
def test_a_model_can_be_moved_and_cast_after_it_was_copied() -> None:
    """torch refuses to swap parameters that somebody watches."""
    model = fully_shard(Nested())
    buffers = HostBuffers()
    buffers.copy(sharded_state_dict(model))
    model.to(torch.float64)
    copied = buffers.copy(sharded_state_dict(model))
    weight = model.module.weight
    assert isinstance(weight, DTensor)
    assert copied["module.weight"].dtype is torch.float64
    assert same(copied["module.weight"].to_local(), weight.to_local().detach())
