"""The daemon's output for people and monitoring: journal, ``daemon.json`` and metrics.

This package must not import the daemon's loop. Begin with ``journal.py``.
"""
