"""The merge: from the pieces of shards to the bytes of safetensors files.

In it: the plan (which bytes go where), the copying itself, casts to another dtype, and the readers
of source files. It imports ``torch_files`` and ``sandbox``; ``syncd.checkpoint`` and the hooks
import it. Begin with ``plan.py``, then ``merge.py``.
"""
