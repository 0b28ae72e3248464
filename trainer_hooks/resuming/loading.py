"""Loads a model, or an optimizer, from the files of a full checkpoint."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FlatParameter

from syncd.checkpoint.tensor_rules import is_extra_state, shown
from syncd.protocol.errors import CheckpointError
from trainer_hooks.resuming.filling import BoxRead, fill, goals_of, plan
from trainer_hooks.resuming.saved_files import NO_FILES, Held, SavedFiles, few_names, names_in
from trainer_hooks.state.full_checkpoint import (
    GROUPS,
    RAW,
    SEVERAL,
    STATE,
    Some,
    Stateful,
    optimizers_of,
    torch_optimizer_state,
    uninitialized,
)
from trainer_hooks.state.host_buffers import memory_of
from trainer_hooks.state.lora import PeftState
from trainer_hooks.state.state_dict import (
    beginning,
    computed_names,
    mark_trained,
    parameters_of,
    shape_of,
    sharded_state_dict,
    tied_by_fsdp1,
)
from trainer_hooks.state.wrappers import adapters_of

log = logging.getLogger(__name__)


@dataclass
class Loading(ABC):
    """Resumes one object.

    Call the methods in the order in which this class defines them. ``prepare`` and ``load`` may be
    collective.
    """

    files: SavedFiles
    is_optimizer: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._copies: list[BoxRead] = []
        self._state: dict[str, Any] = {}

    @property
    @abstractmethod
    def whose(self) -> str:
        """The object's name in messages."""

    def open(self, own: int | None, checked: Sequence[int]) -> None:  # noqa: ARG002 - an optimizer's
        """Check that the files in ``checked`` exist; ``own`` is this rank's own file, if any."""
        self.files.check_there([number for number in checked if number < len(self.files)])

    def prepare(self) -> None:  # noqa: B027 - a raw optimizer has none
        """Find the tensors to fill."""

    def prepare_trained(self) -> None:
        """Find the tensors of an object that trains, which stays as it is."""
        self.prepare()

    def keep_shadows(self) -> None:
        """Keep, in place of the tensors, whole ones without content; tied ones stay tied."""
        self._state = _shadow(self._state, {})

    @abstractmethod
    def plan(self, own: int | None) -> None:
        """Find the tensors' data in the files; raise if some data do not fit."""

    def say(self) -> None:  # noqa: B027 - most have nothing to say
        """Log what is not loaded."""

    def taken(self) -> set[str]:
        """The names in the files that this rank uses; none if they are unknown."""
        return set()

    def unused(self) -> set[str]:
        """The names in the files that neither this object nor an earlier one uses."""
        self.files.taken |= self.taken()
        return set(names_in(self.files.opened)) - self.files.taken

    def fill(self, checked: Sequence[int]) -> None:
        """Fill the tensors; check all bytes of the files in ``checked``, once."""
        there = {number for number in checked if number < len(self.files)} - self.files.checked
        fill(self._copies, self.files, checked=sorted(there))
        self.files.checked |= there

    @abstractmethod
    def load(self) -> None:
        """Load the filled tensors."""

    def forget(self) -> None:
        """Undo ``prepare``; called if loading fails before ``load``."""
        self._state = {}


@dataclass
class ModelLoading(Loading):
    """The weights and buffers of a model."""

    model: nn.Module
    whose = "the model"
    is_optimizer = False

    def prepare(self) -> None:
        """Find the tensors. With FSDP1: collective, and the tensors are copies."""
        state = sharded_state_dict(self.model)
        self._computed = computed_names(self.model)
        computed = self._computed(state)
        if more := [name for name, is_base in computed.items() if not is_base]:
            try:  # a module may load attributes of its own
                get_model_state_dict(self.model)
            except AttributeError as error:
                raise CheckpointError(
                    "torch cannot load the model's state dict, because names in the state dict are "
                    f"not a parameter or buffer of the model: {few_names(more)}. Make them "
                    "buffers, or load the weights from a published version"
                ) from error
        self._left_out = {name for name in state if computed.get(name) or is_extra_state(name)}
        self._state = {name: value for name, value in state.items() if name not in self._left_out}
        # A full state dict has only one name of tied tensors.
        for name, first in tied_by_fsdp1(self.model).items():
            self._state[name] = self._state[first]
        self._base: frozenset[str] = frozenset()
        if adapters_of(self.model):
            self._base = PeftState(self.model, self._state).frozen_base
            self._left_out |= self._base

    def plan(self, own: int | None) -> None:
        """Plan reads for all tensors; the files may lack the frozen base of adapters."""
        if own is not None and own >= len(self.files):
            own = None  # rank 0 has written the weights of all ranks
        self._copies = plan(goals_of(self._state), self.files, own=own, optional=self._left_out)

    def taken(self) -> set[str]:
        """All names of the model, and those of a frozen base's quantization, which stays."""
        known = self._state.keys() | self._left_out
        computed = self._computed(set(names_in(self.files.opened)) - known)
        return known | {name for name, is_base in computed.items() if is_base}

    def load(self) -> None:
        """Load the copies of FSDP1. Collective; other tensors were filled in place."""
        options = StateDictOptions(strict=False)  # a module may miss what it has computed
        # A model that was made in inference_mode can be changed only in it.
        is_inference = any(one.is_inference() for one in self.model.parameters())
        with torch.inference_mode(is_inference):
            set_model_state_dict(self.model, self._state, options=options)
        if saved := self._base.intersection(self._state, names_in(self.files.opened)):
            mark_trained(self.model, saved)
        self._state = {}


@dataclass
class OptimizerLoading(Loading):
    """The state and the options of a ``torch.optim.Optimizer``."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def __post_init__(self) -> None:
        super().__post_init__()
        self._was_empty = not self.optimizer.state
        self._stated: set[str] = set()
        self._names: dict[str, object] = {}
        self._options: dict[str, dict[str, object]] = {}
        self._known = {name: one for one, names in parameters_of(self.model) for name in names}
        self._updated = {one for group in self.optimizer.param_groups for one in group["params"]}

    @property
    def whose(self) -> str:
        """The optimizer's class."""
        return type(self.optimizer).__name__

    def open(self, own: int | None, checked: Sequence[int]) -> None:
        """Also read the names and the plain values."""
        super().open(own, checked)
        missing = set(self._updated)
        for number in dict.fromkeys([*([] if own is None else [own]), *range(len(self.files))]):
            if own is not None and not missing:
                break  # the rank's own file is enough
            file = self.files[number]
            for name, value in (*file.tensors.items(), *file.plain.items()):
                if name in self._names:
                    continue
                self._names[name] = value
                parameter = self._parameter(name)
                if name.startswith(f"{STATE}."):
                    self._stated.add(parameter)
                elif parameter:
                    option = name.removeprefix(f"{GROUPS}.{parameter}.")
                    self._options.setdefault(parameter, {})[option] = value
                    missing.discard(self._known[parameter])
        if not self._options:
            raise CheckpointError(
                f"{self.files.paths[0]} is not the state of a torch.optim.Optimizer of this model, "
                "saved by trainer_hooks. Load with optimizer=None, or load another save"
            )
        lacking = {one: name for name, one in self._known.items() if name not in self._stated}
        for name in self._known.keys() & self._stated:
            one = self._known[name]
            if isinstance(one, FlatParameter) and one in lacking:
                raise CheckpointError(
                    f"{self.files.paths[0]} has no state of '{shown(lacking[one])}', which FSDP1 "
                    f"holds in one parameter with '{shown(name)}'. Use use_orig_params=True"
                )

    @contextmanager
    def _only_stated(self) -> Iterator[None]:
        """Let torch make, and load, the state of exactly the parameters that have a saved one.

        The step in which torch makes it is none of the training's, so it calls none of its hooks.
        """
        stated = {self._known.get(name) for name in self._stated}
        before = [(each, each.requires_grad, each.grad) for each in self._updated]
        names = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
        hooks: list[dict[int, Any]] = [getattr(self.optimizer, name, {}) for name in names]
        kept = [dict(called) for called in hooks]
        try:
            for called in hooks:
                called.clear()
            for each in self._updated:
                each.requires_grad_(each in stated)
                each.grad = None  # with one, torch makes no state
            yield
        finally:
            for each, requires_grad, grad in before:
                each.requires_grad_(requires_grad)
                each.grad = grad
            for called, hook in zip(hooks, kept, strict=True):
                called.update(hook)

    def prepare(self) -> None:
        """Find the tensors of the state. A new optimizer takes a step with zero gradients first."""
        with self._only_stated():
            self._state = torch_optimizer_state(self.model, self.optimizer, flatten=False)

    def plan(self, own: int | None) -> None:
        """Plan reads for tensors; set all other values now."""
        found: dict[str, Any] = {}
        for parameter in self._state[STATE].keys() - self._stated:
            del self._state[STATE][parameter]  # without any gradient it had no state at the save
        for parameter, state in self._state[STATE].items():
            found.update(self._take(f"{STATE}.{parameter}.", state))
        for group in self._state[GROUPS]:
            found.update(self._take_options(group))
            self.files.updated.update(group["params"])
        self._copies = plan(goals_of(found), self.files, own=own)

    def taken(self) -> set[str]:
        """The names of this rank's state, of all options, and of parameters not updated now."""
        free = {
            name
            for name in set(names_in(self.files.opened))
            if name.startswith(GROUPS) or self._parameter(name) not in self.files.updated
        }
        states = self._state[STATE].items()
        return {name for name in free if self._parameter(name)}.union(
            {SEVERAL}, *(_names(f"{STATE}.{parameter}.", state) for parameter, state in states)
        )

    def say(self) -> None:
        """Say what is skipped, and what begins anew. All optimizers must be planned."""
        if changed := self.files.updated ^ self._options.keys():
            log.warning(
                "%s is of an optimizer of other parameters: %s. State that is not needed now is "
                "skipped, and state that was not saved begins anew",
                self.files.paths[0],
                few_names(sorted(changed)),
            )

    def load(self) -> None:
        """Load the state. Collective for FSDP1."""
        with self._only_stated():
            set_optimizer_state_dict(self.model, self.optimizer, self._state)
        self._state = {}

    def prepare_trained(self) -> None:
        """Find the tensors of the state; no step makes a missing one."""
        with uninitialized(self.optimizer):
            self._state = torch_optimizer_state(self.model, self.optimizer, flatten=False)

    def forget(self) -> None:
        """Drop the state that ``prepare`` made: the optimizer would count it as a step."""
        if self._was_empty:
            self.optimizer.state.clear()
        super().forget()

    def _parameter(self, name: str) -> str:
        """The parameter of the model that a name in the files is about; empty if there is none."""
        return beginning(name.partition(".")[2], self._known)

    def _take(self, prefix: str, state: dict[str, Any]) -> dict[str, Any]:
        """Set the plain values of ``state``; return its tensors, to be filled later."""
        found: dict[str, Any] = {}
        for key, value in state.items():
            name = f"{prefix}{key}"
            if isinstance(value, dict):
                found.update(self._take(f"{name}.", value))
            elif isinstance(value, Tensor | ShardedTensor):
                if key == "step" and isinstance(held := self._names.get(name), Held):
                    # torch makes it in float64 if that is the default dtype.
                    state[key] = value.to(held.torch_dtype)
                found[name] = state[key]
            elif name in self._names and not isinstance(self._names[name], Held):
                state[key] = self._names[name]
            else:
                raise CheckpointError(
                    f"{self.files.paths[0]} lacks the value '{shown(name)}', which {self.whose} "
                    "needs. The file belongs to another optimizer"
                )
        return found

    def _take_options(self, group: dict[str, Any]) -> dict[str, Tensor]:
        """Set a group's plain options; return its tensors, to be filled later.

        Parameters that were in no group at the save get the options of the others.
        """
        options = self._options
        known = [name for name in group["params"] if name in options]
        if not known:
            return {}
        first = known[0]
        for name in known[1:]:
            if _comparable(options[name]) != _comparable(options[first]):
                raise CheckpointError(
                    f"in {self.files.paths[0]}, '{shown(name)}' and '{shown(first)}' have "
                    "different options (such as the learning rate), but this optimizer has both "
                    "parameters in one parameter group. Make the same parameter groups as at the "
                    "save"
                )
        saved = options[first]
        # A scheduler adds initial_lr or max_momentum, and a later torch adds options.
        more = sorted(saved.keys() - group.keys())
        theirs = [name for name in more if not name.endswith(("_lr", "_momentum"))]
        ours = sorted(group.keys() - saved.keys() - {"params"})
        if theirs and ours:
            raise CheckpointError(
                f"{self.files.paths[0]} holds the state of an optimizer with the options "
                f"{few_names(theirs)}, but {self.whose} has {few_names(ours)} instead. Use the "
                "same optimizer as at the save, or load with optimizer=None"
            )
        found: dict[str, Tensor] = {}
        for key, value in saved.items():
            if key == "param_names":
                continue  # this optimizer's own
            if not isinstance(value, Held):
                group[key] = value
                continue
            now = group.get(key)
            device = now.device if isinstance(now, Tensor) else None
            group[key] = torch.empty(value.shape, dtype=value.torch_dtype, device=device)
            found[f"{GROUPS}.{first}.{key}"] = group[key]
        return found


@dataclass
class RawOptimizerLoading(Loading):
    """Any other object with ``load_state_dict``: each rank loads its own saved state."""

    optimizer: Any

    @property
    def whose(self) -> str:
        """The optimizer's class."""
        return type(self.optimizer).__name__

    def plan(self, own: int | None) -> None:
        """Read and check this rank's whole file."""
        if own is None:
            raise CheckpointError(
                f"{self.files.paths[0]} holds the state of an optimizer that is not a "
                "torch.optim.Optimizer. syncd cannot split such a state for another number of "
                f"ranks. Resume with {len(self.files)} ranks, as many as at the save"
            )
        found = self.files.loaded(own)
        if not isinstance(found, dict) or found.keys() != {RAW}:
            raise CheckpointError(
                f"{self.files.paths[own]} holds no saved state of {self.whose}. The file "
                "belongs to an optimizer of another class. Load it into an optimizer of that class"
            )
        self._state = found[RAW]

    def fill(self, checked: Sequence[int]) -> None:
        """Do nothing: ``plan`` has checked the file."""

    def load(self) -> None:
        """Load this rank's saved state."""
        self.optimizer.load_state_dict(self._state)


def loadings(
    model: nn.Module,
    given: Some[Stateful],
    weights: SavedFiles = NO_FILES,
    states: SavedFiles = NO_FILES,
) -> list[Loading]:
    """For a model and its optimizers."""
    return [
        ModelLoading(weights, model),
        *(
            OptimizerLoading(states, model, one)
            if isinstance(one, torch.optim.Optimizer)
            else RawOptimizerLoading(states, one)
            for one in optimizers_of(model, given)
        ),
    ]


def _shadow(value: Any, known: dict[object, Tensor]) -> Any:
    match value:
        case Tensor():
            made = torch.empty((), dtype=value.dtype, device="cpu").expand(shape_of(value))
            return known.setdefault(memory_of(value) or made, made)
        case dict():
            return {key: _shadow(item, known) for key, item in value.items()}
        case list():
            return [_shadow(item, known) for item in value]
    return value


def _names(prefix: str, state: Mapping[str, Any]) -> set[str]:
    found: set[str] = set()
    for key, value in state.items():
        if isinstance(value, dict):
            found |= _names(f"{prefix}{key}.", value)
        else:
            found.add(f"{prefix}{key}")
    return found


def _comparable(options: Mapping[str, object]) -> dict[str, object]:
    """Of a tensor, compare only dtype and shape."""
    return {
        key: (value.dtype, value.shape) if isinstance(value, Held) else value
        for key, value in options.items()
    }
