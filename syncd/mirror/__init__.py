"""Versions of a job in an object store, for jobs elsewhere: ``docs/mirror.md``."""
