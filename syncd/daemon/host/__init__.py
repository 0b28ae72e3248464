"""Many jobs in one process.

In it: finding jobs below a root, keeping each job served even if its daemon fails, and the process
that does so for one job or for many. Only ``syncd.cli`` imports it; it imports ``service.py``,
which serves one job. Begin with ``services.py``.
"""
