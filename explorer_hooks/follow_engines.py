"""What ``syncd follow`` gives versions to: a command, or whoever reads a link."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import subprocess
from pathlib import Path
from typing import Final

from explorer_hooks.engines.base import InProcessEngine
from explorer_hooks.fitting import Fits
from explorer_hooks.reader import LeasedVersion
from syncd.protocol.errors import CommandFailedError, InvalidSettingsError
from syncd.protocol.names import TEMPORARY
from syncd.storage.fsio import Storage

log = logging.getLogger(__name__)

_SHELL: Final = "/bin/sh"


class CommandEngine(InProcessEngine):
    """Runs a command for each version; it has taken the version when it ends with 0.

    The command is a shell's. Its environment has ``SYNCD_FOLDER``, ``SYNCD_STEP``,
    ``SYNCD_SEQUENCE``, ``SYNCD_KIND`` and, of kind ``remote``, ``SYNCD_REMOTE_PATH``.

    Args:
        command: what the shell is given.
        timeout: seconds, after which it is killed with all that it has started.
        fits: what versions are compared with first; None for the version that it took before.
    """

    kinds: frozenset[str] = frozenset({"full", "adapter", "remote"})

    def __init__(self, command: str, *, timeout: float, fits: Fits | None = None) -> None:
        self._command = command
        self._timeout = timeout
        self._fits = fits
        self._learns = fits is None

    def check(self, version: LeasedVersion) -> None:
        """Compare a full model with the base model, or with what the command took before."""
        if self._fits is not None:
            self._fits.check(version)

    def load(self, version: LeasedVersion) -> None:
        """Run the command, and wait for its end.

        Raises:
            CommandFailedError: it ended with another status than 0, or not in time.
        """
        told = {
            "SYNCD_FOLDER": str(version.folder),
            "SYNCD_STEP": str(version.step),
            "SYNCD_SEQUENCE": str(version.sequence),
            "SYNCD_KIND": version.kind,
        }
        if version.remote_path is not None:
            told["SYNCD_REMOTE_PATH"] = version.remote_path
        process = subprocess.Popen(  # noqa: S603 # running the user's own command is what it is for
            [_SHELL, "-c", self._command],
            env=os.environ | told,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            status = process.wait(self._timeout)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            raise CommandFailedError(
                f"the command was not done with version {version.sequence} in "
                f"{self._timeout:g} s, and was killed: give it longer, or see what it waits for"
            ) from error
        if status:
            raise CommandFailedError(
                f"the command ended with status {status} for version {version.sequence}, step "
                f"{version.step}, in {version.folder}"
            )
        if self._learns and version.kind == "full":
            self._fits = Fits(version.manifest, whose="what the command took before")


class LinkEngine(InProcessEngine):
    """Lets a symbolic link lead to each version's folder, by one rename.

    Args:
        path: the link; a link that is there is replaced, and nothing else ever is.
        fits: what versions are compared with first; None for nothing.

    Raises:
        InvalidSettingsError: something else than a link is there, or its folder is not.
    """

    kinds: frozenset[str] = frozenset({"full", "adapter"})

    def __init__(self, path: Path, *, fits: Fits | None = None) -> None:
        self._path = path.absolute()
        self._fits = fits
        self._storage = Storage()
        if not self._path.parent.is_dir():
            raise InvalidSettingsError(f"{self._path.parent} is not there: make it first")
        if os.path.lexists(self._path) and not self._path.is_symlink():
            raise InvalidSettingsError(
                f"{self._path} is no link, and is not replaced: move it away, or name another path"
            )

    @property
    def target(self) -> Path | None:
        """Where the link leads now; None where there is none."""
        return Path(os.readlink(self._path)) if self._path.is_symlink() else None

    def check(self, version: LeasedVersion) -> None:
        """Compare a full model with the base model, where one is given."""
        if self._fits is not None:
            self._fits.check(version)

    def load(self, version: LeasedVersion) -> None:
        """Move the link.

        Raises:
            OSError: storage refused; the link is as it was.
        """
        draft = self._path.with_name(f"{TEMPORARY}{self._path.name}-{secrets.token_hex(6)}")
        self._storage.symlink(version.folder, draft)
        try:
            self._storage.rename(draft, self._path)
        except OSError:
            self._storage.unlink_if_there(draft)
            raise
        self._storage.sync_folder(self._path.parent)
        log.info("%s leads to %s", self._path, version.folder)
