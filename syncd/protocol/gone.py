"""Keys, options and commands that went."""

from __future__ import annotations

from typing import Final

#: A key (also for its option), ``COMMAND --option`` or ``GROUP COMMAND`` → what to do instead.
GONE: Final = {
    "convert --again": "delete manifest.json and the weights in actor/huggingface first",
    "convert --base-model-dir": "copy the base model's files except weights into actor/huggingface",
    "convert --dry-run": "leave it out; 'syncd convert' keeps weights that are there already",
    "convert --step": "give the folder of the step, JOB/global_step_N, instead of JOB",
    "copy_threads": "leave it out; four files are written at a time",
    "demo --no-tty": "leave it out; the demo prints plain lines",
    "follow --sparse": "leave it out; every load takes the whole version",
    "leftover_grace": "leave it out; leftovers are removed after 15 minutes",
    "remote_timeout": "leave it out; the daemon waits for a remote path for 60 seconds",
    "unit install": "run 'syncd unit print NAME | sh' as root, and 'systemctl daemon-reload'",
}
