"""``syncd doctor``: measures a job's storage, and judges whether syncd can rely on it.

The probes are in :mod:`.alone` (run by one process), :mod:`.together` (run by several processes)
and :mod:`.job_probes`. The judgements are in :mod:`.verdicts` and :mod:`.job_verdicts`, which touch
no storage.
"""
