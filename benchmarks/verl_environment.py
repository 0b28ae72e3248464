"""The virtual environment of verl, because verl needs other releases than syncd's tests.

It has verl, what its merger and its checkpoint engines import (``verl-requirements.txt``), and what
syncd needs. The release of torch is the same as in the tests.
"""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from tests.engines.environment import own_requirements

#: The release of verl for which :mod:`benchmarks.verl_merge` was written.
VERL = "0.9.1"
#: A program that tests if the environment can import verl's merger.
IMPORT = "import verl.model_merger.fsdp_model_merger"
_CHECK = (
    f"{IMPORT}, verl.workers.engine_workers, watchdog, importlib.metadata as m; "
    f"assert m.version('verl') == '{VERL}'"
)
_HERE = Path(__file__).resolve().parent


def environment(folder: Path) -> Path:
    """The Python of the environment in a folder; make the environment if necessary (1.4 GB)."""
    # verl's other dependencies are for training, for example wandb and datasets.
    return made(folder, _CHECK, ("-r", _HERE / "verl-requirements.txt"), f"verl=={VERL}")


def made(folder: Path, check: str, requirements: Iterable[str | Path], *bare: str) -> Path:
    """The Python of an environment that passes a check, in a folder; make it if necessary.

    ``bare`` are wheels, and options of pip, that are installed without what the wheels require.
    """
    python = folder.resolve() / "bin" / "python"
    checked = (python, "-c", check)
    if not python.exists() or subprocess.run(checked, check=False).returncode:
        print(f"installing {' '.join(bare)} into {folder}", file=sys.stderr)
        subprocess.run((sys.executable, "-m", "venv", "--clear", folder), check=True)
        pip = (python, "-m", "pip", "install", "--quiet")
        pinned = ("-c", _HERE.parent / "constraints.txt", *requirements, *own_requirements())
        subprocess.run((*pip, *pinned), check=True)
        subprocess.run((*pip, "--no-deps", *bare), check=True)
        subprocess.run(checked, check=True)
    return python
