"""The daemon's output for people and monitoring: journal, ``daemon.json`` and metrics.

This package writes the log lines and journal lines of each event, the daemon's report about itself,
the times when explorers went live, and the metrics. The daemon's loop and ``syncd.operate`` import
this package; it does not import the loop. Begin with ``journal.py``.
"""
