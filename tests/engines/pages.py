"""The code of docs/vllm.md and docs/sglang.md, as it stands there."""

from tests.doc_blocks import ROOT, blocks
from tests.examples import FOLDER

__all__ = ["FOLLOW_SGLANG", "IN_PROCESS", "ROOT", "TRAIN"]

*_, IN_PROCESS = blocks("vllm.md")
TRAIN = (FOLDER / "fsdp2.py").read_text()
(FOLLOW_SGLANG,) = blocks("sglang.md")
