"""Shared storage: the only code that changes it, and the rules for processes that share it.

This package holds the system calls and the operations built from them; the epoch, which fences off
superseded daemons; sessions, and the judge of heartbeats; claims, leases and pins; and the watcher.
It imports only ``syncd.protocol``. All other packages and the hooks import it. Read ``fsio.py``
first, and then ``epoch.py``.
"""
