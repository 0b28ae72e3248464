"""Resuming: loads a full checkpoint into a model and its optimizer, on any number of ranks.

Begin with ``resume.py``, then ``resumable.py``.
"""
