"""``syncd verify``: compare versions and deltas with their manifests."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from syncd.checkpoint.model_folder import flaws_in
from syncd.checkpoint.version import read_manifest, verify_version
from syncd.cli import options
from syncd.cli.bars import bar
from syncd.deltas.delta_index import DeltaRecord, read_index
from syncd.deltas.limits import DeltaError
from syncd.protocol.errors import InvalidSettingsError, RecordError, VerificationError
from syncd.protocol.names import (
    DELTA,
    MANIFEST,
    printable,
)
from syncd.protocol.records import parse
from syncd.storage.fsio import Storage
from syncd.storage.job import Job, delta_folders, version_folders


@dataclass(frozen=True, slots=True)
class _Verified:
    """The result for one folder; ``outcome`` is whole, damaged, remote or pruned (deleted)."""

    folder: str
    outcome: str
    said: str
    step: int | None = None
    kind: str | None = None
    warnings: tuple[str, ...] = ()


@options.as_command("verify /shared/jobs/qwen-grpo")
def command(path: options.Existing, *, as_json: options.Json = False) -> None:
    """Compare the versions of a job with their manifests, and the indexes of its deltas.

    PATH is a job directory, or one folder with a manifest: a version, or a folder that 'syncd
    merge' or 'syncd convert' filled. Reads every byte of these. Exits with 7 if a digest or a size
    is wrong, or if a version has weights that its manifest does not list. Warns if config.json is
    missing, or does not describe the weights.
    """
    storage = Storage(path)
    job = Job.at(path, storage)
    folders, deltas = [path], []
    if not storage.exists(path / MANIFEST):
        folders = list(map(job.layout.version, version_folders(job)))
        deltas = list(map(job.layout.delta, delta_folders(job)))
    if not folders:
        raise InvalidSettingsError(
            f"{path} is neither a version nor a job with published versions. If this is "
            f"a job, 'syncd status {path}' shows what the daemon waits for. If this is no job, "
            "give the folder of a version or of a job"
        )
    results = []
    for folder in (*folders, *deltas):
        verified = _verified_delta if folder in deltas else _verified
        try:
            result = verified(storage, folder)
        except (DeltaError, VerificationError, RecordError, OSError) as error:
            result = _Verified(folder.name, "damaged", str(error))
            if not storage.exists(folder):
                result = _Verified(folder.name, "pruned", "pruned meanwhile")
        results.append(result)
        if not as_json:
            click.echo(printable(f"{folder.name}: {result.said}"))
        for warning in result.warnings:
            click.echo(printable(f"{folder.name}: warning: {warning}"), err=True)
    if as_json:
        click.echo(json.dumps({"folders": [asdict(result) for result in results]}, indent=2))
    wrong = [result.folder for result in results if result.outcome == "damaged"]
    if wrong:
        raise VerificationError(f"these folders differ from their manifests: {', '.join(wrong)}")


def _verified_delta(storage: Storage, folder: Path) -> _Verified:
    delta = parse(DeltaRecord, storage.read(folder / DELTA), folder / DELTA)
    for file in delta.files:
        read_index(storage, folder / file.name, file.size, file.digest or "")
    said = f"delta from {delta.base}, whole (sizes, digests of the indexes)"
    return _Verified(folder.name, "whole", said, kind="link")


def _verified(storage: Storage, folder: Path) -> _Verified:
    manifest = read_manifest(storage, folder)
    with bar(folder.name) as progress:
        verify_version(storage, folder, manifest, progress=progress)
    if manifest.remote is not None:
        said = f"step {manifest.step}, remote: {manifest.remote}"
        return _Verified(folder.name, "remote", said, manifest.step, manifest.kind)
    how = "sizes, headers, digests" if manifest.digests != "off" else "only sizes and headers"
    what = "" if manifest.kind == "full" else f" {manifest.kind}"
    said = f"step {manifest.step}, whole{what} ({how})"
    warnings = tuple(reason for _, reason in flaws_in(storage, folder, manifest))
    return _Verified(folder.name, "whole", said, manifest.step, manifest.kind, warnings)
