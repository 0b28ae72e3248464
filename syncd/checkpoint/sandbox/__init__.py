"""Parsing in a child process with limits of time and memory.

This package has the parent's side, the program of the child, the format of their messages, and the
handling of the child process. It imports ``dcp`` and ``torch_files``, and ``syncd.checkpoint``
imports it. Begin with ``isolated.py``.
"""
