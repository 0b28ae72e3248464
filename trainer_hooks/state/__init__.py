"""The state that a save copies: the model, its optimizer, and all other state for resuming.

It imports ``syncd`` and ``trainer_hooks.settings``; the other modules of ``trainer_hooks`` import
it. Begin with ``state_dict.py``, then ``host_buffers.py``.
"""
