"""Parsing in a child process with limits of time and memory.

In it: the parent's side, the program of the child, the wire format between them, and the child
process itself. It imports ``dcp`` and ``torch_files``; ``syncd.checkpoint`` imports it. Begin with
``isolated.py``.
"""
