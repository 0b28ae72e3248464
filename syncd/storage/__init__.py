"""Shared storage: the one seam that changes it, and everything that waits or judges on it.

In it: system calls and operations built from them, the epoch that fences off superseded daemons,
sessions and the judge of heartbeats, claims, leases and pins, and the watcher. It imports
``syncd.protocol`` alone; every other package imports it, the hooks too. Begin with ``fsio.py``,
then ``epoch.py``.
"""
