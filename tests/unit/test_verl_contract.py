"""What ``trainer_hooks.verl`` takes for granted of verl, compared with the sources in its wheel."""

import ast
import os
from collections.abc import Callable
from zipfile import ZipFile

import pytest

from trainer_hooks.verl_engine import SyncdCheckpointEngine

#: A file of the wheel of ``benchmarks.verl_environment.VERL``; ``.ci/run`` downloads it.
WHEEL = os.environ.get("SYNCD_VERL_WHEEL")
_BASE = "verl/checkpoint_engine/base.py"
_WORKERS = "verl/workers/engine_workers.py"
_REPLICA = "verl/workers/rollout/replica.py"
_TRAINER = "verl/experimental/separation/ray_trainer.py"
_SAVES = "verl/utils/checkpoint/fsdp_checkpoint_manager.py"
_BUCKETS = "verl/workers/rollout/vllm_rollout/bucketed_weight_transfer.py"
#: A function of verl → its arguments, and the code that it must have.
CONTRACT: dict[tuple[str, str], tuple[str, tuple[str, ...]]] = {
    (_BASE, "CheckpointEngineRegistry.register"): ("backend: str", ()),
    (_BASE, "CheckpointEngineWorker.__init__"): (
        "self, rollout_config: RolloutConfig, model_config: HFModelConfig, "
        "server_adapter: BaseRollout=None, *args, **kwargs",
        (
            "import_external_libs(self.rollout_config.checkpoint_engine.custom_backend_module "
            "or None)",
            "CheckpointEngineRegistry.new(backend, bucket_size=bucket_size, **engine_kwargs)",
        ),
    ),
    (_BASE, "CheckpointEngineWorker.update_weights"): (
        "self, global_steps: int=None",
        ("self.checkpoint_engine.receive_weights(global_steps=global_steps)",),
    ),
    (_BASE, "CheckpointEngineWorker.execute_checkpoint_engine"): (
        "self, method: str, *args, **kwargs",
        ("getattr(self.checkpoint_engine, method)(*args, **kwargs)",),
    ),
    (_BASE, "CheckpointEngineManager.__init__"): (
        "self, config: CheckpointEngineConfig, actor_wg: RayWorkerGroup, "
        "replicas: list[RolloutReplica]",
        ("self.backend = config.backend", "self.actor_wg = actor_wg", "self.replicas = replicas"),
    ),
    (_BASE, "CheckpointEngineManager.add_replicas"): (
        "self, replicas: list[RolloutReplica]",
        ("self.replicas.extend(replicas)",),
    ),
    (_BASE, "CheckpointEngineManager.update_weights"): (
        "self, global_steps: int=None",
        (
            "await self.abort_replicas()",
            "await self.release_kv_cache_replicas()",
            "actor_wg.update_weights(global_steps=global_steps, mode=self.backend)",
            "await self.resume_kv_cache_replicas()",
            "await self.resume_generation_replicas()",
        ),
    ),
    (_BASE, "CheckpointEngineManager.build_process_group"): (
        "self, rollout: RayWorkerGroup",
        ("self.backend_cls.build_topology(actor_wg.world_size, rollout.world_size, metadata)",),
    ),
    (_WORKERS, "ActorRolloutRefWorker.init_model"): (
        "self",
        (
            "CheckpointEngineRegistry.new(backend, is_master=torch.distributed.get_rank() == 0, "
            "bucket_size=bucket_size, **engine_kwargs)",
        ),
    ),
    (_WORKERS, "ActorRolloutRefWorker.update_weights"): (
        "self, global_steps: int=None, mode: str='auto'",
        (
            "await self.checkpoint_engine.send_weights(per_tensor_param, "
            "global_steps=global_steps)",
            "return metrics or {}",
        ),
    ),
    (_SAVES, "FSDPCheckpointManager._get_lora_train_meta"): (
        "self, unwrap_model",
        ("return {'r': lora_rank, 'lora_alpha': lora_alpha, 'task_type': str(task_type)}",),
    ),
    (_SAVES, "FSDPCheckpointManager._save_lora_train_meta"): (
        "self, local_path: str, unwrap_model",
        ("os.path.join(local_path, 'lora_train_meta.json')",),
    ),
    (_REPLICA, "RolloutReplica.abort_all_requests"): ("self, reject_request: bool=False", ()),
    (_REPLICA, "RolloutReplica.release_kv_cache"): ("self", ()),
    (_REPLICA, "RolloutReplica.resume_kv_cache"): ("self", ()),
    (_REPLICA, "RolloutReplica.resume_generation"): ("self", ()),
    (_TRAINER, "SeparateRayPPOTrainer.init_workers"): (
        "self",
        (
            "load_class_from_fqn(checkpoint_manager_class_fqn, 'CheckpointEngineManager')",
            "CheckpointEngineManager(config=omega_conf_to_dataclass("
            "self.config.actor_rollout_ref.rollout.checkpoint_engine), "
            "actor_wg=self.actor_rollout_wg, replicas=self.llm_server_manager.get_replicas())",
        ),
    ),
    (_BUCKETS, "BucketedWeightSender.async_send_weights"): (
        "self, weights",
        (
            "if offset + weight.nbytes > self.bucket_size:",
            "self._direct_send_large_weight(name, weight)",
        ),
    ),
}


#: Gives the source at a path of the wheel.
Read = Callable[[str], str]


def function(source: str, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """A method of a class, by its qualified name."""
    owner, _, method = name.partition(".")
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == owner:
            for part in node.body:
                is_function = isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)
                if is_function and part.name == method:
                    return part
    return None


def moved(read: Read) -> list[str]:
    """What is no longer as :data:`CONTRACT` says."""
    found = []
    for (path, name), (arguments, code) in CONTRACT.items():
        there = function(read(path), name)
        if there is None:
            found.append(f"{path}: {name} is gone")
            continue
        if ast.unparse(there.args) != arguments:
            found.append(f"{path}: {name} takes ({ast.unparse(there.args)})")
        text = ast.unparse(there)
        found += [f"{path}: {name} lacks {line}" for line in code if line not in text]
    return found


@pytest.fixture(scope="module")
def source() -> Read:
    if WHEEL is None:
        pytest.skip("SYNCD_VERL_WHEEL names no wheel of verl; .ci/run downloads it")
    with ZipFile(WHEEL) as wheel:
        files = {path: wheel.read(path).decode() for path, _ in CONTRACT}
    return files.__getitem__


def test_verl_is_as_its_engine_and_manager_take_for_granted(source: Read) -> None:
    assert moved(source) == []


def test_what_moves_in_verl_is_named(source: Read) -> None:
    def other(path: str) -> str:
        return (
            source(path)
            .replace("def resume_generation(self)", "def resume_generation(self, why)")
            .replace("def abort_all_requests", "def abort_requests")
            .replace("return metrics or {}", "return None")
        )

    assert moved(other) == [
        f"{_WORKERS}: ActorRolloutRefWorker.update_weights lacks return metrics or {{}}",
        f"{_REPLICA}: RolloutReplica.abort_all_requests is gone",
        f"{_REPLICA}: RolloutReplica.resume_generation takes (self, why)",
    ]


def test_the_engine_has_all_that_verls_engines_must_have(source: Read) -> None:
    tree = ast.parse(source(_BASE))
    (engine,) = (
        n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "CheckpointEngine"
    )
    methods = [n.name for n in engine.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    assert methods
    assert [name for name in methods if not hasattr(SyncdCheckpointEngine, name)] == []
    (wire,) = (n for n in engine.body if isinstance(n, ast.Assign))
    assert ast.unparse(wire) == f"wire_format = {SyncdCheckpointEngine.wire_format!r}"
