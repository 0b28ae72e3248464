"""Trainers' saves: shard files, where their tensors lie in the model, and the merge of them.

:mod:`~syncd.checkpoint.torch_files.shard_file` reads an index and runs nothing;
:mod:`~syncd.checkpoint.placement` and :mod:`~syncd.checkpoint.merging.plan` are pure and prove
that the pieces make a whole model;
:mod:`~syncd.checkpoint.merging.merge` copies the bytes.
"""
