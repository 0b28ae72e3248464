"""Deltas: the elements that differ between two published versions.

The package imports ``checkpoint``. The daemon, the commands and the hooks import the package.
Only ``encoding``, ``delta_reader`` and ``applying`` import NumPy. The daemon imports none of these
three, so it needs no NumPy. Read ``ends.py`` first.
"""
