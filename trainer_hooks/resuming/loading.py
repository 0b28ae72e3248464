"""Loads a model, or an optimizer, from the files of a full checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from syncd.checkpoint.tensor_rules import shown
from syncd.protocol.errors import CheckpointError
from trainer_hooks.resuming.filling import BoxRead, fill, goals_of, plan
from trainer_hooks.resuming.saved_files import Held, SavedFiles, names_in, told_names
from trainer_hooks.state.full_checkpoint import GROUPS, RAW, STATE, torch_optimizer_state
from trainer_hooks.state.lora import PeftState
from trainer_hooks.state.state_dict import tied_by_fsdp1
from trainer_hooks.state.wrappers import adapters_of


@dataclass
class Loading(ABC):
    """Resumes one object.

    Call the methods in the order in which this class defines them. ``prepare`` and ``load`` may be
    collective.
    """

    files: SavedFiles

    def __post_init__(self) -> None:
        self._copies: list[BoxRead] = []
        self._state: dict[str, Any] = {}

    @property
    @abstractmethod
    def whose(self) -> str:
        """The object's name in messages."""

    def prepare(self) -> None:  # noqa: B027 - a raw optimizer has none
        """Find the tensors to fill."""

    @abstractmethod
    def plan(self, own: int | None) -> None:
        """Find the tensors' data in the files; raise if some data do not fit."""

    def taken(self) -> set[str]:
        """The names in the files that this rank uses; none if they are unknown."""
        return set()

    def unused(self) -> set[str]:
        """The names in the files that this rank does not use."""
        return set(names_in(self.files.opened)) - self.taken()

    def fill(self, checked: Sequence[int]) -> None:
        """Fill the tensors; check all bytes of the files in ``checked``."""
        there = [number for number in checked if number < len(self.files)]
        fill(self._copies, self.files, checked=there)

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

    def prepare(self) -> None:
        """Find the tensors. With FSDP1: collective, and the tensors are copies."""
        try:
            self._state = get_model_state_dict(self.model)
        except AttributeError as error:
            raise CheckpointError(
                "torch cannot load the model's state dict, because a name in the state dict is not "
                f"a parameter or buffer of the model ({error}). Load the weights from a published "
                "version"
            ) from error
        # A full state dict has only one name of tied tensors.
        for name, first in tied_by_fsdp1(self.model).items():
            self._state[name] = self._state[first]

    def plan(self, own: int | None) -> None:
        """Plan reads for all tensors; the files may lack the frozen base of adapters."""
        if own is not None and own >= len(self.files):
            own = None  # rank 0 has written the weights of all ranks
        optional: frozenset[str] = frozenset()
        if adapters_of(self.model):
            optional = PeftState(self.model, self._state).frozen_base
        self._copies = plan(goals_of(self._state), self.files, own=own, optional=optional)

    def taken(self) -> set[str]:
        """All names of the model."""
        return set(self._state)

    def load(self) -> None:
        """Load the copies of FSDP1. Collective; other tensors were filled in place."""
        # A model that was made in inference_mode can be changed only in it.
        is_inference = any(one.is_inference() for one in self.model.parameters())
        with torch.inference_mode(is_inference):
            set_model_state_dict(self.model, self._state)
        self._state = {}


@dataclass
class OptimizerLoading(Loading):
    """The state and the options of a ``torch.optim.Optimizer``."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def __post_init__(self) -> None:
        super().__post_init__()
        self._was_empty = not self.optimizer.state
        self._is_empty = False

    @property
    def whose(self) -> str:
        """The optimizer's class."""
        return type(self.optimizer).__name__

    def prepare(self) -> None:
        """Find the tensors of the state. A new optimizer takes a step with zero gradients first."""
        self._state = torch_optimizer_state(self.model, self.optimizer, flatten=False)

    def plan(self, own: int | None) -> None:
        """Plan reads for tensors; set all other values now."""
        names, options = self._saved(own)
        self._is_empty = not any(name.startswith(f"{STATE}.") for name in names)
        found: dict[str, Any] = {}
        if not self._is_empty:
            for parameter, state in self._state[STATE].items():
                prefix = f"{STATE}.{parameter}."
                if not any(name in names for name in _names(prefix, state)):
                    state.clear()  # without any gradient it has no state yet
                found.update(self._take(prefix, state, names))
        for group in self._state[GROUPS]:
            found.update(self._take_options(group, options))
        self._copies = plan(goals_of(found), self.files, own=own)

    def taken(self) -> set[str]:
        """The names of the state and the options of this rank's parameters."""
        parameters = {name for group in self._state[GROUPS] for name in group["params"]}
        options = {
            name
            for name in names_in(self.files.opened)
            if (option := _option(name)) is not None and option[0] in parameters
        }
        states = self._state[STATE].items()
        return options.union(
            *(_names(f"{STATE}.{parameter}.", state) for parameter, state in states)
        )

    def load(self) -> None:
        """Load the state. Collective for FSDP1."""
        set_optimizer_state_dict(self.model, self.optimizer, self._state)
        if self._is_empty:
            self.optimizer.state.clear()  # saved before the first step
        self._state = {}

    def forget(self) -> None:
        """Drop the state that ``prepare`` made: the optimizer would count it as a step."""
        if self._was_empty:
            self.optimizer.state.clear()
        super().forget()

    def _saved(self, own: int | None) -> tuple[dict[str, object], dict[str, dict[str, object]]]:
        wanted = {name for group in self._state[GROUPS] for name in group["params"]}
        names: dict[str, object] = {}
        options: dict[str, dict[str, object]] = {}
        for number in dict.fromkeys([*([] if own is None else [own]), *range(len(self.files))]):
            if own is not None and wanted <= options.keys():
                break  # the rank's own file is enough
            file = self.files[number]
            for name, value in (*file.tensors.items(), *file.plain.items()):
                names.setdefault(name, value)
                option = _option(name)
                if option is not None:
                    options.setdefault(option[0], {}).setdefault(option[1], value)
        if not options:
            raise CheckpointError(
                f"{self.files.paths[0]} is not the state of a torch.optim.Optimizer that "
                "trainer_hooks saved. Load with optimizer=None, or load another save"
            )
        return names, options

    def _take(
        self, prefix: str, state: dict[str, Any], names: Mapping[str, object]
    ) -> dict[str, Any]:
        """Set the plain values of ``state``; return its tensors, to be filled later."""
        found: dict[str, Any] = {}
        for key, value in state.items():
            name = f"{prefix}{key}"
            if isinstance(value, dict):
                found.update(self._take(f"{name}.", value, names))
            elif isinstance(value, Tensor | ShardedTensor):
                if key == "step" and isinstance(held := names.get(name), Held):
                    # torch makes it in float64 if that is the default dtype.
                    state[key] = value.to(held.torch_dtype)
                found[name] = state[key]
            elif name in names and not isinstance(names[name], Held):
                state[key] = names[name]
            else:
                raise CheckpointError(
                    f"{self.files.paths[0]} lacks the value '{shown(name)}', which {self.whose} "
                    "needs. The file belongs to another optimizer"
                )
        return found

    def _take_options(
        self, group: dict[str, Any], options: Mapping[str, Mapping[str, object]]
    ) -> dict[str, Tensor]:
        """Set a group's plain options; return its tensors, to be filled later."""
        first: str | None = None
        for name in group["params"]:
            if name not in options:
                raise CheckpointError(
                    f"{self.files.paths[0]} and the files beside it have no state of "
                    f"'{shown(name)}', which {self.whose} updates. The files belong to another "
                    "optimizer or model"
                )
            if first is None:
                first = name
            elif _comparable(options[name]) != _comparable(options[first]):
                raise CheckpointError(
                    f"in {self.files.paths[0]}, '{shown(name)}' and '{shown(first)}' have "
                    "different options (such as the learning rate), but this optimizer has both "
                    "parameters in one parameter group. Make the same parameter groups as at the "
                    "save"
                )
        saved = {} if first is None else options[first]
        # A scheduler adds initial_lr or max_momentum, and a later torch adds options.
        more = sorted(saved.keys() - group.keys())
        theirs = [name for name in more if not name.endswith(("_lr", "_momentum"))]
        ours = sorted(group.keys() - saved.keys() - {"params"})
        if theirs and ours:
            raise CheckpointError(
                f"{self.files.paths[0]} holds the state of an optimizer with the options "
                f"{told_names(theirs)}, but {self.whose} has {told_names(ours)} instead. Use the "
                "same optimizer as at the save, or load with optimizer=None"
            )
        found: dict[str, Tensor] = {}
        for key, value in saved.items():
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


def _names(prefix: str, state: Mapping[str, Any]) -> set[str]:
    found: set[str] = set()
    for key, value in state.items():
        if isinstance(value, dict):
            found |= _names(f"{prefix}{key}.", value)
        else:
            found.add(f"{prefix}{key}")
    return found


def _option(name: str) -> tuple[str, str] | None:
    """Split an option's name into parameter and option; None for any other name."""
    kind, _, rest = name.partition(".")
    parameter, dot, option = rest.rpartition(".")
    return (parameter, option) if kind == GROUPS and dot else None


def _comparable(options: Mapping[str, object]) -> dict[str, object]:
    """Of a tensor, compare only dtype and shape."""
    return {
        key: (value.dtype, value.shape) if isinstance(value, Held) else value
        for key, value in options.items()
    }
