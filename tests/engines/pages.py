"""The code of docs/vllm.md and docs/sglang.md, as it stands there."""

from __future__ import annotations

from pathlib import Path

from tests.doc_blocks import blocks

ROOT = Path(__file__).parents[2]

TRAIN, FOLLOW, IN_PROCESS = blocks("vllm.md")
(FOLLOW_SGLANG,) = blocks("sglang.md")
