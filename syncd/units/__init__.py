"""Units of systemd for a daemon, and for an explorer beside a server."""
