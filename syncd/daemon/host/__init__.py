"""Serving jobs from one process.

This package finds the jobs in a folder, restarts each daemon that fails, and serves one job or many
jobs in one process. Only ``syncd.cli`` imports this package. Begin with ``services.py``.
"""
