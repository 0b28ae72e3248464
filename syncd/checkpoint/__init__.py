"""Trainers' saves: their shard files, the place of each shard in the model, and the merge.

- :mod:`~syncd.checkpoint.torch_files.shard_file` reads the index of a shard without running code
  from the shard.
- :mod:`~syncd.checkpoint.placement` and :mod:`~syncd.checkpoint.merging.plan` are pure, and prove
  that the pieces make a whole model.
- :mod:`~syncd.checkpoint.merging.merge` copies the bytes.
"""
