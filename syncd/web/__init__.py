"""The page of ``syncd web``: jobs as ``status`` and ``history`` have them, in a browser."""
