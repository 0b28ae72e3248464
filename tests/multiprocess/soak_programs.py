"""An explorer of a soak: ``python -m tests.multiprocess.soak_programs JOB NAME AWAY KIND [STAGE]``.

It loads one version after the other, reads all of each when it takes it and before it lets it go,
and says so on stdout as JSON lines. With a stage folder it holds copies there, and follows the tip.
"""

import json
import logging
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx2

from explorer_hooks import ExplorerHook, LeasedVersion
from explorer_hooks.engines.base import Engine, InProcessEngine
from explorer_hooks.engines.sglang_server import SGLangServer
from explorer_hooks.staging import Staging
from syncd.protocol.errors import CancelledError, SyncdError, VerificationError, WaitTimeoutError
from syncd.protocol.records import Manifest
from tests.engines.sglang_fake import FakeSGLang
from tests.multiprocess.by_hand import number_of, numbers
from tests.multiprocess.processes import latest

#: Of each version, in all tensors together.
MEGABYTES = 1.0
#: So many saves differ in few elements, and deltas lead from one to the next.
ERA = 20
_AGAIN = 0.2


def tell(**said: object) -> None:
    print(json.dumps(said), flush=True)


def holding(manifest: Manifest, found: set[float], job: Path) -> dict[str, Any]:
    """What is told of a version of which all was read, and whose weights are these numbers."""
    assert len(found) == 1, f"version {manifest.sequence} is a mixture of the saves {found}"
    newest = latest(job)
    return {
        "sequence": manifest.sequence,
        "step": manifest.step,
        "number": max(found),
        "is_back": manifest.rolled_back is not None,
        "is_tip": newest is not None and newest.sequence < manifest.sequence,
    }


class Away:
    """How often the job went away and came back, as the driver counts it in a file: odd is away.

    What fails in between says nothing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def count(self) -> int:
        return int(self._path.read_text())

    def excuses(self, before: int) -> bool:
        return bool(before % 2) or self.count() != before


class Loaded(InProcessEngine):
    """Reads all of a version.

    Attributes:
        found: the numbers that its weights are; one, or it is a mixture.
    """

    found: set[float]

    def check(self, version: LeasedVersion) -> None:
        """Any will do."""

    def load(self, version: LeasedVersion) -> None:
        self.found = numbers(version.folder, ERA)


class Served(FakeSGLang):
    """A server that reads all of what it is told to load; ``found`` is as for :class:`Loaded`."""

    found: set[float]

    def _update_weights_from_disk(self, told: Mapping[str, Any]) -> httpx2.Response:
        self.found = numbers(Path(told["model_path"]), ERA)
        return super()._update_weights_from_disk(told)


def make_engine(kind: str) -> tuple[Engine, Callable[[], set[float]]]:
    """An engine, and what says which numbers its weights are."""
    if kind == "server":
        server = Served("none")
        return SGLangServer("http://127.0.0.1:1", transport=server.transport), lambda: server.found
    if kind == "module":
        import torch  # noqa: PLC0415 - the others need none of it

        from explorer_hooks import TorchModule  # noqa: PLC0415
        from tests.multiprocess.soak_ranks import make_model  # noqa: PLC0415

        module = make_model()
        return TorchModule(module), lambda: {
            number_of(value.detach().view(torch.uint8).numpy().tobytes(), ERA) for value in module
        }
    loaded = Loaded()
    return loaded, lambda: loaded.found


class Explorer:
    """Takes versions, and never lets one go before it has read it twice.

    Args:
        job: as its host has it.
        name: its own.
        away: says when the job is not there.
        kind: of its engine.
        stage: where it makes copies, which it holds in place of the versions; None to make none.
    """

    def __init__(self, job: Path, name: str, away: Away, kind: str, stage: Path | None) -> None:
        self._job = job
        self._name = name
        self._away = away
        self._staging: Staging | None = None
        if stage is not None:
            # With the first delta otherwise: the memory that it takes is no growth.
            import syncd.deltas.folding  # noqa: F401, PLC0415

            self._staging = Staging(stage)
        self._engine, self._found = make_engine(kind)
        self._hook: ExplorerHook | None = None
        self._stopping = False
        signal.signal(signal.SIGTERM, self._stop)

    def run(self) -> None:
        while not self._stopping:
            before = self._away.count()
            try:
                self._look()
            except CancelledError:
                break
            except WaitTimeoutError:
                continue
            except (AssertionError, VerificationError) as error:
                if not self._away.excuses(before):
                    tell(violation=f"{self._name}: {error!r}")
                time.sleep(_AGAIN)
            except (OSError, SyncdError) as error:
                tell(refused=str(error))
                time.sleep(_AGAIN)
        if self._hook is not None:
            self._read_again()
            self._hook.close()

    def _look(self) -> None:
        if self._hook is None:
            self._hook = ExplorerHook(
                self._job,
                self._name,
                self._engine,
                staging=self._staging,
                before_load=self._read_again,
                poll=0.1,
            )
        self._hook.pull(1.0)
        held, read = self._hook._pipeline.held, self._hook.last
        assert held is not None
        assert read is not None
        how = read.model_dump(include={"full_bytes", "delta_bytes", "no_delta", "not_staged"})
        tell(
            read=how if self._staging else None,
            **holding(held.manifest, self._found(), self._job),
        )
        time.sleep(random.random())

    def _read_again(self, *_: object) -> None:
        """The version that is served is whole to the end."""
        assert self._hook is not None
        if (held := self._hook._pipeline.held) is not None:
            held.verify()

    def _stop(self, *_: object) -> None:
        self._stopping = True
        if self._hook is not None:
            self._hook.cancel()


def main() -> None:
    job, name, away, kind, *stage = sys.argv[1:]
    logging.disable(logging.WARNING)  # what matters is told
    stage_folder = Path(*stage) if stage else None
    Explorer(Path(job), name, Away(Path(away)), kind, stage_folder).run()


if __name__ == "__main__":
    main()
