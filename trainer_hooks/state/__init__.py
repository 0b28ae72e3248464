"""The state that a save copies: of the model, its optimizer, and all else needed to resume.

Contains state dicts by the plain model's names, host buffers, the full state dict in one file,
LoRA. It imports ``syncd`` and ``trainer_hooks.settings``; the rest of ``trainer_hooks`` imports it.
Begin with ``state_dict.py``, then ``host_buffers.py``.
"""
