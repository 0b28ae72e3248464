"""Keys, options and commands that went."""

from __future__ import annotations

from typing import Final

#: A key (also for its option), ``COMMAND --option`` or ``GROUP COMMAND`` → what to do instead.
GONE: Final = {
    "convert --base-model-dir": "copy the base model's files except weights into actor/huggingface",
    "demo --no-tty": "leave it out; the demo prints plain lines",
}
