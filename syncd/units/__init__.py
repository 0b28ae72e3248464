"""Units of systemd: one for a daemon, and one for an explorer beside a model server."""
