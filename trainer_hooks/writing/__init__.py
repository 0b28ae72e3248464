"""The way of a save to storage: each rank's files, in the order of the protocol.

In it: the order itself, each file written whole, receipts, turns, and what a failed save leaves.
It imports ``trainer_hooks.state`` and ``settings``; the rest of ``trainer_hooks`` imports it.
Begin with ``writer.py``, then ``rank_files.py``.
"""
