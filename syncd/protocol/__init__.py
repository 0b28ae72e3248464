"""The on-disk protocol: names, paths, records, errors and the sync policy.

In it: the layout of a job directory, the JSON records as pydantic models, the error tree, the
events of the log, and the decisions on syncs. It touches no disk and no clock, and imports no other
package of syncd; all others import it, the hooks too. Begin with ``layout.py``, then
``records.py``.
"""
