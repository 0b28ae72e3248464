"""Writes a save to storage: each rank's files, in the order of the protocol.

It imports ``trainer_hooks.state`` and ``settings``; the other modules of ``trainer_hooks`` import
it. Begin with ``writer.py``, then ``rank_files.py``.
"""
