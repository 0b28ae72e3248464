"""Progress bars and status lines for long work."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from syncd.checkpoint.merging.options import Progress, unheard


@contextmanager
def bar(name: str) -> Iterator[Progress]:
    """Show a bar of bytes on standard error, if this is a terminal."""
    if not sys.stderr.isatty():
        yield unheard
        return
    # Imported here: it takes a tenth of a second, which a script need not wait for.
    from rich import progress as bars  # noqa: PLC0415
    from rich.console import Console  # noqa: PLC0415

    columns = (
        bars.TextColumn("{task.description}", markup=False),
        bars.BarColumn(bar_width=None),
        bars.DownloadColumn(),
        bars.TransferSpeedColumn(),
        bars.TimeRemainingColumn(),
    )
    with bars.Progress(
        *columns, console=Console(stderr=True), transient=True, expand=True
    ) as shown:
        task = shown.add_task(name, total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)


@contextmanager
def at_work(what: str) -> Iterator[None]:
    """Show a status line on standard error during the block, if this is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console  # noqa: PLC0415 - slow to import

    with Console(stderr=True).status(what):
        yield
