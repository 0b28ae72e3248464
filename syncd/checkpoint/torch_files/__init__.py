"""Files of ``torch.save``, read without running their pickles.

In it: the zip container, a pickle machine that makes only inert records, the pieces of tensors that
these records describe, and the device meshes and placements of DTensors. ``syncd.checkpoint`` and
``trainer_hooks.resuming`` import it; it imports none of the packages beside it. Begin with
``shard_file.py``, which opens one rank's file.
"""
