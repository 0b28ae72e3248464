"""The daemon's words: the journal, ``daemon.json``, and the metrics.

In it: the log lines and journal lines for each thing that happens, the daemon's report on itself,
when explorers went live, and the metrics that are made of these. The rounds of the daemon import
it, and so does ``syncd.operate``; it imports no round. Begin with ``journal.py``.
"""
