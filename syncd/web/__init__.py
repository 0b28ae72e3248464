"""The page of ``syncd web``: a browser shows the status and the history of jobs."""
