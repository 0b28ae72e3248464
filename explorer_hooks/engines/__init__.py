"""Engines: the protocol for loading weights into a model, and its implementations.

Read ``base.py`` first, and then ``conformance.py``.
"""
