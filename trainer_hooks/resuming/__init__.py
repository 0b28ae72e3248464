"""Resuming: from a full checkpoint back into a model and its optimizer, on whatever ranks.

Contains the choice of a checkpoint, its files, and the filling of each rank's tensors from them. It
imports ``trainer_hooks.state``, ``writing`` and ``agreement``; only ``trainer_hooks`` itself, for
users, imports it. Begin with ``resume.py``, then ``resumable.py``.
"""
