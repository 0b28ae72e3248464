"""The operator's side of a job: its state, its history, and the requests to its daemon.

This package contains all functions with which the commands and the web page read and steer a job
directory; they need no running daemon. ``syncd.cli`` and ``syncd.web`` import this package; the
daemon does not. Begin with ``job_state.py``.
"""
