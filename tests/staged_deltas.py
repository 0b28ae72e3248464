"""A job with a version, deltas that lead from it, and the versions that folds would make."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from explorer_hooks.staging import Staging
from syncd.checkpoint.version import verify_version
from syncd.coordination.leased_version import LeasedVersion
from syncd.coordination.versions import Lead
from syncd.deltas.delta_index import DeltaFolder
from syncd.deltas.whole_version import WholeVersion
from syncd.protocol.names import MANIFEST, version_folder
from syncd.protocol.records import Latest, Tip
from syncd.storage.job import Job
from tests.deltas import STORAGE, changed, contents, random_tensors, write_version
from tests.jobs import SmallJob
from tests.saved_deltas import delta_folder
from tests.storages import RuledStorage

SHAPES: dict[str, tuple[str, tuple[int, ...]]] = {
    "embed": ("BF16", (300, 100)),
    "norm": ("F32", (64,)),
    "head": ("BF16", (100, 40)),
}
SMALL: Mapping[str, bytes] = {"config.json": b"{}", "tokenizer/vocab.json": b"[]"}


class Unheld:
    """A test's versions stay by themselves."""

    def release(self) -> None:
        """Do nothing."""


class DeltaChain:
    """Version 1 of a job, and deltas to the next saves, of which the last is the tip.

    Args:
        job: the job.
        folder: for the versions that folds would make.
        saves: the number of saves, the first of which is published.
        world_size: the number of files of a delta.
        shapes: the dtype and shape of each tensor.
        small: the other files of a version.

    Attributes:
        storage: of the explorers.
        whole: the versions, from the first on; only the first is published.
        deltas: the delta to the second save, and so on.
        holds: the number of times that LATEST's version was held.
    """

    def __init__(
        self,
        job: SmallJob,
        folder: Path,
        saves: int = 3,
        *,
        world_size: int = 2,
        shapes: Mapping[str, tuple[str, tuple[int, ...]]] = SHAPES,
        small: Mapping[str, bytes] = SMALL,
    ) -> None:
        self.job = job
        self.storage = RuledStorage()
        self.holds = 0
        self._folds = folder / "folds"
        self._folds.mkdir()
        job.layout.published.mkdir(exist_ok=True)
        job.layout.deltas.mkdir()
        self._world_size = world_size
        self.tensors: list[dict[str, Any]] = [random_tensors(1, **shapes)]
        first, *others = shapes
        given = {"files": [others, [first]], "small": small, "metadata": {"format": "pt"}}
        self._given = given
        self.whole = [write_version(job.layout.published, 1, self.tensors[0], **given)]
        self.deltas: list[DeltaFolder] = []
        self._publish(self.whole[0])
        for _ in range(saves - 1):
            self.add_delta()

    def add_delta(self) -> None:
        """Let the next save be the tip."""
        old, number = self.tensors[-1], len(self.tensors) + 1
        new = changed(old, 0.03, number)
        self.tensors.append(new)
        self.whole.append(write_version(self._folds, number, new, **self._given))
        base, target = (f"run-{n}-{n}" for n in (number - 1, number))
        folder = self.job.layout.delta(number)
        self.deltas.append(delta_folder(folder, base, target, old, new, self._world_size))
        self.put(tip=Tip(sequence=number, step=number, save_id=target))

    def put(self, **changes: object) -> None:
        """Change LATEST."""
        self.job.put_record(self.job.layout.latest, self.latest.model_copy(update=changes))

    def publish(self, number: int) -> None:
        """Publish the fold of a save; there is no tip."""
        whole = self.whole[number - 1]
        shutil.move(whole.folder, folder := self.job.layout.version(number))  # another filesystem
        self.whole[number - 1] = WholeVersion(folder, whole.manifest)
        self._publish(self.whole[number - 1])

    def _publish(self, version: WholeVersion) -> None:
        manifest = version.manifest
        self.job.lease_folder(manifest.sequence).mkdir()
        latest = Latest(
            sequence=manifest.sequence,
            step=manifest.step,
            folder=version_folder(manifest.sequence),
            save_id=manifest.save_id,
        )
        self.job.put_record(self.job.layout.latest, latest)

    @property
    def latest(self) -> Latest:
        return self.job.latest

    def lead(self) -> Lead:
        """What explorers find in LATEST."""
        assert self.latest.tip is not None
        return Lead(Job(self.storage, self.job.layout), self.latest, self.latest.tip)

    def version(self, number: int) -> LeasedVersion:
        """A published version."""
        whole = self.whole[number - 1]
        return LeasedVersion(self.storage, whole.folder, whole.manifest, Unheld())

    def hold(self) -> LeasedVersion:
        self.holds += 1
        return self.version(self.latest.sequence)

    def follow(self, staging: Staging) -> LeasedVersion:
        """Make a copy of the tip, and compare it with the fold."""
        copy = staging.follow(self.lead(), self.hold)
        self.check(copy, self.lead().tip.sequence)
        return copy

    def check(self, copy: LeasedVersion, number: int) -> None:
        """A copy has the files of a fold and the manifest of its own bytes."""
        own, whole = contents(copy.folder), contents(self.whole[number - 1].folder)
        del own[MANIFEST], whole[MANIFEST]
        assert own == whole
        verify_version(STORAGE, copy.folder, copy.manifest)
        assert (copy.sequence, copy.step) == (number, number)
        assert copy.manifest.save_id == f"run-{number}-{number}"


def copies(stage: Path) -> list[str]:
    """The copies in a stage folder, without the spare one."""
    (room,) = stage.iterdir()
    found = [path.name for path in room.iterdir() if path.is_dir() and path.name != ".tmp-spare"]
    return sorted(name.partition("-")[0] for name in found)


def state(folder: Path) -> list[tuple[str, int, int, bytes]]:
    """What of a folder's files must stay as it is."""
    return [
        (str(path), (status := path.stat()).st_ino, status.st_mtime_ns, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    ]
