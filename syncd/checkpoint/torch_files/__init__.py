"""Reading the files of ``torch.save`` without running their pickles.

``trainer_hooks.resuming`` also imports this package. Therefore this package imports no other
package of ``syncd.checkpoint``. Begin with ``shard_file.py``, which opens one rank's file.
"""
