"""A full checkpoint's state other than weights: the optimizer, and the rest needed to resume.

``torch.load(weights_only=True)`` reads these files, and so does the merge. Both run no code from
a file, so a save refuses values that they cannot load.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp import FSDPModule

from syncd.checkpoint.torch_files.pieces import is_plain
from syncd.coordination.torch_modes import without_modes
from syncd.protocol.errors import InvalidSettingsError

#: The prefixes of names in an optimizer's file: tensors of parameters, and options of their groups.
STATE: Final = "state"
GROUPS: Final = "param_groups"
#: The only key in the file of an optimizer that is not a ``torch.optim.Optimizer``.
RAW: Final = "state_dict"
#: The keys of the extra state; the first two are verl's.
SCHEDULER: Final = "lr_scheduler"
RNG: Final = "rng"
USER_STATE: Final = "user_state"
#: The key for the name of the frozen base model, whose weights are not saved.
BASE_MODEL: Final = "base_model"
#: The key for the buffers of averages around the model.
AVERAGES: Final = "averages"

#: The types that weights_only loads, beside containers. No DTensor: it needs a process group.
_VALUES: Final = frozenset(
    {
        type(None),
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        torch.dtype,
        torch.device,
        torch.Size,
        Tensor,
        nn.Parameter,
    }
)
_NESTED: Final = 50


class Stateful(Protocol):
    """The part of an optimizer or a scheduler that is needed here."""

    def state_dict(self) -> dict[str, Any]:
        """The state needed to resume."""


def check_stateful(**given: object) -> None:
    """Check that each argument is None, or an optimizer or scheduler.

    Raises:
        InvalidSettingsError: an argument is a class, or has no ``state_dict``.
    """
    for name, value in given.items():
        if isinstance(value, type):
            what = f"the class {value.__name__}"
        elif value is None or callable(getattr(value, "state_dict", None)):
            continue
        else:
            what = f"of type {type(value).__name__}"
        raise InvalidSettingsError(
            f"{name} is {what}: it must be an object with state_dict(), such as "
            "torch.optim.AdamW(model.parameters())"
        )


@without_modes()
def optimizer_state(model: nn.Module, optimizer: Stateful) -> dict[str, Any]:
    """This rank's part of an optimizer's state. Nothing is copied. Collective for FSDP1.

    The optimizer and the gradients are unchanged afterwards, even before the first step.

    Returns:
        For a ``torch.optim.Optimizer``, a flat dict: for each parameter P of the plain model the
            state (``state.P.exp_avg``) and the options of its group (``param_groups.P.lr``). Each
            value is a tensor, perhaps sharded, or a value that is_plain() accepts. For any other
            object, ``{"state_dict": optimizer.state_dict()}``, from which only the same number of
            ranks can resume.

    Raises:
        InvalidSettingsError: a value could not be loaded again, or the optimizer has parameters
            that the model lacks.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        return {RAW: checked(optimizer.state_dict(), f"{type(optimizer).__name__}.state_dict()")}
    kind = type(optimizer).__name__
    with _uninitialized(optimizer):
        flat = torch_optimizer_state(model, optimizer, flatten=True)
    for name, value in flat.items():
        if isinstance(value, np.generic):
            flat[name] = value.item()
        elif not isinstance(value, Tensor | ShardedTensor) and not is_plain(value):
            raise InvalidSettingsError(
                f"{kind} has {name} of type {type(value).__name__}, which cannot be saved. Use "
                "only tensors, numbers, text, and tuples of these"
            )
    return flat


def torch_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, flatten: bool
) -> dict[str, Any]:
    """``get_optimizer_state_dict``, with errors that name the remedy."""
    kind = type(optimizer).__name__
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # a forward leaves the root's parameters unsharded
            module.reshard()
    try:
        found: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=options)
    except NotImplementedError as error:
        raise InvalidSettingsError(f"the state of {kind} cannot be saved: {error}") from error
    except KeyError as error:
        raise InvalidSettingsError(
            f"{kind} updates a parameter (number {error}) that the model does not have. Pass the "
            "model whose parameters the optimizer updates"
        ) from error
    return found


def extra_state(
    *, scheduler: Stateful | None, user_state: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The state for resuming except model and optimizer. Tensors are not copied.

    Raises:
        InvalidSettingsError: a value in the state could not be loaded again.
    """
    extra: dict[str, Any] = {RNG: rng_state()}
    if scheduler is not None:
        where = f"{type(scheduler).__name__}.state_dict()"
        extra[SCHEDULER] = checked(scheduler.state_dict(), where)
    if user_state is not None:
        extra[USER_STATE] = checked(user_state, USER_STATE)
    return extra


def checked(value: Any, where: str, depth: int = 0) -> Any:
    """Return a value with plain dicts and numbers instead of other mappings and NumPy's scalars.

    Raises:
        InvalidSettingsError: some value cannot be loaded without running code.
    """
    kind = type(value)
    if kind in _VALUES:
        return value
    if depth < _NESTED:
        if isinstance(value, np.generic):
            return checked(
                value.item(), where, depth + 1
            )  # for a longdouble item() returns a longdouble again
        if isinstance(value, Mapping):
            return {
                checked(key, f"a key of {where}", depth + 1): checked(
                    item, f"{where}[{key!r}]", depth + 1
                )
                for key, item in value.items()
            }
        if kind in {list, tuple, set}:
            return kind(
                checked(item, f"{where}[{number}]", depth + 1) for number, item in enumerate(value)
            )
    raise InvalidSettingsError(
        f"{where} is of type {kind.__module__}.{kind.__qualname__}, which can be loaded only by "
        "running code. Use only tensors, numbers, text, lists and dicts. Convert arrays "
        "with torch.from_numpy"
    )


@without_modes()
def rng_state() -> dict[str, Any]:
    """The states of this process's random number generators.

    Returns:
        ``cpu``, and the type of an accelerator in use (e.g. ``cuda``): the states of torch's
            generators, as uint8 tensors. ``random`` and ``numpy``: the states of Python's generator
            and of NumPy's global generator.
    """
    version, numbers, gauss = random.getstate()
    _, keys, *rest = np.random.get_state()
    states: dict[str, Any] = {
        "cpu": torch.get_rng_state(),
        "random": (version, torch.tensor(numbers, dtype=torch.int64), gauss),
        "numpy": (torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
    }
    name, module = _accelerator()
    if module is not None:
        states[name] = module.get_rng_state()
    return states


def set_rng_state(states: Mapping[str, Any]) -> None:
    """Set the random number generators to the states of :func:`rng_state`.

    The accelerator's generator is set only if the accelerator was in use at the save, and is now.
    """
    torch.set_rng_state(states["cpu"])
    version, numbers, gauss = states["random"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    keys, *rest = states["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), *rest))
    name, module = _accelerator()
    if module is not None and name in states:
        module.set_rng_state(states[name])


def _accelerator() -> tuple[str, Any]:
    """The accelerator's type, and its torch module (None if it is not in use)."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is None:
        return "", None
    module = torch.get_device_module(device)
    in_use = getattr(module, "is_initialized", lambda: True)()  # asking a GPU would claim it
    return (device.type, module) if in_use else (device.type, None)


@contextmanager
def _uninitialized(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Keep torch from doing a step with zero gradients to create a missing state.

    The optimizer's bias correction would count that step. torch takes no such step if some
    parameter has a gradient, so the smallest parameter gets a zero gradient for a moment.
    """
    parameters = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad
    ]
    if optimizer.state or not parameters or any(p.grad is not None for p in parameters):
        yield
        return
    smallest = min(parameters, key=lambda parameter: parameter.numel())
    smallest.grad = torch.zeros_like(smallest)
    try:
        yield
    finally:
        smallest.grad = None
