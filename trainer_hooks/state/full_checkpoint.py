"""A full checkpoint's state other than weights: the optimizer, and the rest needed to resume.

``torch.load(weights_only=True)`` reads these files, and so does the merge. Both run no code from
a file, so a save refuses values that they cannot load.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from syncd.checkpoint.tensor_rules import is_extra_state
from syncd.checkpoint.torch_files.pieces import is_plain
from syncd.coordination.torch_modes import without_modes
from syncd.protocol.errors import InvalidSettingsError
from syncd.protocol.policy import given_or_default
from trainer_hooks.state.state_dict import lost_by_fsdp1, parameters_of
from trainer_hooks.state.wrappers import trained_model

#: The prefixes of names in an optimizer's file: tensors of parameters, and options of their groups.
STATE: Final = "state"
GROUPS: Final = "param_groups"
#: The only key in the file of an optimizer that is not a ``torch.optim.Optimizer``.
RAW: Final = "state_dict"
#: One more key if there are several optimizers: release 0.3 refuses to load a key that it does not
#: know. It sorts before all other keys, so a message shows it.
SEVERAL: Final = "(several optimizers)"
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

Given = TypeVar("Given")
#: One object, a sequence of several, or None.
Some: TypeAlias = Given | Sequence[Given] | None


class Stateful(Protocol):
    """The methods of an optimizer or a scheduler that are needed to save and to resume."""

    def state_dict(self) -> dict[str, Any]:
        """The state needed to resume."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> object:
        """Resume."""


def each_of(given: Some[Given]) -> Sequence[Given]:
    """The given objects; none for None."""
    if isinstance(given, Sequence) and not hasattr(given, "state_dict"):
        return given
    return () if given is None else [given]  # type: ignore[list-item]  # one that is no sequence


def check_stateful(**given: Some[Stateful]) -> None:
    """Check that each argument is None, or one or several optimizers or schedulers.

    Raises:
        InvalidSettingsError: an object is a class, or has no ``state_dict``; or one of several
            optimizers is not torch's.
    """
    for name, value in given.items():
        several: Sequence[object] = each_of(value)
        base: type = Optimizer if len(several) > 1 and "optimizer" in name else object
        for each in several or [value]:
            if isinstance(each, type):
                what = f"the class {each.__name__}"
            elif value is None or (isinstance(each, base) and hasattr(each, "state_dict")):
                continue
            else:
                what = f"of type {type(each).__name__}"
            raise InvalidSettingsError(
                f"{name} is {what}: it must be an object with state_dict(), such as "
                "torch.optim.AdamW(model.parameters()), or several torch.optim.Optimizer"
            )


@dataclass
class Critic:
    """Another model of a trainer, which full checkpoints have under ``critic/``.

    Setting the optimizer raises :class:`InvalidSettingsError` if it is none.

    Attributes:
        model: the critic, wrapped as for training; by default there is none.
        optimizer: its optimizer, or a sequence of several. It may be replaced between steps, on all
            ranks.
    """

    model: nn.Module | None = None
    optimizer: Some[Stateful] = None

    def __post_init__(self) -> None:
        self.model = self.model and trained_model(self.model)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "optimizer":
            check_stateful(optimizer=value)
        super().__setattr__(name, value)


class Replaceable:
    """The objects of full checkpoints that may be replaced between steps.

    Setting an optimizer or a scheduler raises :class:`InvalidSettingsError` if it is none.
    """

    optimizer: Some[Stateful] = None
    scheduler: Some[Stateful] = None
    critic: Critic
    user_state: Callable[[], Mapping[str, Any]] | None = None
    _updated: frozenset[Tensor] = frozenset()

    def _ever_updated(self) -> frozenset[Tensor]:
        """The parameters that have, or had in a replaced optimizer, a state."""
        for one in each_of(self.optimizer):
            if isinstance(one, Optimizer):
                self._updated |= {parameter for parameter, state in one.state.items() if state}
        return self._updated

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "optimizer":
            self._ever_updated()
        if name in {"optimizer", "scheduler"}:
            check_stateful(**{name: value})
        if name == "critic":
            value = given_or_default("critic", Critic, value)
        if name == "critic_optimizer":  # of 0.3
            raise InvalidSettingsError("there is no critic_optimizer: set hook.critic.optimizer")
        super().__setattr__(name, value)


def names_updated(model: nn.Module, optimizer: object) -> set[str]:
    """The names of the parameters in an optimizer's groups; none if it is not torch's."""
    held = set(map(id, _parameters(optimizer)))
    return {name for one, names in parameters_of(model) if id(one) in held for name in names}


def optimizers_of(model: nn.Module, given: Some[Given]) -> Sequence[Given]:
    """The given optimizers, without wrappers whose ``step`` does more, such as accelerate's.

    Raises:
        InvalidSettingsError: two of them update the same parameter, so it has two states.
    """
    optimizers = [_inner(one) for one in each_of(given)]
    owners = Counter(p for optimizer in optimizers for p in {*_parameters(optimizer)})
    for name, parameter in model.named_parameters():
        if owners[parameter] > 1:
            raise InvalidSettingsError(
                f"{owners[parameter]} optimizers update '{name}'. Give it to only one of them"
            )
    return optimizers


@without_modes()
def optimizer_state(model: nn.Module, given: Some[Stateful]) -> dict[str, Any]:
    """This rank's part of the state of one or several optimizers. Collective for FSDP1.

    Nothing is copied. The optimizers and the gradients are unchanged afterwards, even before the
    first step.

    Returns:
        For each ``torch.optim.Optimizer``, in one flat dict: for each parameter P of the plain
            model the state (``state.P.exp_avg``) and the options of its group
            (``param_groups.P.lr``). Each value is a tensor, perhaps sharded, or a value that
            is_plain() accepts. For any other object, ``{"state_dict": optimizer.state_dict()}``,
            from which only the same number of ranks can resume.

    Raises:
        InvalidSettingsError: a value could not be loaded again, an optimizer has parameters that
            the model lacks, or two optimizers have the same parameter.
    """
    optimizers = optimizers_of(model, given)
    flat: dict[str, Any] = {SEVERAL: True} if len(optimizers) > 1 else {}
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        if not isinstance(optimizer, Optimizer):
            return {RAW: checked(optimizer.state_dict(), f"{kind}.state_dict()")}
        with uninitialized(optimizer):
            own = torch_optimizer_state(model, optimizer, flatten=True)
        has_state = any(name.startswith(f"{STATE}.") for name in own)
        if has_state and (lost := lost_by_fsdp1(model)):
            raise InvalidSettingsError(
                f"torch could not load the state of {kind} for {lost} again. Use fully_shard; "
                "or FSDP1 with use_orig_params=True, checkpoint_wrapper inside its units, and "
                "torch.compile around them"
            )
        for name, value in own.items():
            if isinstance(value, np.generic):
                own[name] = value.item()
            elif not isinstance(value, Tensor) and not is_plain(value):
                raise InvalidSettingsError(
                    f"{kind} has {name} of type {type(value).__name__}, which cannot be saved. Use "
                    "only tensors, numbers, text, and tuples of these"
                )
        flat |= own
    return flat


def loadable(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict to save, without an ``_extra_state`` that only running code could load.

    Raises:
        InvalidSettingsError: any other value is no tensor. Neither the merge nor loading takes it.
    """
    kept = dict(state)
    for name, value in state.items():
        if isinstance(value, Tensor):
            continue
        if not is_extra_state(name):
            raise InvalidSettingsError(
                f"'{name}' in the model's state dict is of type {type(value).__name__}, not a "
                "tensor, so it could not be loaded again. Make it a buffer, or keep it elsewhere, "
                "such as in user_state"
            )
        try:
            kept[name] = checked(value, name)
        except InvalidSettingsError:
            del kept[name]
    return kept


def torch_optimizer_state(
    model: nn.Module, optimizer: Optimizer, *, flatten: bool
) -> dict[str, Any]:
    """``get_optimizer_state_dict``, with errors that name the remedy."""
    kind = type(optimizer).__name__
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # a forward leaves the root's parameters unsharded
            module.reshard()
    try:
        found: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=options)
    except (AssertionError, KeyError, RuntimeError) as error:
        raise InvalidSettingsError(
            f"torch cannot save the state of {kind}: {error!r}. The model must have all parameters "
            "that it updates. With FSDP1, freeze all others, make a step before a save after you "
            "unfreeze some, and give all units the same use_orig_params"
        ) from error
    return found


def _inner(optimizer: Any) -> Any:
    inner = getattr(optimizer, "optimizer", None)
    # Others, such as Lookahead, have a state of their own.
    if not isinstance(optimizer, Optimizer) or inner is optimizer:
        return optimizer
    return _inner(inner) if getattr(inner, "state", 0) is optimizer.state else optimizer


def _parameters(optimizer: object) -> Iterator[Tensor]:
    if isinstance(optimizer, Optimizer):
        for group in optimizer.param_groups:
            yield from group["params"]


def extra_state(
    *, scheduler: Some[Stateful], user_state: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The state for resuming except model and optimizer. Tensors are not copied.

    Raises:
        InvalidSettingsError: a value in the state could not be loaded again.
    """
    extra: dict[str, Any] = {RNG: rng_state()}
    if scheduler is not None:
        states = [
            checked(one.state_dict(), f"{type(one).__name__}.state_dict()")
            for one in each_of(scheduler)
        ]
        extra[SCHEDULER] = states[0] if len(states) == 1 else states
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
def uninitialized(optimizer: Optimizer) -> Iterator[None]:
    """Keep torch from doing a step with zero gradients to create a missing state.

    The optimizer's bias correction would count that step. torch takes no such step if some
    parameter has a gradient, so the smallest parameter gets a zero gradient for a moment.
    """
    parameters = [parameter for parameter in _parameters(optimizer) if parameter.requires_grad]
    if optimizer.state or not parameters or any(p.grad is not None for p in parameters):
        yield
        return
    smallest = min(parameters, key=lambda parameter: parameter.numel())
    smallest.grad = torch.zeros_like(smallest)
    try:
        yield
    finally:
        smallest.grad = None
