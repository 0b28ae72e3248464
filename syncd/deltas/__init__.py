"""Deltas: the elements that differ between two published versions.

Read ``ends.py`` first. The daemon's process must never import NumPy, so it imports none of
``encoding``, ``delta_reader`` and ``applying``.
"""
