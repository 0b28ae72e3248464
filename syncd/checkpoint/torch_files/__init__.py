"""Reading the files of ``torch.save`` without running their pickles.

An unpickler makes only inert records; pieces of tensors are made from these records.
``syncd.checkpoint`` and ``trainer_hooks.resuming`` import this package, which imports none of the
other packages in ``syncd.checkpoint``. Begin with ``shard_file.py``, which opens one rank's file.
"""
