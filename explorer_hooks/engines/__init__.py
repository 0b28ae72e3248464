"""Engines: a small protocol for loading weights, and its implementations.

This package imports ``reader``, ``weights``, ``broadcast`` and ``server_fit`` of
``explorer_hooks``. The other modules of ``explorer_hooks`` import this package. Read ``base.py``
first, and then ``conformance.py``.
"""
