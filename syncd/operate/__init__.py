"""The operator's side of a job: its state, its history, and the requests to its daemon.

All of this works without a running daemon. ``syncd.cli`` and ``syncd.web`` import this package; the
daemon does not. Begin with ``job_state.py``.
"""
