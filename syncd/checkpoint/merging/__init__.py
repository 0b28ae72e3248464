"""The merge: from the pieces of shards to the bytes of safetensors files.

This package has the plan (the source and the target of each byte), the copying of bytes, the casts
to another dtype, and the readers of source files. The package imports ``torch_files`` and
``sandbox``. ``syncd.checkpoint`` and the hooks import the package. Begin with ``plan.py``, then
read ``merge.py``.
"""
