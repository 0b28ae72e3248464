"""The daemon's words: the journal, ``daemon.json``, and the metrics.

In it: the log lines and journal lines for each event, the daemon's report on itself, the times when
explorers went live, and the metrics. The daemon's loop and ``syncd.operate`` import it; it does not
import the loop. Begin with ``journal.py``.
"""
