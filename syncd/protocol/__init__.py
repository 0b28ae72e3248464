"""The on-disk protocol: names, paths, records, errors and the sync policy.

The package uses neither the disk nor the clock, and imports no other package of syncd. Read
``layout.py`` first, and then ``records.py``.
"""
