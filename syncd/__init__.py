"""syncd moves model weights from trainers to explorers over shared storage.

The daemon is in :mod:`syncd.daemon`, and the on-disk protocol in :mod:`syncd.protocol`. Trainers
import ``trainer_hooks``, and explorers import ``explorer_hooks``.
"""

__version__ = "0.3.1"

__all__ = ["__version__"]
