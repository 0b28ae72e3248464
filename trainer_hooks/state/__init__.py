"""The state that a save copies: the model, its optimizer, and all other state for resuming.

Begin with ``state_dict.py``, then ``host_buffers.py``.
"""
