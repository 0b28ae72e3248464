"""Shared storage: the only code that changes it, and the rules for processes that share it.

This package imports only ``syncd.protocol``. Read ``fsio.py`` first, and then ``epoch.py``.
"""
