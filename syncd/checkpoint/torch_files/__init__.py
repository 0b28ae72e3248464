"""Reading the files of ``torch.save`` without running their pickles.

This package reads the zip container, and reads the pickle in the container with an unpickler that
makes only inert records. From these records the package makes pieces of tensors, and the device
meshes and placements of DTensors. ``syncd.checkpoint`` and ``trainer_hooks.resuming`` import this
package. This package imports none of the other packages in ``syncd.checkpoint``. Begin with
``shard_file.py``, which opens one rank's file.
"""
