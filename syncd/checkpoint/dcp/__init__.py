"""Folders of ``torch.distributed.checkpoint``. Begin with ``dcp_metadata.py``."""
