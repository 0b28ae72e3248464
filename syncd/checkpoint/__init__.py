"""What trainers wrote: shard files, where their tensors lie in the model, and the merge of them.

:mod:`~syncd.checkpoint.shard_file` reads an index and runs nothing;
:mod:`~syncd.checkpoint.placement` and :mod:`~syncd.checkpoint.plan` are pure and prove
that the pieces make a whole model;
:mod:`~syncd.checkpoint.merge` copies the bytes.
"""
