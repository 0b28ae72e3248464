"""``syncd verify``: read versions again."""

from __future__ import annotations

from pathlib import Path

import click

from syncd.checkpoint.version import read_manifest, verify_version
from syncd.protocol.errors import InvalidSettingsError, RecordError, VerificationError
from syncd.protocol.layout import MANIFEST, JobLayout, parse_version_folder, printable
from syncd.storage.fsio import Storage


@click.command("verify", epilog="Example: syncd verify /shared/jobs/qwen-grpo")
@click.argument("path", type=click.Path(path_type=Path, file_okay=False, exists=True))
def command(path: Path) -> None:
    """Compare all versions of the job PATH, or the one folder PATH, with their manifests.

    Reads every byte. Exits with 7 where something is not what its manifest says.
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
        raise InvalidSettingsError(f"{path} is no version, and no job with published versions")
    wrong = [folder.name for folder in folders if not _verified(storage, folder)]
    if wrong:
        raise VerificationError(f"not what their manifests say: {', '.join(wrong)}")


def _verified(storage: Storage, folder: Path) -> bool:
    try:
        manifest = read_manifest(storage, folder)
        verify_version(storage, folder, manifest)
    except (VerificationError, RecordError, OSError) as error:
        if not storage.exists(folder):
            click.echo(f"{folder.name}: pruned meanwhile")
            return True
        click.echo(f"{folder.name}: {error}")
        return False
    if manifest.remote is not None:
        click.echo(f"{folder.name}: step {manifest.step}, remote: {printable(manifest.remote)}")
        return True
    how = "sizes, headers, digests" if manifest.digests != "off" else "sizes and headers alone"
    what = "" if manifest.kind == "full" else f" {manifest.kind}"
    click.echo(f"{folder.name}: step {manifest.step}, whole{what} ({how})")
    return True
