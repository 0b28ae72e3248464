"""The daemon: scan, decide, act."""
