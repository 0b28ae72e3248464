"""Compare a vLLM's interface with the one that syncd's weight transfer needs, by its source code.

Nothing of vLLM is imported, so the files of a wheel are enough.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

#: By file: the parameters of functions, the types of fields, and the abstract methods of classes.
INTERFACE: Final = {
    "distributed/weight_transfer/base.py": {
        "WeightTransferEngine": "init_transfer_engine, start_weight_update, "
        "finish_weight_update, receive_weights, shutdown",
        "WeightTransferEngine.__init__": "self, config, vllm_config, device, model",
        "WeightTransferEngine.parse_init_info": "self, init_dict",
        "WeightTransferEngine.init_transfer_engine": "self, init_info",
        "WeightTransferEngine.start_weight_update": "self",
        "WeightTransferEngine.update_weights": "self, update_info",
        "WeightTransferEngine.receive_weights": "self, update_info",
        "WeightTransferEngine.finish_weight_update": "self",
        "WeightTransferEngine.shutdown": "self",
    },
    "model_executor/model_loader/__init__.py": {"get_model_loader": "load_config"},
    "model_executor/model_loader/default_loader.py": {
        "DefaultModelLoader.get_all_weights": "self, model_config, model",
    },
    "model_executor/model_loader/reload/layerwise.py": {
        "initialize_layerwise_reload": "model",
        "finalize_layerwise_processing": "model, model_config",
        "finalize_layerwise_reload": "*args, **kwargs",
    },
    "distributed/parallel_state.py": {
        "get_world_group": "",
        "GroupCoordinator.world_size": "int",
        "GroupCoordinator.rank_in_group": "int",
        "GroupCoordinator.cpu_group": "ProcessGroup",
    },
    "config/vllm.py": {
        "VllmConfig.model_config": "ModelConfig",
        "VllmConfig.load_config": "LoadConfig",
    },
    "config/model.py": {
        "ModelConfig.model": "str",
        "ModelConfig.model_weights": "str",
        "ModelConfig.revision": "str | None",
    },
}


def find_differences(vllm: Path) -> str:
    """Say what differs in the folder of a vLLM's package; empty if nothing does."""
    differences = []
    for file, entries in INTERFACE.items():
        path = vllm / file
        actual = dict(_read(ast.parse(path.read_text()).body) if path.is_file() else ())
        for name, wanted in entries.items():
            if actual.get(name) != wanted:
                differences.append(f"{name}: {actual.get(name)!r} instead of {wanted!r}")
    return ", ".join(differences)


def _read(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, str]]:
    for node in body:
        match node:
            case ast.FunctionDef(name=name, args=parameters):
                for each in ast.walk(parameters):
                    if isinstance(each, ast.arg):
                        each.annotation = None
                yield prefix + name, ast.unparse(parameters)
            case ast.AnnAssign(target=ast.Name(id=name), annotation=kind):
                yield prefix + name, ast.unparse(kind)
            case ast.ClassDef(name=name, body=members):
                yield (
                    name,
                    ", ".join(
                        member.name
                        for member in members
                        if isinstance(member, ast.FunctionDef)
                        and "abstractmethod" in map(ast.unparse, member.decorator_list)
                    ),
                )
                yield from _read(members, f"{name}.")
