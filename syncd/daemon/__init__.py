"""The daemon: it scans a job, decides about actions, and carries them out."""
