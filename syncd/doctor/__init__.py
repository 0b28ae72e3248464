"""``syncd doctor``: what a job's storage really does, measured; and what that means for syncd.

What is measured is in :mod:`.alone` (by one process), :mod:`.together` (by several) and
:mod:`.facts`; what it means is in :mod:`.verdicts` and :mod:`.job_verdicts`, which touch nothing.
"""
