"""verl's own merger: a contender of merge.py.

``python -m benchmarks.verl_merge ACTOR OUT.safetensors [fsync]``. It runs verl's
``FSDPModelMerger(config).merge_and_save()`` with one overridden method, which calls safetensors'
``save_file`` instead of a model's ``save_pretrained``, in favour of verl.

Use only shards that you trust, because verl loads pickles with ``weights_only=False``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from verl.model_merger.base_model_merger import (  # type: ignore[import-not-found]  # not here
    ModelMergerConfig,
)
from verl.model_merger.fsdp_model_merger import (  # type: ignore[import-not-found]  # not here
    FSDPModelMerger,
)

from benchmarks.torch_merge import save

if TYPE_CHECKING:
    from torch import Tensor


def main(actor: str, out: str, *modes: str) -> None:
    """Merge as verl does, and save."""

    class Merger(FSDPModelMerger):  # type: ignore[misc]  # its types are not here either
        def save_hf_model_and_tokenizer(self, state_dict: dict[str, Tensor]) -> None:
            save(state_dict, out, modes)

    config = ModelMergerConfig(
        operation="merge",
        backend="fsdp",
        local_dir=actor,
        hf_model_config_path=str(Path(actor) / "huggingface"),
    )
    Merger(config).merge_and_save()


if __name__ == "__main__":
    main(*sys.argv[1:])
