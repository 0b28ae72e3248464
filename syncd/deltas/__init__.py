"""Deltas: the elements that differ between two published versions.

This package holds the conditions for a delta between two versions, the encoding of its blocks, the
child process that makes a delta, and the code that makes a version's files from a base and a chain
of deltas. The package imports ``checkpoint``. The daemon, ``coordination`` and the hooks import the
package. Only ``encoding``, ``delta_reader`` and ``applying`` import NumPy. The daemon imports none
of these three, so it needs no NumPy. Read ``ends.py`` first.
"""
