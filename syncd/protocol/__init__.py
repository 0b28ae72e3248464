"""The on-disk protocol: names, paths, records, errors and the sync policy.

This package holds the layout of a job directory, the JSON records as pydantic models, the error
tree, the events of the log, and the decisions on syncs. It touches no disk and no clock. It imports
no other package of syncd; all other packages and the hooks import it. Read ``layout.py`` first, and
then ``records.py``.
"""
