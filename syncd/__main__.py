"""``python -m syncd``."""

from syncd.cli import main

main()
