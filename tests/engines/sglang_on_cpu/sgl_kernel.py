"""In place of SGLang's kernels, which have no build for CPUs: imported there, never called."""

from collections.abc import Callable

__version__ = "0.4.10"


def __getattr__(name: str) -> Callable[..., None]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> None:
        raise NotImplementedError(f"there is no sgl_kernel.{name} on a CPU")

    return missing
