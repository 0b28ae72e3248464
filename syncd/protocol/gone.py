"""Keys, options and commands that went."""

from __future__ import annotations

from typing import Final

#: A key (also for its option), ``COMMAND --option`` or ``GROUP COMMAND`` → what to do instead.
GONE: Final = {
    "convert --again": "delete manifest.json and the weights in actor/huggingface first",
    "convert --dry-run": "leave it out; 'syncd convert' keeps weights that are there already",
    "convert --step": "give the folder of the step, JOB/global_step_N, instead of JOB",
    "unit install": "run 'syncd unit print NAME | sh' as root, and 'systemctl daemon-reload'",
}
