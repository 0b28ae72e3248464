"""The error tree: all errors that syncd raises on purpose, with their exit codes.

::

    SyncdError                     1
    ├── InvalidSettingsError       2
    │   ├── NameTakenError         2
    │   ├── InvalidTransitionError 2
    │   └── TorchMissingError      2
    ├── RecordError                3
    │   └── ProtocolMismatchError  3
    ├── CheckpointError            4
    │   ├── ShardFormatError       4
    │   ├── PlacementError         4
    │   ├── CoverageError          4
    │   └── NonFiniteError         4
    ├── SaveNotReadyError          5
    ├── VersionGoneError           6
    ├── VerificationError          7
    ├── EngineMismatchError        8
    ├── WaitTimeoutError           9
    ├── SupersededError           10
    ├── JobUnavailableError       11
    ├── CancelledError            12
    ├── SaveFailedError           13
    ├── NoRoomError               14
    ├── EngineBrokenError         15
    ├── NotFollowingError         16
    ├── CommandFailedError        17
    ├── ServerError               18
    │   ├── ServerRefusedError    18
    │   ├── ServerUnreachableError 18
    │   └── ServerBusyError       18
    ├── UnfitStorageError         19
    ├── BroadcastError            20
    └── OutOfStepError            21

A command that ends with an error exits with the number of this error. Messages say what happened,
to which file, and what to do.
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
    """Raised when a participant has the name, or took it while this process counted as dead."""


class InvalidTransitionError(InvalidSettingsError):
    """Raised when a participant's next status cannot follow its present status."""


class TorchMissingError(InvalidSettingsError, ModuleNotFoundError):
    """Raised when torch or NumPy is not installed; the message has the command that installs it.

    Attributes:
        name: the missing module.
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
    """Raised when weights hold NaN or Inf, and ``--refuse-nonfinite`` refuses such a save."""


class SaveNotReadyError(SyncdError):
    """Raised when a save is not whole yet, or changed while it was read. Try again later."""

    exit_code = 5


class VersionGoneError(SyncdError):
    """Raised when a version was pruned before it could be leased. Load the newer version."""

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
    """Raised when an engine can load neither the new nor the old weights, or does not serve.

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
        status: the HTTP status of the answer, if the status reported the error; else None.
    """

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class ServerBusyError(ServerError, OSError):
    """Raised when a server cannot carry out a request now, but probably can later."""


class ServerUnreachableError(ServerError, OSError):
    """Raised when a server does not answer. Perhaps the server has carried out the request."""


class UnfitStorageError(SyncdError):
    """Raised when tests showed that a promise of syncd cannot hold on this storage."""

    exit_code = 19


class BroadcastError(SyncdError):
    """Raised when a broadcast of weights failed; do not serve any of the received weights."""

    exit_code = 20


class OutOfStepError(SyncdError):
    """Raised when the ranks of a trainer are not at the same point, so that training must end.

    A collective failed on one rank, or the ranks called a hook with different steps. In further
    training, ranks could answer each other's collectives by mistake.
    """

    exit_code = 21
