"""The operator's side of a job: its state, its history, and the requests to its daemon.

Contains everything that the commands and the page ask of a job directory. It works without a
running daemon, and no daemon imports it; ``syncd.cli`` and ``syncd.web`` do. Begin with
``job_state.py``.
"""
