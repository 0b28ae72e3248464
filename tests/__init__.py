"""Tests, and what they share."""

import os

# What a machine says of a terminal that tests do not have, as GitHub's runners often do. Here, for
# what starts processes takes its environment as soon as it is imported.
for _name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES"):
    os.environ.pop(_name, None)
