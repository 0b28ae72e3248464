"""Links: saves that hold the elements that differ from an earlier save.

Read ``link_index.py`` first. The daemon's process must never import NumPy, so it imports none of
``encoding``, ``link_file`` and ``folding``.
"""
