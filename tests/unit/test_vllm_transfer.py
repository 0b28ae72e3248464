"""syncd's weight transfer apart from vLLM: how it is found, and the folders that it refuses."""

from __future__ import annotations

import configparser
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from explorer_hooks.engines.conformance import TensorBytes, make_version
from explorer_hooks.engines.vllm_plugin import BACKEND
from explorer_hooks.engines.vllm_transfer import FolderUpdate, check_files
from syncd.protocol.errors import VerificationError
from tests.doc_blocks import ROOT

WEIGHT = TensorBytes("F32", (2,), b"12345678")


class Factory:
    """Registers as vLLM's does."""

    def __init__(self) -> None:
        self.known: dict[str, object] = {}

    def register_engine(self, name: str, module: str, kind: str) -> None:
        if name in self.known:
            raise ValueError(f"{name} is already registered")
        self.known[name] = getattr(import_module(module), kind)


@pytest.mark.parametrize(
    ("version", "kind"),
    [("0.32.0", "FolderTransfer"), ("0.32.1+cpu", "FolderTransfer"), ("0.33.0", "OtherInterface")],
)
def test_vllm_finds_the_transfer_of_its_release_by_the_entry_point_however_often_it_looks(
    monkeypatch: pytest.MonkeyPatch, version: str, kind: str
) -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    told = setup["options.entry_points"]["vllm.general_plugins"].strip()
    module, _, function = told.removeprefix("syncd = ").partition(":")
    factory = Factory()
    home = SimpleNamespace(WeightTransferEngineFactory=factory)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.factory", home)
    for _ in range(2):
        getattr(import_module(module), function)()
    found = factory.known[BACKEND]
    assert isinstance(found, type)
    assert found.__name__ == kind


def test_a_vllm_without_such_a_registry_starts_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.9.0"))
    import_module("explorer_hooks.engines.vllm_plugin").register()


def test_a_folder_that_has_changed_since_it_was_verified_is_refused_unread(tmp_path: Path) -> None:
    folder = make_version(tmp_path / "v1", {"a": WEIGHT}).folder
    update = FolderUpdate(str(folder), "label")
    check_files(update)
    (weights,) = folder.glob("*.safetensors")
    whole = weights.read_bytes()
    other = folder / "other.safetensors"
    other.write_bytes(whole)
    with pytest.raises(VerificationError, match=r"other\.safetensors is not in"):
        check_files(update)
    other.unlink()
    weights.chmod(0o600)
    for damaged in (whole[:-1], whole.replace(b'"a"', b'"b"')):
        weights.write_bytes(damaged)
        with pytest.raises(VerificationError):
            check_files(update)
    weights.unlink()
    with pytest.raises(VerificationError, match="is missing"):
        check_files(update)


def test_a_folder_without_a_manifest_is_vllms_to_judge_and_a_missing_one_is_not(
    tmp_path: Path,
) -> None:
    check_files(FolderUpdate(str(tmp_path), "label"))
    with pytest.raises(FileNotFoundError, match="at the same path"):
        check_files(FolderUpdate(str(tmp_path / "gone"), "label"))
