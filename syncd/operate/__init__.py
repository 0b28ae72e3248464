"""The operator's side of a job: its state, its history, and the requests to its daemon.

In it: everything that commands and the page ask of a job directory. No daemon needs to run for it,
and no daemon imports it; ``syncd.cli`` and ``syncd.web`` do. Begin with ``job_state.py``.
"""
