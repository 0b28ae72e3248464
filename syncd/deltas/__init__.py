"""Deltas: saves that hold the elements that differ from an earlier save.

Read ``delta_index.py`` first. The daemon's process must never import NumPy, so it imports none of
``encoding``, ``delta_file`` and ``folding``.
"""
