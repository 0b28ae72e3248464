"""The events of saves, versions and deltas."""

from __future__ import annotations

import logging
from pathlib import Path

from syncd.protocol.amounts import size
from syncd.protocol.events import ErrorEvent, Event, Fault, InfoEvent, WarningEvent
from syncd.protocol.names import in_words
from syncd.protocol.records import Kind, Names, NonFinite

# -- saves and their merges ----------------------------------------------------------------------


class AdapterIgnored(WarningEvent):
    """``lora_adapter/`` lies beside weights that hold no adapter."""

    text = (
        "{path}: lora_adapter/ does not count, because the weights beside it have no tensors of an "
        "adapter. Remove what an older save has left there"
    )
    path: Path


class AdapterWithoutBase(WarningEvent):
    """The adapter does not name its base model."""

    text = (
        "{path}: adapter_config.json has no base_model_name_or_path, so the version does not name "
        "the base model of the adapter. Load the adapter only on the right base model"
    )
    path: Path


class CastTwice(WarningEvent):
    """The daemon casts weights that the trainer has already cast."""

    text = (
        "{path}: the trainer has already cast the weights (SaveSettings.sync_dtype), and the "
        "daemon rounds them again (cast or --dtype). Set only one of these settings"
    )
    path: Path


class MergeEnded(WarningEvent):
    """A late merge was stopped."""

    text = "step {step}: {reason}"
    step: int
    reason: str


class MergeLate(WarningEvent):
    """A merge takes far too long."""

    text = (
        "the merge of step {step} takes far longer than the size of its tensors explains. Check "
        "whether storage is slow, or whether the files in {folder_} are far larger than their "
        "tensors. Other jobs no longer wait for this merge, and syncd cancels it when a newer save "
        "is announced"
    )
    step: int
    folder_: Path


class SaveFault(Fault):
    """A bug in syncd keeps the daemon from publishing the save."""

    text = "quarantined step {step}: a bug in syncd (recorded in {path})"
    line = counter = "quarantined"
    step: int
    path: Path
    why_: str
    error_: Exception


class SaveQuarantined(ErrorEvent):
    """The save can never be published; the record is at ``path``."""

    text = "quarantined step {step}: {reason} (recorded in {path})"
    line = counter = "quarantined"
    step: int
    reason: object
    path: Path


class DeltaMade(InfoEvent):
    """The save is a delta, under the number of a version to come."""

    event_name = "save_linked"
    line = counter = "linked"
    renamed = Event.renamed | {"bytes": "delta_bytes"}
    version: int
    step: int
    bytes: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"serving step {self.step} ahead of v{self.version}, by a delta: {size(self.bytes)} in "
            f"{self.seconds:.2f} s"
        )


class SaveNamed(DeltaMade):
    """The save is served from its trainer's own files, under the number of a version to come."""

    def __str__(self) -> str:
        return (
            f"serving step {self.step} ahead of v{self.version}, by the trainer's files: "
            f"{size(self.bytes)} in {self.seconds:.2f} s"
        )


class DeltasStopped(WarningEvent):
    """No delta is made until the next full version."""

    event_name = "links_closed"
    text = "no delta of step {step}: {reason}. The trainer saves whole weights next"
    line = "closed"
    step: int
    reason: str


class FoldDelayed(WarningEvent):
    """Deltas could not be folded into a full version; the daemon tries again."""

    text = "the deltas to step {step} could not be folded: {reason}"
    step: int
    reason: object


class SaveSkipped(InfoEvent):
    """The pointer names a newer step."""

    text = "skipped step {step}: a newer one was announced"
    line = counter = "skipped"
    step: int


class Waiting(InfoEvent):
    """The next save is not published yet."""

    text = "waiting: {reason}"
    reason: str


# -- versions ------------------------------------------------------------------------------------


class ModelConfigChanged(WarningEvent):
    """Settings of ``config.json`` differ from version ``before``; ``changes`` has at most eight."""

    text = (
        "config.json of v{version} differs from the config.json of v{before}: "
        "{changes_}. Engines that reload only the weights keep the old settings. Restart these "
        "engines if the settings matter"
    )
    version: int
    step: int
    before: int
    changes: list[str]
    changes_: str


class ModelFilesWrong(WarningEvent):
    """The small files of a version do not describe its weights; once a run for each ``flaw``."""

    text = "{path}: {reason}"
    path: Path
    flaw: str
    reason: str


class RollbackRefused(ErrorEvent):
    """The requested version cannot be served."""

    text = "no rollback to v{version} for {by_}: {reason}"
    line = "refused"
    renamed = Event.renamed | {"version": "of"}
    version: int
    reason: object
    by_: str


class VersionAdopted(InfoEvent):
    """The daemon wrote a version to LATEST that an earlier daemon finished."""

    text = "adopted v{version} of step {step}, which an earlier daemon had finished"
    line = "adopted"
    version: int
    step: int
    kind_: Kind


class VersionDamaged(WarningEvent):
    """A version differs from its manifest."""

    text = "{path} is damaged: {reason}"
    path: Path
    reason: object


class LatestUnusable(VersionDamaged):
    """The version that LATEST names cannot be used."""

    level = logging.ERROR
    text = (
        "{reason}. The daemon cannot use this version, so it publishes the trainer's newest save "
        "again"
    )


class VersionDiscarded(WarningEvent):
    """The daemon removes an unfinished version of an earlier daemon."""

    text = "discarding v{version}: it is incomplete"
    version: int


class VersionLive(InfoEvent):
    """An explorer began to serve the version.

    ``seconds`` begins with the update of LATEST. The engine did not serve for ``pause`` seconds.
    """

    text = "v{version} is live on {explorer}"
    line = "live"
    level = logging.DEBUG
    version: int
    explorer: str
    seconds: float | None
    pause: float | None
    ago_: float
    is_first_: bool


class VersionNames(InfoEvent):
    """Tensors have other names than before, or the hub's names differ from the trainer's.

    ``warning``: explorers do not accept the hub's names.
    """

    line = "names"
    version: int
    step: int
    names: Names
    before: Names | None
    reason: str | None

    def __str__(self) -> str:
        before = f"; in the previous version they had the names of the {self.before}"
        told = f"v{self.version}: tensors have the names of the {self.names}"
        return told + before if self.before else told


class TrainerNames(VersionNames):
    """Explorers do not accept the hub's names."""

    level = logging.WARNING

    def __str__(self) -> str:
        but = "'syncd run --names hub' chooses the hub's names"
        return f"{super().__str__()}, because {self.reason}; {but}"


class VersionNonfinite(WarningEvent):
    """At least ``count`` tensors have NaN or Inf; ``tensors`` names the first ones."""

    text = (
        "v{version} of step {step} has {found_} in the weights that the trainer saved. "
        "Check the training. 'syncd rollback' serves an older version again"
    )
    version: int
    step: int
    count: int
    tensors: list[str]
    found_: NonFinite


class VersionPublished(InfoEvent):
    """A save became a version.

    ``seconds`` begins with the merge, ``latency_seconds`` when the daemon first saw the save.
    """

    line = counter = "published"
    version: int
    step: int
    kind: Kind
    bytes: int
    seconds: float
    latency_seconds: float
    why_: str | None

    def __str__(self) -> str:
        return (
            f"published step {self.step} as v{self.version}: {size(self.bytes)} in "
            f"{self.seconds:.2f} s"
        )


class VersionFolded(VersionPublished):
    """Deltas became a full version; ``seconds`` begins with the fold."""

    def __str__(self) -> str:
        return f"{super().__str__()}, folded from deltas"


class VersionRolledBack(InfoEvent):
    """Version ``of`` was published again, as ``version``."""

    text = "v{of} is served again, as v{version}: asked for by {by}"
    line = counter = "rolled_back"
    of: int
    version: int
    step: int
    by: str
    kind_: Kind


# -- deltas ---------------------------------------------------------------------------------------


class DeltaDiscarded(WarningEvent):
    """The daemon removes a delta above LATEST that does not lead from LATEST's version."""

    event_name = "delta_discarded"
    text = "discarding the delta to v{version}, which does not lead from LATEST's version"
    version: int


# -- deletions -----------------------------------------------------------------------------------


class Pruned(InfoEvent):
    """A ``version``, ``delta``, ``step`` or ``lease`` was deleted."""

    what: str
    name: str
    reason: str

    def __str__(self) -> str:
        return f"pruned {self.what} {in_words(self.name)}: {self.reason}"


class PutBack(InfoEvent):
    """The daemon restored a step folder instead of deleting it."""

    text = "putting {path} back: {reason}"
    path: Path
    reason: str
