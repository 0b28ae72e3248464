"""The merge of shards into safetensors files. Begin with ``plan.py``, then read ``merge.py``."""
