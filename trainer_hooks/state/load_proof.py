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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, Final, NamedTuple

from syncd.checkpoint.placement import Shape
from syncd.checkpoint.tensor_rules import shown

#: The most tensors that are checked in this process: about a second.
_FEW: Final = 2000
_PROGRAM: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from trainer_hooks.state.load_proof import run; run()"
)


class LoadFault(NamedTuple):
    """The reason why a folder does not load, as a clause, and the names that are not known."""

    reason: str = ""
    unknown: Sequence[str] = ()


def prove(kind: type, config: Any, shapes: Mapping[str, Shape]) -> Iterator[LoadFault | None]:
    """Ask a class of transformers to load tensors of these names and shapes.

    Many tensors are checked by a child process without a GPU: transformers changes torch's settings
    in the whole process meanwhile, so a thread would not do. Yields None while the child works, and
    the answer at last.

    Raises:
        Exception: nothing is proved; any model's code may run.
    """
    if len(shapes) <= _FEW:
        yield load_fault(kind, config, shapes)
        return
    names = [[one.__module__, one.__qualname__] for one in (kind, type(config))]
    with tempfile.TemporaryFile("w+") as question:
        json.dump([names, config.to_json_string(use_diff=False), shapes], question)
        question.seek(0)
        child = subprocess.Popen(  # noqa: S603 - our own program, by sys.executable
            [sys.executable, "-c", _PROGRAM, json.dumps(sys.path)],
            stdin=question,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )
    with child:
        try:
            while child.poll() is None:
                yield None
            yield LoadFault(*json.loads(child.communicate()[0]))
        finally:
            child.kill()


def load_fault(kind: Any, config: Any, shapes: Mapping[str, Shape]) -> LoadFault:
    """The answer, in this process. The random number generators stay as they are."""
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
    for verb, key in (
        ("does not know", "unexpected_keys"),
        ("misses", "missing_keys"),
        ("expects another shape of", "mismatched_keys"),
    ):
        names = sorted(one if isinstance(one, str) else one[0] for one in info[key])
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            reason = f"{kind.__name__}.from_pretrained {verb} {shown(names[0])}{more}"
            return LoadFault(reason, names if key == "unexpected_keys" else ())
    return LoadFault()


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
    answer, sys.stdout = sys.stdout, sys.stderr  # any model's code may print
    importlib.import_module("transformers.dynamic_module_utils").init_hf_modules()
    kind, config = (attrgetter(name)(importlib.import_module(module)) for module, name in names)
    print(json.dumps(load_fault(kind, config.from_dict(json.loads(content)), shapes)), file=answer)
