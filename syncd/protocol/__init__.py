"""The on-disk protocol: names, paths, records, errors and the sync policy.

This package holds the layout of a job directory, the JSON records as pydantic models, the error
tree, the events of the log, and the decisions on syncs. This package uses neither the disk nor the
clock. It imports no other package of syncd. All other packages and the hooks import this package.
Read ``layout.py`` first, and then ``records.py``.
"""
