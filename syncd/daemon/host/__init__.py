"""Serving one job or many jobs from one process.

This package finds the jobs in a folder, and restarts daemons that fail. Begin with ``services.py``.
"""
