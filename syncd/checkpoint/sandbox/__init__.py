"""Parsing in a child process with limits of time and memory.

This package has the parent's side, the program of the child, the format of their messages, and the
handling of the child process. The package imports ``dcp`` and ``torch_files``. ``syncd.checkpoint``
imports the package. Begin with ``isolated.py``.
"""
