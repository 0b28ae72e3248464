"""The daemon's output for people and monitoring: journal, ``daemon.json`` and metrics.

The daemon's loop and ``syncd.operate`` import this package; it does not import the loop. Begin with
``journal.py``.
"""
