"""The events of the log. Scripts can rely on the names of events, but not on the messages.

``docs/logging.md`` documents every name with its fields. A log call names its event::

    log.info("version %d is there", 7, extra=Event.VERSION_ADOPTED(version=7))
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

#: A thread that serves one of many jobs has this prefix and the job's directory as its name.
JOB_THREAD: Final = "job "


class Event(StrEnum):
    """The event that a line of the log is about."""

    NOTE = "note"

    ADAPTER_WITHOUT_BASE = "adapter_without_base"
    CAST_TWICE = "cast_twice"
    CLEANUP_DELAYED = "cleanup_delayed"
    COMMAND_FAILED = "command_failed"
    CONFIG_CHANGED = "config_changed"
    CONFIG_NEEDS_RESTART = "config_needs_restart"
    CONFIG_READ = "config_read"
    CONFIG_REFUSED = "config_refused"
    CONFIG_UNHEARD = "config_unheard"
    DAEMON_ACTIVE = "daemon_active"
    DAEMON_ENDS = "daemon_ends"
    DAEMON_PAUSED = "daemon_paused"
    DAEMON_STANDS_BY = "daemon_stands_by"
    DAEMON_STOPPED = "daemon_stopped"
    DELTA_DISCARDED = "delta_discarded"
    DELTA_MADE = "delta_made"
    EVENTS_UNAVAILABLE = "events_unavailable"
    FAULT = "fault"
    HEARTBEAT_RESUMED = "heartbeat_resumed"
    HEARTBEAT_STOPPED = "heartbeat_stopped"
    JOB_FOUND = "job_found"
    JOB_GONE = "job_gone"
    JOB_HANGS = "job_hangs"
    JOB_UNAVAILABLE = "job_unavailable"
    LEFT_ALONE = "left_alone"
    LEFTOVER_REMOVED = "leftover_removed"
    MERGE_ENDED = "merge_ended"
    MERGE_LATE = "merge_late"
    METRICS_SERVED = "metrics_served"
    METRICS_UNWRITTEN = "metrics_unwritten"
    MODEL_CONFIG_CHANGED = "model_config_changed"
    NO_DELTA = "no_delta"
    NAME_AWAITED = "name_awaited"
    NAME_LOST = "name_lost"
    PRUNED = "pruned"
    PUT_BACK = "put_back"
    RECORD_LOST = "record_lost"
    RECORD_UNWRITTEN = "record_unwritten"
    RESERVE_GIVEN_UP = "reserve_given_up"
    RESERVE_SHORT = "reserve_short"
    RIGHTS_MISSING = "rights_missing"
    ROLLBACK_REFUSED = "rollback_refused"
    ROOT_SERVED = "root_served"
    SAVE_QUARANTINED = "save_quarantined"
    SAVE_SKIPPED = "save_skipped"
    SESSION_LOST = "session_lost"
    VERSION_ADOPTED = "version_adopted"
    VERSION_DAMAGED = "version_damaged"
    VERSION_DISCARDED = "version_discarded"
    VERSION_NAMES = "version_names"
    VERSION_NONFINITE = "version_nonfinite"
    VERSION_PUBLISHED = "version_published"
    VERSION_ROLLED_BACK = "version_rolled_back"
    WAITING = "waiting"
    WATCHING = "watching"

    def __call__(self, **fields: object) -> dict[str, object]:
        """The ``extra`` argument of a logger's call. Values that are not JSON become text."""
        return {"event": self.value, "fields": fields}
