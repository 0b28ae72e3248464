"""syncd's weight transfer apart from vLLM: how it is found, and the folders that it refuses."""

import configparser
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from explorer_hooks.engines.conformance import TensorBytes, make_version
from explorer_hooks.engines.vllm_plugin import BACKEND
from explorer_hooks.engines.vllm_transfer import FolderUpdate, check_files
from syncd.protocol.errors import VerificationError
from tests.doc_blocks import ROOT
from tests.refusals import unverified

WEIGHT = TensorBytes("F32", (2,), b"12345678")
BASE = "distributed/weight_transfer/base.py"
#: The arguments that a transfer is made with.
GIVEN = ("config", "vllm_config", "device", "model")


class Factory:
    """Registers as vLLM's does."""

    def __init__(self) -> None:
        self.known: dict[str, Any] = {}

    def register_engine(self, name: str, module: str, kind: str) -> None:
        if name in self.known:
            raise ValueError(f"{name} is already registered")
        self.known[name] = getattr(import_module(module), kind)


class Base:
    """Keeps what vLLM's class keeps."""

    def __init__(self, config: object, vllm_config: object, device: object, model: object) -> None:
        self.given = config, vllm_config, device, model


#: The parts of vLLM's source that are looked at.
SOURCES = {
    BASE: """
class WeightSource(ABC):
    @abstractmethod
    def metadata(self) -> list[ParamMeta]: ...

class WeightTransferEngine(ABC, Generic[TInitInfo, TUpdateInfo]):
    supports_draft_weight_update: bool = True

    def __init__(self, config: Config, vllm_config: "VllmConfig", device: device, model: Module):
        self.model = model

    def drain_pending(self) -> None: ...
    def parse_init_info(self, init_dict: dict[str, Any]) -> TInitInfo: ...
    @abstractmethod
    def init_transfer_engine(self, init_info: TInitInfo) -> None: ...
    @abstractmethod
    def start_weight_update(self) -> None: ...
    @abstractmethod
    def finish_weight_update(self) -> None: ...
    def update_weights(self, update_info: dict[str, Any]) -> None: ...
    @abstractmethod
    def receive_weights(self, update_info: TUpdateInfo) -> None: ...
    @abstractmethod
    def shutdown(self) -> None: ...
""",
    "model_executor/model_loader/__init__.py": "def get_model_loader(load_config: L) -> B: ...",
    "model_executor/model_loader/default_loader.py": """
class DefaultModelLoader(BaseModelLoader):
    def get_all_weights(self, model_config: ModelConfig, model: nn.Module) -> Generator: ...
""",
    "model_executor/model_loader/reload/layerwise.py": """
def initialize_layerwise_reload(model: torch.nn.Module): ...
def finalize_layerwise_processing(model: torch.nn.Module, model_config: ModelConfig): ...
def finalize_layerwise_reload(*args, **kwargs): ...
""",
    "distributed/parallel_state.py": """
class GroupCoordinator:
    rank_in_group: int
    world_size: int
    cpu_group: ProcessGroup

def get_world_group() -> GroupCoordinator: ...
""",
    "config/vllm.py": """
class VllmConfig:
    model_config: ModelConfig = Field(default=None)
    load_config: LoadConfig = Field(default_factory=LoadConfig)
""",
    "config/model.py": """
class ModelConfig:
    model: str = "Qwen/Qwen3-0.6B"
    model_weights: str = ""
    revision: str | None = None
""",
}


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Factory]:
    """The source of a vLLM that can be imported, and its registry."""
    for name, source in SOURCES.items():
        path = tmp_path / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    factory = Factory()
    transfer = "vllm.distributed.weight_transfer"
    for name, content in (
        ("vllm", {"__path__": [str(tmp_path / "vllm")]}),
        (f"{transfer}.factory", {"WeightTransferEngineFactory": factory}),
        (f"{transfer}.base", {"WeightTransferEngine": Base}),
    ):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**content))
    return tmp_path / "vllm", factory


def registered(factory: Factory) -> Any:
    """Call what the entry point registers, as vLLM does in a worker."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    entry = setup["options.entry_points"]["vllm.general_plugins"].strip()
    module, _, function = entry.removeprefix("syncd = ").partition(":")
    for _ in range(2):  # vLLM may load its plugins again
        getattr(import_module(module), function)()
    return factory.known[BACKEND](*GIVEN)


def test_a_vllm_with_the_interface_gets_the_transfer(vllm: tuple[Path, Factory]) -> None:
    transfer = registered(vllm[1])
    assert transfer.given == GIVEN
    transfer.start_weight_update()
    assert transfer() == {"is_open": True, "holds": None}


@pytest.mark.parametrize(
    ("file", "old", "new", "difference"),
    [
        (BASE, "update(self)", "update(self, why=None)", "'self, why=None' instead of 'self'"),
        (BASE, "update_info:", "update:", "'self, update' instead of 'self, update_info'"),
        (BASE, ", model: Module", "", "__init__: 'self, config, vllm_config, device' instead"),
        (BASE, "    def parse", "    @abstractmethod\n    def parse", "parse_init_info, init_tr"),
        (BASE, "def shutdown", "def close", "shutdown: None instead of 'self'"),
        ("config/model.py", "model:", "name:", "ModelConfig.model: None instead of 'str'"),
        ("config/vllm.py", "ModelConfig =", "Any =", "VllmConfig.model_config: 'Any' instead of"),
        ("distributed/parallel_state.py", None, None, "get_world_group: None instead of ''"),
    ],
)
def test_a_vllm_that_differs_in_one_place_gets_another_engine_that_says_so(
    vllm: tuple[Path, Factory],
    caplog: pytest.LogCaptureFixture,
    file: str,
    old: str | None,
    new: str | None,
    difference: str,
) -> None:
    folder, factory = vllm
    if old is None or new is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(SOURCES[file].replace(old, new))
    state = registered(factory)()
    assert difference in state["differences"]
    assert difference in caplog.text
    assert state["holds"] is None


def test_a_vllm_without_such_a_registry_starts_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())
    import_module("explorer_hooks.engines.vllm_plugin").register()


def test_a_folder_that_has_changed_since_it_was_verified_is_refused_unread(tmp_path: Path) -> None:
    folder = make_version(tmp_path / "v1", {"a": WEIGHT}).folder
    update = FolderUpdate(str(folder), "label")
    check_files(update)
    (weights,) = folder.glob("*.safetensors")
    whole = weights.read_bytes()
    other = folder / "other.safetensors"
    other.write_bytes(whole)
    with unverified(r"other\.safetensors is not in"):
        check_files(update)
    other.unlink()
    weights.chmod(0o600)
    for damaged in (whole[:-1], whole.replace(b'"a"', b'"b"')):
        weights.write_bytes(damaged)
        with pytest.raises(VerificationError):
            check_files(update)
    weights.unlink()
    with unverified("is missing"):
        check_files(update)


def test_a_folder_without_a_manifest_is_vllms_to_judge_and_a_missing_one_is_not(
    tmp_path: Path,
) -> None:
    check_files(FolderUpdate(str(tmp_path), "label"))
    with pytest.raises(FileNotFoundError, match="at the same path"):
        check_files(FolderUpdate(str(tmp_path / "gone"), "label"))
