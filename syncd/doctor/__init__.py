"""``syncd doctor``: measures a job's storage, and judges whether syncd can rely on it.

The probes are in :mod:`.alone` (by one process), :mod:`.together` (by several) and :mod:`.facts`;
the judgements are in :mod:`.verdicts` and :mod:`.job_verdicts`, which touch nothing.
"""
