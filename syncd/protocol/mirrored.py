"""The records of a mirror, and the pure rules for what is pushed and what is kept.

The objects below a mirror's URL::

    versions/000000000000000017.json   a MirroredVersion; the highest number is the newest
    objects/DIGEST-SIZE                a file of a version or of a delta, by its xxh3-128

No object ever changes. A version is there once its record is, which only its first pusher can make.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Annotated, Final

from pydantic import FailFast, Field

from syncd.protocol.records import (
    Digest,
    Fields,
    Kind,
    NonFinite,
    Record,
    RelativePath,
    Seconds,
    Sequence,
    Size,
    Step,
    Text,
)

VERSIONS: Final = "versions"
OBJECTS: Final = "objects"
#: The most deltas on a whole version.
LONGEST: Final = 32
#: The most bytes of all deltas, as a fraction of the whole version's bytes.
MOST: Final = 0.5


class MirroredFile(Fields):
    """A file; its object has its xxh3-128 and its size as name.

    ``index`` is the xxh3-128 of the index in a delta's file; None for other files.
    """

    name: RelativePath
    size: Size
    digest: Digest
    index: Digest | None = None

    @property
    def key(self) -> str:
        """The name of its object."""
        return f"{OBJECTS}/{self.digest}-{self.size}"


class MirroredSave(Fields):
    """The weights of a version, or, in all but the first of a list, what changed since the last."""

    sequence: Sequence
    step: Step
    save_id: str
    files: Annotated[tuple[MirroredFile, ...], FailFast()]
    nonfinite: NonFinite | None = None

    @property
    def size(self) -> int:
        """The bytes of all files."""
        return sum(file.size for file in self.files)


class MirroredVersion(Record):
    """A version: a whole one and deltas on it, the last of which makes this version.

    Attributes:
        job: the id of the job (``format.json``) whose versions these are.
        kind: ``full`` or ``adapter``.
        saves: the whole version, and the deltas in order.
        small: the files beside the weights, the same for all ``saves``.
    """

    job: str
    kind: Kind
    saves: Annotated[tuple[MirroredSave, ...], FailFast(), Field(min_length=1)]
    small: Annotated[tuple[MirroredFile, ...], FailFast()] = ()

    @property
    def last(self) -> MirroredSave:
        """The save that is this version."""
        return self.saves[-1]

    def files(self) -> Iterator[MirroredFile]:
        """All files that this version is made of."""
        yield from self.small
        for save in self.saves:
            yield from save.files

    def room(self) -> int:
        """The most bytes of one more delta; 0 if there may be none."""
        if self.kind != "full" or len(self.saves) > LONGEST:
            return 0
        whole, *deltas = self.saves
        return max(0, int(MOST * whole.size) - sum(save.size for save in deltas))


class Mirroring(Fields):
    """What a mirror does (``syncd mirror``), in its report.

    Attributes:
        url: of the object store, without credentials.
        moved: bytes of objects that it has sent or received since its start.
        errors: how often it failed since then.
        lag: seconds for which a version has waited that is not there yet.
    """

    url: Text
    moved: Size = 0
    errors: Size = 0
    lag: Seconds = 0.0


def version_key(sequence: int) -> str:
    """The name of a version's record; names sort as the numbers do."""
    return f"{VERSIONS}/{sequence:018d}.json"


def sequence_of(key: str) -> int | None:
    """The number in the name of a version's record; None if it is another object."""
    folder, _, name = key.partition("/")
    number = name.removesuffix(".json")
    return int(number) if folder == VERSIONS and number.isdecimal() and name != number else None


def expired(
    versions: Mapping[int, datetime], *, keep: int, min_age: timedelta, now: datetime
) -> list[int]:
    """The versions whose records may go: neither among the newest, nor lately the newest.

    Args:
        versions: when each record was made, by the store's clock.
        keep: how many of the newest stay.
        min_age: a version stays for as long as this after a newer one came, because a pull may
            still read it, and a push may still need its objects.
        now: by the store's clock, too.
    """
    ordered = sorted(versions)
    superseded = pairwise(ordered)
    stay = set(ordered[-keep:])
    return [old for old, new in superseded if old not in stay and versions[new] < now - min_age]


def unneeded(
    objects: Mapping[str, datetime],
    versions: Iterable[MirroredVersion],
    *,
    min_age: timedelta,
    now: datetime,
) -> list[str]:
    """The objects that no version needs, and that no push can have made lately."""
    needed = {file.key for version in versions for file in version.files()}
    return [key for key, made in objects.items() if key not in needed and made < now - min_age]
