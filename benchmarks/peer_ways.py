"""The ways of peers.py. A process has one side of one way: it publishes, or it receives.

ModelExpress, SkyRL, torch and transformers are used unmodified. The formats of slime and prime-rl
are written anew, from the sources that docs/comparison.md links; a receiver of slime is SGLang's
``weight_sync/local_checkpoint.py`` at 01d5bfe5. Folders of the hub are loaded by :meth:`Way.load`
in one thread, in place of an engine.
"""

import json
import mmap
import os
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import xxhash
import zstandard
from safetensors.numpy import save
from safetensors.torch import save_file
from torch import distributed, nn

from benchmarks.delta_processes import training
from benchmarks.machine import cpu_seconds, status
from explorer_hooks import ExplorerHook, TorchModule
from explorer_hooks.staging import Staging
from syncd.protocol.layout import JobLayout
from syncd.protocol.policy import SyncSettings
from trainer_hooks import SaveSettings, TrainerHook, WeightStream

_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class Way:
    """One side of a way. Step 0 is the base.

    Attributes:
        added: what a step adds to shared storage; from the step, and syncd's number of it.
        copy: a glob of the files in the receiver's folder that it loads; empty without a copy.
        imports: what it needs besides torch and syncd.
        patience: seconds until a receiver of syncd says that it cannot have a step.
    """

    added = "{}"
    copy = ""
    imports: tuple[str, ...] = ()
    patience = 0.0

    @classmethod
    def wheel(cls) -> list[Any]:
        """Its modules; processes that are forked then have them."""
        return [import_module(name) for name in cls.imports]

    def __init__(self, shared: Path, local: Path, module: nn.Module) -> None:
        self.shared, self.local, self.module = shared, local, module
        self.tensors: dict[str, Any] = module.state_dict()
        self.of_copy = 0

    def folder(self, step: int) -> Path:
        """What the step adds to shared storage."""
        return self.shared / self.added.format(step)

    def publish(self, step: int) -> None:
        """Training stands still until this returns."""
        shutil.rmtree(self.folder(step - 2), ignore_errors=True)
        self.folder(step).mkdir(parents=True)
        save_file(self.tensors, self.folder(step) / _FILE)

    def announced(self, step: int) -> None:
        """Wait until a receiver, or syncd's daemon, can know of the step."""

    def receive(self, step: int) -> int:
        """Load a step, or a newer one; return it."""
        self.load(self.folder(step))
        return step

    def from_shared(self, read: int) -> int:
        """How many of all bytes that this receiver has read were on shared storage."""
        return read - self.of_copy

    def load(self, folder: Path) -> None:
        """Read each tensor into its place; a file must have the size that its header says."""
        for path, start, name, begin, end in _entries(folder):
            with path.open("rb", buffering=0) as file:
                file.seek(start + begin)
                part = self.tensors[name].view(torch.int16).numpy().data.cast("B")
                if file.readinto(part) != end - begin:
                    raise ValueError(f"{path} is too short")
            if path.is_relative_to(self.local):
                self.of_copy += end - begin


def _entries(folder: Path) -> list[tuple[Path, int, str, int, int]]:
    found = []
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        header.pop("__metadata__", None)
        found += [(path, 8 + size, n, *entry["data_offsets"]) for n, entry in header.items()]
    if not found:
        raise FileNotFoundError(f"{folder} has no weights")
    return found


def _put(path: Path, data: bytes) -> None:
    """Write a durable file under its final name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.tmp")
    with draft.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


class _Pretrained(Way):
    imports = ("transformers.modeling_utils", "transformers.configuration_utils")

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        models, configs = self.wheel()
        self._model = models.PreTrainedModel(configs.PretrainedConfig())
        self._model.layers = self.module.layers

    def publish(self, step: int) -> None:
        shutil.rmtree(self.folder(step - 2), ignore_errors=True)
        self._model.save_pretrained(self.folder(step))


class _Checkpoint(Way):
    imports = ("torch.distributed.checkpoint",)

    def publish(self, step: int) -> None:
        shutil.rmtree(self.folder(step - 2), ignore_errors=True)
        self.wheel()[0].save(self.tensors, checkpoint_id=self.folder(step), no_dist=True)

    def receive(self, step: int) -> int:
        self.wheel()[0].load(self.tensors, checkpoint_id=self.folder(step), no_dist=True)
        return step


class _PrimeRL(Way):
    def publish(self, step: int) -> None:
        super().publish(step)
        (self.folder(step) / "STABLE").touch()

    def receive(self, step: int) -> int:
        if not (self.folder(step) / "STABLE").exists():
            raise FileNotFoundError("the orchestrator sees no STABLE")
        return super().receive(step)


class _Slime(Way):
    """XOR of each tensor, in a zstd frame, with the xxh3-128 of the new one; patched in place."""

    added = "weight_v{:06}"
    copy = f"copy/{_FILE}"

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._pool = ThreadPoolExecutor(min(32, os.cpu_count() or 8))
        self._old: dict[str, Any] = {}

    def publish(self, step: int) -> None:
        if step == 0:
            super().publish(step)
            self._old = {name: self._bytes(name).copy() for name in self.tensors}
            return
        packed = dict(zip(self.tensors, self._pool.map(self._pack, self.tensors), strict=True))
        frames = {name: frame for name, (frame, _) in packed.items() if frame is not None}
        digests = {name: packed[name][1] for name in frames}
        _put(self.folder(step) / _FILE, save(frames, metadata=digests))
        _put(self.folder(step) / _INDEX, json.dumps({"base_version": step - 1}).encode())

    def _bytes(self, name: str) -> Any:
        return self.tensors[name].view(torch.int16).numpy().reshape(-1).view(np.uint8)

    def _pack(self, name: str) -> tuple[Any, str]:
        new = self._bytes(name).copy()
        changes = self._old[name] ^ new
        self._old[name] = new
        if not changes.any():
            return None, ""
        frame = zstandard.ZstdCompressor(level=1).compress(changes)
        return np.frombuffer(frame, np.uint8), xxhash.xxh3_128_hexdigest(new)

    def receive(self, step: int) -> int:
        at = self.local / "version"
        if not at.exists():
            shutil.copytree(self.folder(0), self.local / "copy", dirs_exist_ok=True)
            _put(at, b"0")
        for each in range(int(at.read_text()) + 1, step + 1):
            self._patch(self.folder(each))
            _put(at, str(each).encode())
        self.load(self.local / "copy")
        return step

    def _patch(self, folder: Path) -> None:
        json.loads((folder / _INDEX).read_text())
        data = (folder / _FILE).read_bytes()
        size = int.from_bytes(data[:8], "little")
        digests = json.loads(data[8 : 8 + size])["__metadata__"]
        copied = _entries(self.local / "copy")
        places = {name: (start + at, end - at) for _, start, name, at, end in copied}
        with (self.local / self.copy).open("r+b") as file, mmap.mmap(file.fileno(), 0) as copy:

            def patch(entry: tuple[Path, int, str, int, int]) -> bool:
                _, start, name, begin, end = entry
                frame = memoryview(data)[start + begin : start + end]
                place, count = places[name]
                part = np.frombuffer(copy, np.uint8, count, place)
                part ^= np.frombuffer(zstandard.ZstdDecompressor().decompress(frame), np.uint8)
                return bool(xxhash.xxh3_128_hexdigest(part.data) == digests[name])

            (self.local / "version").unlink()  # a copy that is torn begins with the base again
            if not all(list(self._pool.map(patch, _entries(folder)))):
                raise ValueError("checksum mismatch")


class _SkyRL(Way):
    added = "delta-{:08}"
    copy = "weights/*.safetensors"
    imports = ("skyrl.backends.skyrl_train.weight_sync.delta.checkpoint",)

    @classmethod
    def wheel(cls) -> list[Any]:
        """Without skyrl/backends/__init__.py, the only file on the way that needs Python 3.12."""
        if "skyrl" not in sys.modules:
            sys.modules["skyrl.backends"] = package = ModuleType("skyrl.backends")
            package.__path__ = [f"{import_module('skyrl').__path__[0]}/backends"]
        return super().wheel()

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        (self._wheel,), self._base = self.wheel(), self.shared / "base"
        self._side: Any = None

    def publish(self, step: int) -> None:
        if step == 0:
            self._base.mkdir()
            save_file(self.tensors, self._base / _FILE)
            self._side = self._wheel.DeltaCheckpointPublisher(
                f"{self._base}", f"{self.shared}", f"{self.local / 'staging'}"
            )
        else:
            self._side.publish(self._side.create_delta_files(self.tensors.items()))

    def receive(self, step: int) -> int:
        self._side = self._side or self._wheel.LocalCheckpointStore(f"{self._base}", self.local)
        if step:
            self._side.fetch(step, sync_dir=f"{self.shared}")
            self._side.validate_ready(step)
        self.load(self._side.weights_dir if step else self._base)
        return step


class _Objects:
    """A folder in place of S3, with the methods of the wheel's client."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.read = folder, 0

    def _path(self, uri: str) -> Path:
        return self._folder / uri.removeprefix("s3://bucket/")

    def put(self, *, uri: str, data: bytes) -> None:
        _put(self._path(uri), data)

    def get(self, uri: str) -> bytes:
        data = self._path(uri).read_bytes()
        self.read += len(data)
        return data

    def size(self, uri: str) -> int:
        return self._path(uri).stat().st_size

    def close(self) -> None:
        pass


class _ModelExpress(Way):
    """Its server's answers are given here; a receiver resolves chains as its clients do."""

    copy = "model/*/*/*.safetensors"
    imports = (
        "modelexpress_rl.inference.receiver",
        "modelexpress_rl.train.methods.canonical_delta",
        "modelexpress_rl.refit_pb2",
        "modelexpress_rl",
    )

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._receiver, self._sender, self._records, self._public = self.wheel()
        self._objects = _Objects(self.shared)
        self._side: Any = None
        self._served = -1

    def _version(self, step: int) -> Any:
        formats = self._public.WeightPayloadFormat
        kind = formats.XOR_DELTA if step else formats.FULL_HF_CHECKPOINT
        base = f"{step - 1}" if step else None
        return self._receiver._S3Version(f"{step}", base, kind, f"s3://bucket/{step}/{_INDEX}")  # noqa: SLF001 - no public one does without S3

    def publish(self, step: int) -> None:
        if step == 0:
            distributed.init_process_group(
                "gloo", f"file://{self.local}/group", rank=0, world_size=1
            )
            self._side = self._sender.CanonicalDeltaPublicationMethod(
                config=SimpleNamespace(initial_base_version_id="0", uri_prefix="s3://bucket"),
                model_name="model",
                service=lambda: SimpleNamespace(GetWeightVersion=self._answer),
                rpc_timeout_seconds=1.0,
                process_group=None,
                read_seed_tensor=None,
                s3=self._objects,
            )
        ref, pairs = self._public.WeightVersionRef(f"{step}"), list(self.tensors.items())
        # Of 64 MiB (its default is 512), so that its threads share the work.
        buckets = (pairs[at : at + 16] for at in range(0, len(pairs), 16))
        self._side.publish(
            version=ref, staged=self._side.stage(version=ref, hf_tensor_iter=buckets)
        )

    def _answer(self, request: Any, timeout: float) -> Any:  # noqa: ARG002 # a gRPC stub's
        version = self._version(int(request.uid))
        kind = f"WEIGHT_PAYLOAD_FORMAT_{version.payload_format.value}"
        storage = {"storage_type": self._records.OBJECT_STORAGE_TYPE_S3, "uri": version.uri}
        return self._records.GetWeightVersionResponse(
            version=self._records.WeightVersion(
                uid=request.uid,
                model_name="model",
                payload_format=getattr(self._records, kind),
                base_version_id=version.base_version_id,
                object_storage=storage,
            )
        )

    def receive(self, step: int) -> int:
        first = self._served + 1
        if self._side is None:
            root, first = self._version(0), 0
            given = {"refit_checkpoint_dir": self.local}
            seed = self._receiver.bootstrap_s3_checkpoint(
                model_name="model", version=root, s3=self._objects, **given
            )
            config = self._receiver.ObjectStorageGeneratorConfig(
                self._receiver.ObjectStorageType.S3, "0", seed_checkpoint_path=seed, **given
            )
            self._side = self._receiver._LocalCheckpoint(  # noqa: SLF001 - likewise
                model_name="model", config=config, s3=self._objects
            )
            self._side.initialize()
        try:
            chain = tuple(map(self._version, range(first, step + 1)))
            ready = self._side.prepare_chain(chain or (self._version(step),))
        except BaseException:
            self._side.recover_incomplete_preparation()
            raise
        with self._side.installation_context(ready):
            self.load(ready.path)
        self._served = step
        return step

    def from_shared(self, read: int) -> int:  # noqa: ARG002 # the object store counts
        return self._objects.read


class _Syncd(Way):
    """Full versions of shards. Steps begin with 1."""

    added = "published/v{1:06}"
    _side: Any = None

    def publish(self, step: int) -> None:
        if self._side is None:
            self._side = TrainerHook(self.shared, self.module, saving=SaveSettings(final=False))
        self._side.after_step(step + 1)

    def announced(self, step: int) -> None:
        pointer = JobLayout(self.shared).state_pointer
        while not pointer.exists() or pointer.read_text() != f"{step + 1}\n":
            time.sleep(0.001)

    def receive(self, step: int) -> int:
        if self._side is None:
            engine = TorchModule(self.module, in_place="direct", threads=1)
            self._side = ExplorerHook(self.shared, self.local.name, engine, staging=self.staging())
        until = time.monotonic() + self.patience
        while not self._side.version or self._side.version.step <= step:
            self._side.pull(max(0.1, until - time.monotonic()))
            self._count()
        return int(self._side.version.step) - 1

    def staging(self) -> Staging | None:
        return None

    def _count(self) -> None:
        pass


class _Named(_Syncd):
    settings = SyncSettings()

    def publish(self, step: int) -> None:
        self._side = self._side or WeightStream(self.shared, settings=self.settings)
        self._side.save(step + 1, self.tensors)


class _Tip(_Named):
    added = "deltas/d{1:06}"
    copy = "syncd-*/v*/*.safetensors"
    settings = SyncSettings(deltas=True)
    _staging: Staging | None = None
    _read = 0

    def staging(self) -> Staging:
        self._staging = Staging(self.local)
        return self._staging

    def _count(self) -> None:
        if self._staging:
            fetched = self._staging.fetched
            self._read += fetched.full_bytes + (fetched.delta_bytes or 0)

    def from_shared(self, read: int) -> int:  # noqa: ARG002 # the stage counts
        return self._read


WAYS: dict[str, type[Way]] = {
    "save_pretrained": _Pretrained,
    "torch DCP": _Checkpoint,
    "prime-rl's format": _PrimeRL,
    "slime's format": _Slime,
    "SkyRL": _SkyRL,
    "ModelExpress": _ModelExpress,
    "syncd, full": _Syncd,
    "syncd, named": _Named,
    "syncd, ahead": _Tip,
}


def serve(
    pipe: Any,
    *,
    role: str,
    way: str,
    shared: Path,
    local: Path,
    count: int,
    update: float,
    patience: float,
) -> None:
    """For each step that comes: publish or receive it, and send what this process took so far."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # no bars of progress, and what errors say anyway
    steps = training(count, update)
    module = nn.Module()
    module.layers = next(steps)
    frozen = module.layers[0].clone()
    if role == "receiver":
        for parameter in module.parameters():
            parameter.zero_()
    side = WAYS[way](shared, local, module)
    side.patience = patience
    own, io, me = 0.0, Path("/proc/self/io"), Path("/proc/self/status")
    read, written, cpu = status(io, "rchar"), status(io, "wchar"), cpu_seconds(os.getpid())
    memory = status(me, "VmRSS")
    pipe.send(frozen.view(torch.int16)[0, :64].numpy().tobytes())
    while True:
        step, begun = pipe.recv(), time.thread_time()
        if role == "trainer" and step:
            next(steps)
            module.layers[0].copy_(frozen)
        own += time.thread_time() - begun
        Path("/proc/self/clear_refs").write_text("5")  # the peak of memory begins here
        told: dict[str, Any] = {"there": time.monotonic(), "error": ""}
        try:
            if role == "trainer":
                side.publish(step)
                told["stall"] = time.monotonic() - told["there"]
                side.announced(step)
            else:
                step = side.receive(step)
        except BaseException as error:  # noqa: BLE001 - an answer; that of torch is no Exception
            told["error"] = f"{type(error).__name__}: {error}"
        told |= {"step": step, "live": time.monotonic(), "peak": status(me, "VmHWM") - memory}
        begun, digest = time.thread_time(), xxhash.xxh3_128()
        for tensor in side.tensors.values():
            digest.update(tensor.view(torch.int16).numpy())
        own += time.thread_time() - begun
        told |= {"digest": digest.digest(), "cpu": cpu_seconds(os.getpid()) - cpu - own}
        told |= {"read": status(io, "rchar") - read, "written": status(io, "wchar") - written}
        pipe.send(told | {"shared": side.from_shared(told["read"])})
