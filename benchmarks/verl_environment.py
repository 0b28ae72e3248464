"""The virtual environment of verl, because verl needs other releases than syncd's tests.

It has verl, what its merger and its checkpoint engines import (``verl-requirements.txt``), and what
syncd needs. The release of torch is the same as in the tests.
"""

import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.engines.environment import own_requirements

#: The release of verl for which :mod:`benchmarks.verl_merge` was written.
VERL: Final = "0.9.1"
#: A program that tests if the environment can import verl's merger.
IMPORT: Final = "import verl.model_merger.fsdp_model_merger"
_CHECK: Final = (
    f"{IMPORT}, verl.workers.engine_workers, watchdog, importlib.metadata as m; "
    f"assert m.version('verl') == '{VERL}'"
)
_HERE: Final = Path(__file__).resolve().parent


def environment(folder: Path) -> Path:
    """The Python of the environment in a folder; make the environment if necessary (1.4 GB)."""
    python = folder.resolve() / "bin" / "python"
    check = (python, "-c", _CHECK)
    if not python.exists() or subprocess.run(check, check=False).returncode:
        print(f"installing verl {VERL} into {folder}", file=sys.stderr)
        subprocess.run((sys.executable, "-m", "venv", "--clear", folder), check=True)
        pip = (python, "-m", "pip", "install", "--quiet")
        files = (_HERE.parent / "constraints.txt", _HERE / "verl-requirements.txt")
        subprocess.run((*pip, "-c", files[0], "-r", files[1], *own_requirements()), check=True)
        # verl's other dependencies are for training, for example wandb and datasets.
        subprocess.run((*pip, "--no-deps", f"verl=={VERL}"), check=True)
        subprocess.run(check, check=True)
    return python
