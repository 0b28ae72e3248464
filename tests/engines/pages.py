"""The code of docs/vllm.md and docs/sglang.md, as it stands there."""

from __future__ import annotations

from tests.doc_blocks import ROOT, blocks

__all__ = ["FOLLOW_SGLANG", "IN_PROCESS", "ROOT", "TRAIN"]

TRAIN, _, IN_PROCESS = blocks("vllm.md")
(FOLLOW_SGLANG,) = blocks("sglang.md")
