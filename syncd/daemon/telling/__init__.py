"""The daemon's output for people and monitoring: the journal and the metrics.

This package must not import what publishes. Begin with ``journal.py``.
"""
