"""The entry point of ``python -m syncd``: the command line."""

from syncd.cli import main

main()
