"""The code of docs/vllm.md and docs/sglang.md, as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def _blocks(page: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text()
    return re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


TRAIN, FOLLOW, IN_PROCESS = _blocks("vllm.md")
(FOLLOW_SGLANG,) = _blocks("sglang.md")
