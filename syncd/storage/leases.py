"""Leases: what an explorer holds of the version that it serves.

A lease is a file in the folder of leases of a version; it names the session that keeps it.
"""

from __future__ import annotations

import errno
from pathlib import Path

from syncd.protocol.errors import VersionGoneError
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import lease_marker
from syncd.storage.errnos import is_gone, is_no_record
from syncd.storage.fsio import Storage


class Lease:
    """An explorer's hold on one version: while it is there, the version's files are.

    Made by :meth:`take`. Promised: from the moment ``take`` returns until ``release`` is called, or
    the session has been dead for the daemon's ``dead_reader_grace``, no file of the version goes.
    """

    def __init__(self, storage: Storage, path: Path, sequence: int) -> None:
        self._storage = storage
        self._path = path
        self.sequence = sequence

    @classmethod
    def take(
        cls, storage: Storage, layout: JobLayout, sequence: int, name: str, session: str
    ) -> Lease:
        """Lease a version.

        The lock file is created exclusively, in a folder that only the publisher makes: where that
        is gone, the version was retired.

        Raises:
            VersionGoneError: the version was retired: read LATEST again.
        """
        path = layout.lease_folder(sequence) / lease_marker(name, session)
        try:
            storage.close(storage.create(path))
        except FileExistsError:
            pass  # ours already: the name holds this very session
        except OSError as error:
            if is_gone(error) or is_no_record(error):  # no folder, or a link to one
                raise VersionGoneError(
                    f"version {sequence} of {layout.root} was retired before {name} leased it"
                ) from error
            raise
        return cls(storage, path, sequence)

    def release(self) -> None:
        """Let the version go. Safe to call twice.

        Raises:
            OSError: storage refused it, or the job is not there now: it is still held.
        """
        if self._storage.unlink_if_there(self._path):
            return
        leases = self._path.parent.parent
        if not self._storage.exists(leases):  # unmounted, say: our marker is not gone
            raise FileNotFoundError(errno.ENOENT, "the job is not there now", str(leases))
