"""``SmallFiles``: the files beside the weights, of which the last good ones stay."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from syncd.protocol.errors import InvalidSettingsError
from syncd.protocol.names import MODEL_CONFIG, printable

log = logging.getLogger(__name__)

#: A path below a folder → the content.
Files = Mapping[str, bytes]
#: Writes files into a given folder, and names each part of its work before it begins with it.
Writer = Callable[[Path], Iterable[object]]


class SmallFiles:
    """The small files of one run, made anew for each save.

    If their writer fails, the last good files stay for as long as the tensors do, because weights
    must not wait for a tokenizer. So they do if there are fewer files than before. They are kept in
    memory: scratch folders may fail, too.

    Attributes:
        tensors: the tensors beside the last good files; None if they are unknown.
    """

    def __init__(self) -> None:
        self.tensors: object = None
        self._last: Files | None = None
        self._warn = log.warning

    def files(self, write: Writer, tensors: object = None, names: Files | None = None) -> Files:
        """The files of a save, with those in ``names``. Call it once before any save, if possible.

        ``tensors`` changes with the names, shapes and dtypes of the tensors; None if they are
        unknown, or if others check them.

        Raises:
            InvalidSettingsError: the writer fails, and there are no good files of these tensors.
        """
        self._part: object = "model_files"
        are_same = self.tensors in {None, tensors}
        try:
            self._last = files_by(partial(self._write, write, are_same))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # also a SystemExit: other ranks wait for this one
            told = ""
            with suppress(Exception):  # its text may be broken, too
                told = printable(error)
            reason = f"{self._part} cannot be written: {type(error).__name__}: {told}"
            if self._last is None or not are_same:
                raise InvalidSettingsError(
                    f"{reason}. Mend this: no earlier files are for tensors of these names, shapes "
                    "and dtypes"
                ) from error
            self._warn("%s. Versions keep the last good files", reason)
            self._warn = log.debug
        self.tensors = tensors
        return {**self._last, **(names or {})}

    def _write(self, write: Writer, are_same: bool, folder: Path) -> None:
        for self._part in write(folder):
            pass
        for name in self._last or ():
            # Other tensors can have no generation config any more, but always a config.
            if (are_same or name == MODEL_CONFIG) and not (folder / name).exists():
                self._part = name
                raise FileNotFoundError("it is not there any more")


def files_by(write: Callable[[Path], object]) -> Files:
    """The files that a function writes: in a scratch folder, because libraries write in place."""
    with tempfile.TemporaryDirectory(prefix="syncd-") as scratch:
        write(Path(scratch))
        paths = filter(Path.is_file, Path(scratch).rglob("*"))
        return {path.relative_to(scratch).as_posix(): path.read_bytes() for path in paths}
