"""The virtual environment that verl's merger runs in: verl wants other releases than syncd's tests.

In it are verl, and of its dependencies those that importing its merger needs, which
``verl-requirements.txt`` lists; nothing is replaced by a stub. torch is the one that the tests use.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

#: The release that :mod:`benchmarks.verl_merge` was written for.
VERL: Final = "0.9.1"
#: A test for its Python: it can import verl as :mod:`benchmarks.verl_merge` does.
IMPORT: Final = "import verl.model_merger.fsdp_model_merger"
_CHECK: Final = f"{IMPORT}, importlib.metadata as m; assert m.version('verl') == '{VERL}'"
_HERE: Final = Path(__file__).resolve().parent


def environment(folder: Path) -> Path:
    """The Python of the environment in a folder, made first if it is missing (1.4 GB)."""
    python = folder.resolve() / "bin" / "python"
    check = (python, "-c", _CHECK)
    if not python.exists() or subprocess.run(check, check=False).returncode:
        print(f"installing verl {VERL} into {folder}", file=sys.stderr)
        subprocess.run((sys.executable, "-m", "venv", "--clear", folder), check=True)
        pip = (python, "-m", "pip", "install", "--quiet")
        files = (_HERE.parent / "constraints.txt", _HERE / "verl-requirements.txt")
        subprocess.run((*pip, "-c", files[0], "-r", files[1]), check=True)
        # Its other dependencies are for training: wandb, datasets and the like.
        subprocess.run((*pip, "--no-deps", f"verl=={VERL}"), check=True)
        subprocess.run(check, check=True)
    return python
