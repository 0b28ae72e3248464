"""``syncd verify``: read versions again."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from syncd.checkpoint.version import read_manifest, verify_version
from syncd.cli import options
from syncd.cli.bars import bar
from syncd.protocol.errors import InvalidSettingsError, RecordError, VerificationError
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import MANIFEST, parse_version_folder, printable
from syncd.storage.fsio import Storage


@dataclass(frozen=True, slots=True)
class _Verified:
    """The result for one folder: ``whole``, ``damaged``, ``remote``, or ``pruned`` meanwhile."""

    folder: str
    outcome: str
    said: str
    step: int | None = None
    kind: str | None = None


@click.command("verify", epilog="Example: syncd verify /shared/jobs/qwen-grpo")
@click.argument("path", type=click.Path(path_type=Path, file_okay=False, exists=True))
@options.as_json
def command(path: Path, *, as_json: bool) -> None:
    """Compare all versions of the job PATH, or the one folder PATH, with their manifests.

    Reads every byte. Exits with 7 if something differs from its manifest. Folders that 'syncd
    merge' made, and huggingface/ folders that 'syncd convert' filled, have a manifest too.
    """
    storage = Storage(path)
    if storage.exists(path / MANIFEST):
        folders = [path]
    else:
        published = JobLayout(path).published
        folders = [
            published / name
            for name in storage.names(published)
            if parse_version_folder(name) is not None
        ]
    if not folders:
        raise InvalidSettingsError(f"{path} is neither a version nor a job with published versions")
    results = []
    for folder in folders:
        results.append(_verified(storage, folder))
        if not as_json:
            click.echo(printable(f"{folder.name}: {results[-1].said}"))
    if as_json:
        click.echo(json.dumps({"folders": [asdict(result) for result in results]}, indent=2))
    wrong = [result.folder for result in results if result.outcome == "damaged"]
    if wrong:
        raise VerificationError(f"differ from their manifests: {', '.join(wrong)}")


def _verified(storage: Storage, folder: Path) -> _Verified:
    try:
        manifest = read_manifest(storage, folder)
        with bar(folder.name) as progress:
            verify_version(storage, folder, manifest, progress=progress)
    except (VerificationError, RecordError, OSError) as error:
        if not storage.exists(folder):
            return _Verified(folder.name, "pruned", "pruned meanwhile")
        return _Verified(folder.name, "damaged", str(error))
    if manifest.remote is not None:
        said = f"step {manifest.step}, remote: {manifest.remote}"
        return _Verified(folder.name, "remote", said, manifest.step, manifest.kind)
    how = "sizes, headers, digests" if manifest.digests != "off" else "sizes and headers alone"
    what = "" if manifest.kind == "full" else f" {manifest.kind}"
    said = f"step {manifest.step}, whole{what} ({how})"
    return _Verified(folder.name, "whole", said, manifest.step, manifest.kind)
