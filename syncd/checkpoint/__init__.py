"""Trainers' saves: their shard files, the place of each shard in the model, and the merge.

- :mod:`~syncd.checkpoint.torch_files.shard_file` reads a shard's index without running its code.
- :mod:`~syncd.checkpoint.placement` and :mod:`~syncd.checkpoint.merging.plan` prove that the pieces
  make a whole model.
- :mod:`~syncd.checkpoint.merging.merge` copies the bytes.

If storage fails, any function that uses it raises OSError, even if its docstring does not say so.
"""
