"""Folders of ``torch.distributed.checkpoint``.

This package reads the ``.metadata`` pickle, the names of its tensors, the ``.distcp`` files, and
the layout with Hugging Face files. The package imports ``torch_files``. ``sandbox`` and
``syncd.checkpoint`` import the package. Begin with ``dcp_metadata.py``.
``syncd.checkpoint.chunked_save`` opens a whole folder.
"""
