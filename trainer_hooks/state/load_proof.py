"""Proves, on tensors without content, that transformers loads the folder that is published.

As a program it reads the question from standard input, and prints the answer (JSON).
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from syncd.checkpoint.placement import Shape
from syncd.checkpoint.tensor_rules import shown

#: The most tensors that are checked in this process: about a second.
_FEW: Final = 2000
_PROGRAM: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from trainer_hooks.state.load_proof import run; run()"
)


class LoadFaults(NamedTuple):
    """What ``from_pretrained`` says of a folder: names of tensors, the first few of each kind."""

    unexpected: list[str]
    missing: list[str]
    mismatched: list[str]

    def clause(self, kind: str) -> str:
        """The faults as a clause, for messages."""
        verbs = ("does not know", "misses", "expects another shape of")
        for verb, names in zip(verbs, self, strict=True):
            if names:
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                return f"{kind}.from_pretrained {verb} {shown(names[0])}{more}"
        return ""


class LoadProof:
    """Asks a class of transformers to load tensors of these names and shapes.

    Many tensors are checked by a child process without a GPU, because transformers changes torch's
    settings in the whole process meanwhile: not in a thread either.

    Raises:
        Exception: any model's code may run; nothing is proved.
    """

    def __init__(self, kind: type, config: Any, shapes: Mapping[str, Shape]) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._faults: LoadFaults | None = None
        if len(shapes) <= _FEW:
            self._faults = load_faults(kind, config, shapes)
            return
        names = [[one.__module__, one.__qualname__] for one in (kind, type(config))]
        question = [names, config.to_json_string(use_diff=False), shapes]
        with tempfile.TemporaryFile() as given:
            given.write(json.dumps(question).encode())
            given.seek(0)
            self._child = subprocess.Popen(  # noqa: S603 - our own program, by sys.executable
                [sys.executable, "-c", _PROGRAM, json.dumps(sys.path)],
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            )

    def answer(self) -> LoadFaults | None:
        """The faults, none of them if the folder loads; None while the child works.

        Raises:
            RuntimeError: the child has failed.
        """
        child = self._child
        if child is None or child.poll() is None:
            return self._faults
        content = child.communicate()[0]
        if child.returncode:
            raise RuntimeError(f"a child process ended with status {child.returncode}")
        return LoadFaults(*json.loads(content))

    def close(self) -> None:
        """End the child. Safe to call twice."""
        if self._child is not None:
            with self._child:  # it also closes the pipe
                self._child.kill()


def load_faults(kind: Any, config: Any, shapes: Mapping[str, Shape]) -> LoadFaults:
    """The faults, in this process. The random number generators stay as they are."""
    import torch  # noqa: PLC0415 - the child hides the GPUs first

    config = copy.deepcopy(config)
    config.dtype = torch.get_default_dtype()  # another one would be the default for a moment
    state = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    with _quiet(), torch.random.fork_rng(devices=[]):
        _, info = kind.from_pretrained(
            None,
            config=config,
            state_dict=state,
            device_map="meta",
            attn_implementation="eager",
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    mismatched = [one if isinstance(one, str) else one[0] for one in info["mismatched_keys"]]
    return LoadFaults(
        *(sorted(found) for found in (info["unexpected_keys"], info["missing_keys"], mismatched))
    )


@contextmanager
def _quiet() -> Iterator[None]:
    logging: Any = importlib.import_module("transformers.utils.logging")
    level, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL + 1)
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.set_verbosity(level)
        if has_bars:
            logging.enable_progress_bar()


def run() -> None:
    """Answer the question of standard input."""
    names, content, shapes = json.load(sys.stdin)
    with open(os.devnull, "w") as nowhere:
        answer, sys.stdout = sys.stdout, nowhere  # any model's code may print
        kind, config = (_class(*name) for name in names)
        faults = load_faults(kind, config.from_dict(json.loads(content)), shapes)
    print(json.dumps(faults), file=answer)


def _class(module: str, name: str) -> Any:
    if module.startswith("transformers_modules"):
        importlib.import_module("transformers.dynamic_module_utils").init_hf_modules()
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found
