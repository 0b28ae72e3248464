"""The error tree: everything that syncd raises on purpose.

::

    SyncdError                     1   base of all; never raised itself
    ├── InvalidSettingsError       2   an option, a name or a folder that cannot be used
    │   ├── NameTakenError         2   … because a live participant has that name
    │   ├── InvalidTransitionError 2   … a status that cannot follow the one that is
    │   └── TorchMissingError      2   … because it needs torch, which is not installed
    ├── RecordError                3   a record of syncd's that cannot be read
    │   └── ProtocolMismatchError  3   … because a newer protocol wrote it
    ├── CheckpointError            4   a save that can never be published as it is: quarantined
    │   ├── ShardFormatError       4   a file not in torch.save's format, or asking for code
    │   ├── PlacementError         4   a placement or mesh that syncd does not know how to merge
    │   ├── CoverageError          4   pieces that overlap, leave gaps, or disagree
    │   └── NonFiniteError         4   weights with NaN or Inf, which --refuse-nonfinite refuses
    ├── SaveNotReadyError          5   a save that is not whole yet, or changed under way: retry
    ├── VersionGoneError           6   a version that was retired before it could be leased
    ├── VerificationError          7   a version whose bytes differ from its manifest
    ├── EngineMismatchError        8   weights that do not fit the engine: names, shapes, dtypes
    ├── WaitTimeoutError           9   nothing newer came in time
    ├── SupersededError           10   another daemon has taken over; stand by
    ├── JobUnavailableError       11   the job folder cannot be used now (missing, unmounted, busy)
    ├── CancelledError            12   asked to stop in the middle of something
    ├── SaveFailedError          13   a trainer's save that did not become whole
    ├── NoRoomError              14   the disk has no room for the files that are to be written
    ├── EngineBrokenError        15   an engine whose weights are unknown
    ├── NotFollowingError        16   a background watcher that has ended by itself
    ├── CommandFailedError       17   a command of the user's that did not take a version
    ├── ServerError              18   an inference server that was asked for something
    │   ├── ServerRefusedError   18   … and says that it did not do it
    │   ├── ServerUnreachableError 18 … and does not answer (an OSError too)
    │   └── ServerBusyError      18   … and cannot do it now: try again (an OSError too)
    ├── UnfitStorageError        19   storage on which a promise of syncd's cannot hold
    ├── BroadcastError           20   weights that did not travel by broadcast; the files still do
    └── OutOfStepError           21   a training whose ranks are in different collectives: end it

The number is the exit code of a command that ends with that error. Messages say what happened, to
which file, and what to do.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "BroadcastError",
    "CancelledError",
    "CheckpointError",
    "CommandFailedError",
    "CoverageError",
    "EngineBrokenError",
    "EngineMismatchError",
    "InvalidSettingsError",
    "InvalidTransitionError",
    "JobUnavailableError",
    "NameTakenError",
    "NoRoomError",
    "NonFiniteError",
    "NotFollowingError",
    "OutOfStepError",
    "PlacementError",
    "ProtocolMismatchError",
    "RecordError",
    "SaveFailedError",
    "SaveNotReadyError",
    "ServerBusyError",
    "ServerError",
    "ServerRefusedError",
    "ServerUnreachableError",
    "ShardFormatError",
    "SupersededError",
    "SyncdError",
    "TorchMissingError",
    "UnfitStorageError",
    "VerificationError",
    "VersionGoneError",
    "WaitTimeoutError",
]


class SyncdError(Exception):
    """Base of the tree; catch it to catch everything that syncd raises on purpose."""

    exit_code: ClassVar[int] = 1


class InvalidSettingsError(SyncdError):
    """Raised when an option, a name or a folder given by the user cannot be used."""

    exit_code = 2


class NameTakenError(InvalidSettingsError):
    """Raised when a live participant has the name, or took it while this one counted as dead."""


class InvalidTransitionError(InvalidSettingsError):
    """Raised when a participant's status cannot follow the one that it has."""


class TorchMissingError(InvalidSettingsError, ModuleNotFoundError):
    """Raised when torch or NumPy is needed and not installed; the message has the command.

    Attributes:
        name: the module that is missing, as in any ``ModuleNotFoundError``.
    """


class RecordError(SyncdError):
    """Raised when a file that should hold a record of syncd does not."""

    exit_code = 3


class ProtocolMismatchError(RecordError):
    """Raised when a record was written by a newer version of the protocol."""


class CheckpointError(SyncdError):
    """Raised when a save can never be published as it is; the daemon quarantines it."""

    exit_code = 4


class ShardFormatError(CheckpointError):
    """Raised when a file is not in ``torch.save``'s format, or its pickle asks for code to run."""


class PlacementError(CheckpointError):
    """Raised when a tensor has a placement or a mesh that cannot be merged."""


class CoverageError(CheckpointError):
    """Raised when the pieces of a tensor overlap, leave gaps, or disagree on shape or dtype."""


class NonFiniteError(CheckpointError):
    """Raised when weights hold NaN or Inf, and the daemon is told to refuse such a save."""


class SaveNotReadyError(SyncdError):
    """Raised when a save is not whole yet, or changed while it was read: look again later."""

    exit_code = 5


class VersionGoneError(SyncdError):
    """Raised when a version was retired before it could be leased: take the newer one."""

    exit_code = 6


class VerificationError(SyncdError):
    """Raised when a version's files differ from its manifest.

    Attributes:
        sequence: the sequence of the version, if it is known.
    """

    exit_code = 7

    def __init__(self, message: str, *, sequence: int | None = None) -> None:
        super().__init__(message)
        self.sequence = sequence


class EngineMismatchError(SyncdError):
    """Raised when a version's tensors do not fit the engine; the engine is untouched."""

    exit_code = 8


class WaitTimeoutError(SyncdError):
    """Raised when nothing newer was published within the time given."""

    exit_code = 9


class SupersededError(SyncdError):
    """Raised when another daemon has taken over this job; this one has changed nothing since."""

    exit_code = 10


class JobUnavailableError(SyncdError):
    """Raised when a job folder cannot be used now: missing, unmounted, read-only, or busy."""

    exit_code = 11


class CancelledError(SyncdError):
    """Raised when the caller asked to stop in the middle of something; nothing was committed."""

    exit_code = 12


class SaveFailedError(SyncdError):
    """Raised when a trainer's save did not become whole; the version before it stays."""

    exit_code = 13


class NoRoomError(SyncdError):
    """Raised when storage has no room for the next write; nothing is half done."""

    exit_code = 14


class EngineBrokenError(SyncdError):
    """Raised when an engine took neither the new weights nor its previous ones again.

    It is also raised when the engine has weights but does not serve.

    Attributes:
        refuses: True if the new version broke the engine: that version is not tried again.
    """

    exit_code = 15

    def __init__(self, message: str, *, refuses: bool = False) -> None:
        super().__init__(message)
        self.refuses = refuses


class NotFollowingError(SyncdError):
    """Raised when a background watcher has ended, so the engine stays behind."""

    exit_code = 16


class CommandFailedError(SyncdError):
    """Raised when the user's command, which was given a version, failed or took too long."""

    exit_code = 17


class ServerError(SyncdError):
    """Raised when an inference server did not carry out a request, or did not confirm it."""

    exit_code = 18


class ServerRefusedError(ServerError):
    """Raised when a server answers with an error.

    Attributes:
        answer: the answer's JSON; None if it has none.
        status: the HTTP status; None if the answer itself was not an error.
    """

    def __init__(self, message: str, *, answer: object = None, status: int | None = None) -> None:
        super().__init__(message)
        self.answer = answer
        self.status = status


class ServerBusyError(ServerError, OSError):
    """Raised when a server cannot carry out a request now: it may well do so later."""


class ServerUnreachableError(ServerError, OSError):
    """Raised when a server does not answer: the request may have been carried out, or not."""


class UnfitStorageError(SyncdError):
    """Raised when storage was measured, and a promise of syncd's cannot hold on it."""

    exit_code = 19


class BroadcastError(SyncdError):
    """Raised when weights did not travel by broadcast: no part of them may be served.

    The message has the reason. The same weights travel by the checkpoint path.
    """

    exit_code = 20


class OutOfStepError(SyncdError):
    """Raised when a collective failed on one rank of a training, which must not go on.

    The other ranks may still be in that collective, and would mistake this rank's next one for it.
    """

    exit_code = 21
