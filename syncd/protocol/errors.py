"""The error tree: all errors that syncd raises on purpose.

::

    SyncdError                     1   the base class of all; never raised itself
    ├── InvalidSettingsError       2   an option, a name or a folder that cannot be used
    │   ├── NameTakenError         2   a name that a live participant has
    │   ├── InvalidTransitionError 2   a status that cannot follow the present status
    │   └── TorchMissingError      2   a feature that needs torch or NumPy, which is not installed
    ├── RecordError                3   a record of syncd that cannot be read
    │   └── ProtocolMismatchError  3   a record that a newer protocol wrote
    ├── CheckpointError            4   a save that can never be published; it is quarantined
    │   ├── ShardFormatError       4   a file not in torch.save's format, or with code to run
    │   ├── PlacementError         4   a placement or mesh that syncd does not know how to merge
    │   ├── CoverageError          4   pieces that overlap, leave gaps, or disagree
    │   └── NonFiniteError         4   weights with NaN or Inf, which --refuse-nonfinite refuses
    ├── SaveNotReadyError          5   a save not whole yet, or changed while it was read: retry
    ├── VersionGoneError           6   a version that was retired before it could be leased
    ├── VerificationError          7   a version whose bytes differ from its manifest
    ├── EngineMismatchError        8   weights that do not fit the engine: names, shapes, dtypes
    ├── WaitTimeoutError           9   no newer version was published in time
    ├── SupersededError           10   another daemon has taken over; stand by
    ├── JobUnavailableError       11   the job folder cannot be used now (missing, unmounted, busy)
    ├── CancelledError            12   an operation that the caller asked to stop
    ├── SaveFailedError          13   a trainer's save that did not become whole
    ├── NoRoomError              14   the disk has no room for the files that are to be written
    ├── EngineBrokenError        15   an engine whose weights are unknown
    ├── NotFollowingError        16   a background watcher that has ended by itself
    ├── CommandFailedError       17   a user's command that failed, or took too long
    ├── ServerError              18   a request that an inference server did not carry out
    │   ├── ServerRefusedError   18   a request that the server answered with an error
    │   ├── ServerUnreachableError 18 a server that does not answer (an OSError too)
    │   └── ServerBusyError      18   a request to repeat later (an OSError too)
    ├── UnfitStorageError        19   storage on which a promise of syncd cannot hold
    ├── BroadcastError           20   a broadcast that failed; the files still reach explorers
    └── OutOfStepError           21   a training whose ranks are at different points: end it

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
    """The base class of all errors that syncd raises on purpose."""

    exit_code: ClassVar[int] = 1


class InvalidSettingsError(SyncdError):
    """Raised when an option, a name or a folder given by the user cannot be used."""

    exit_code = 2


class NameTakenError(InvalidSettingsError):
    """Raised when another participant has the name, or took it while this one counted as dead."""


class InvalidTransitionError(InvalidSettingsError):
    """Raised when a participant's next status cannot follow its present status."""


class TorchMissingError(InvalidSettingsError, ModuleNotFoundError):
    """Raised when torch or NumPy is not installed; the message has the command that installs it.

    Attributes:
        name: the missing module, as in every ``ModuleNotFoundError``.
    """


class RecordError(SyncdError):
    """Raised when a file should hold a record of syncd, but holds none."""

    exit_code = 3


class ProtocolMismatchError(RecordError):
    """Raised when a record was written by a newer version of the protocol."""


class CheckpointError(SyncdError):
    """Raised when a save can never be published as it is; the daemon quarantines it."""

    exit_code = 4


class ShardFormatError(CheckpointError):
    """Raised when a file is not in ``torch.save``'s format, or its pickle would run code."""


class PlacementError(CheckpointError):
    """Raised when a tensor has a placement or a mesh that cannot be merged."""


class CoverageError(CheckpointError):
    """Raised when the pieces of a tensor overlap, leave gaps, or disagree on shape or dtype."""


class NonFiniteError(CheckpointError):
    """Raised when weights hold NaN or Inf, and the daemon's settings refuse such a save."""


class SaveNotReadyError(SyncdError):
    """Raised when a save is not whole yet, or changed while it was read. Try again later."""

    exit_code = 5


class VersionGoneError(SyncdError):
    """Raised when a version was retired before it could be leased. Load the newer version."""

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
    """Raised when no newer version was published within the given time."""

    exit_code = 9


class SupersededError(SyncdError):
    """Raised when another daemon took over this job. Since then this daemon has changed nothing."""

    exit_code = 10


class JobUnavailableError(SyncdError):
    """Raised when a job folder cannot be used now: missing, unmounted, read-only, or busy."""

    exit_code = 11


class CancelledError(SyncdError):
    """Raised when the caller asked an operation to stop; nothing was committed."""

    exit_code = 12


class SaveFailedError(SyncdError):
    """Raised when a trainer's save did not become whole; the previous version stays LATEST."""

    exit_code = 13


class NoRoomError(SyncdError):
    """Raised when storage has no room for the next write. No incomplete files stay on storage."""

    exit_code = 14


class EngineBrokenError(SyncdError):
    """Raised when an engine could load neither new nor previous weights, or does not serve.

    Attributes:
        refuses: True if the new version broke the engine. That version is not tried again.
    """

    exit_code = 15

    def __init__(self, message: str, *, refuses: bool = False) -> None:
        super().__init__(message)
        self.refuses = refuses


class NotFollowingError(SyncdError):
    """Raised when a background watcher has ended, so the engine gets no newer versions."""

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
        answer: the JSON of the answer; None if the answer is not JSON.
        status: the HTTP status of the answer, if the status reported the error; else None.
    """

    def __init__(self, message: str, *, answer: object = None, status: int | None = None) -> None:
        super().__init__(message)
        self.answer = answer
        self.status = status


class ServerBusyError(ServerError, OSError):
    """Raised when a server cannot carry out a request now, but probably can later."""


class ServerUnreachableError(ServerError, OSError):
    """Raised when a server does not answer. The server may have carried out the request."""


class UnfitStorageError(SyncdError):
    """Raised when tests showed that a promise of syncd cannot hold on this storage."""

    exit_code = 19


class BroadcastError(SyncdError):
    """Raised when a broadcast of weights failed; do not serve any of the received weights."""

    exit_code = 20


class OutOfStepError(SyncdError):
    """Raised when the ranks of a trainer are not at the same point, so that training must end.

    A collective has failed on one rank, or the ranks called a hook with unlike steps. If training
    continued, ranks could answer each other's collectives by mistake.
    """

    exit_code = 21
