"""Follow a job with an engine of your own: python own_engine.py JOB LAST_STEP."""

import sys

from explorer_hooks import ExplorerHook
from explorer_hooks.engines.base import InProcessEngine
from explorer_hooks.engines.fitting import TensorSpec, check_kind, compare_tensors, tensor_specs
from explorer_hooks.weights import WeightsReader


class DictEngine(InProcessEngine):
    """Serves a dict of tensors."""

    def __init__(self, takes):
        self.takes = takes
        self.tensors = {}

    def check(self, version):
        """Refuse a version with other tensors, before anything changes."""
        check_kind(version, self.kinds)
        compare_tensors(version, tensor_specs(version.manifest), self.takes, "the dict")

    def load(self, version):
        """Read all new tensors before the old ones go."""
        with WeightsReader(version) as weights:
            self.tensors = dict(weights.state_dict_iterator())


if __name__ == "__main__":
    job, last_step = sys.argv[1], int(sys.argv[2])
    engine, step = DictEngine({"weight": TensorSpec("F32", (3,))}), 0
    with ExplorerHook(job, "dict-0", engine) as hook:
        while step < last_step:
            step = hook.pull().step  # waits for newer weights, verifies and loads them
            print(f"step {step}: {engine.tensors['weight'].tolist()}", flush=True)
