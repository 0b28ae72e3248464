"""Deltas: the elements that differ between two published versions.

In it: the conditions for a delta between two versions, the encoding of its blocks, the child
process that makes it, and the making of a version's files from a base and a chain of deltas. It
imports ``checkpoint``; the daemon, ``coordination`` and the hooks import it. Only ``encoding``,
``delta_reader`` and ``applying`` import NumPy, and so no daemon does. Begin with ``ends.py``.
"""
