"""Writes a save to storage: each rank's files, in the order of the protocol.

Begin with ``writer.py``, then ``rank_files.py``.
"""
