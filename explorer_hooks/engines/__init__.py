"""Engines: weights are loaded into them through one small protocol; each engine is a module.

In it: the protocol, torch modules, vLLM and SGLang, a fake, and checks for engines of your own. It
imports ``reader``, ``weights``, ``broadcast`` and ``server_fit`` of ``explorer_hooks``, whose other
modules import it. Begin with ``base.py``, then ``conformance.py``.
"""
