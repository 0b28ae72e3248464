"""The entry point by which vLLM finds syncd's weight transfer (group ``vllm.general_plugins``).

vLLM calls :func:`register` in all its processes, even if this transfer is not configured. So
:func:`register` imports only its registry.
"""

from __future__ import annotations

import importlib
from typing import Final

#: The value of ``backend`` in ``--weight-transfer-config``.
BACKEND: Final = "syncd"
_ENGINES: Final = "explorer_hooks.engines.vllm_transfer"


def register() -> None:
    """Register the transfer in this process. Raises no error, even when called twice."""
    try:
        factory = importlib.import_module("vllm.distributed.weight_transfer.factory")
        factory.WeightTransferEngineFactory.register_engine(BACKEND, _ENGINES, "make_transfer")
    except ValueError:
        pass  # registered before
    except (ImportError, AttributeError, TypeError):
        pass  # this vLLM has no such registry, and refuses the backend itself
