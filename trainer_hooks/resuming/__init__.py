"""Resuming: loads a full checkpoint into a model and its optimizer, on any number of ranks.

It imports ``trainer_hooks.state``, ``writing`` and ``agreement``. Only
``trainer_hooks/__init__.py`` imports it. Begin with ``resume.py``, then ``resumable.py``.
"""
