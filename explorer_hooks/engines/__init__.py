"""Engines: one small protocol through which weights are loaded; each engine is a module.

Contains the protocol, torch modules, vLLM and SGLang, a fake, and checks for your own engines. It
imports ``reader``, ``weights``, ``broadcast`` and ``server_fit`` of ``explorer_hooks``; the other
modules there import it. Begin with ``base.py``, then ``conformance.py``.
"""
