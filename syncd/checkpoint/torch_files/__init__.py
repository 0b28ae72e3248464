"""Reading the files of ``torch.save`` without running their pickles.

This package reads the zip container, and the pickle in it by an unpickler that makes only inert
records. From these records it makes pieces of tensors, and the device meshes and placements of
DTensors. ``syncd.checkpoint`` and ``trainer_hooks.resuming`` import it. It imports none of the
other packages in ``syncd.checkpoint``. Begin with ``shard_file.py``, which opens one rank's file.
"""
