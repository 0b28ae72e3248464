"""``syncd doctor``: measures a job's storage, and judges whether syncd can rely on it."""
