"""``syncd doctor``: measures a job's storage, and judges whether syncd can rely on it.

The probes, in :mod:`.alone`, :mod:`.together` and :mod:`.job_probes`, measure. The pure functions
in :mod:`.verdicts` and :mod:`.job_verdicts` judge.
"""
