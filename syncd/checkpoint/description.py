"""The judge of what a version's small files say about its weights. Pure."""

from __future__ import annotations


def code_files(config: object) -> list[str]:
    """The files with code that ``auto_map`` names, except those of another repository."""
    auto_map = config.get("auto_map") if isinstance(config, dict) else None
    named = list(auto_map.values()) if isinstance(auto_map, dict) else []
    flat = [one for value in named for one in (value if isinstance(value, list) else [value])]
    modules = (one.rpartition(".")[0] for one in flat if isinstance(one, str) and "--" not in one)
    return sorted({f"{module}.py" for module in modules if module})
