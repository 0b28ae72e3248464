"""Folders of ``torch.distributed.checkpoint``.

This package reads the ``.metadata`` pickle, the names of its tensors, the ``.distcp`` files, and
the layout with Hugging Face files. It imports ``torch_files``; ``sandbox`` and ``syncd.checkpoint``
import it. Begin with ``dcp_metadata.py``. ``syncd.checkpoint.chunked_save`` opens a whole folder.
"""
