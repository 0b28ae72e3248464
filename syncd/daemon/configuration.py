"""The daemon's configuration: reading, checking and reloading it.

Options override the environment, which overrides the file, which overrides the defaults.
"""

from __future__ import annotations

import difflib
import json
import logging
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Final

from pydantic import ValidationError

from syncd.daemon.config import KEYS, LIVE_KEYS, RunConfig
from syncd.protocol.errors import InvalidSettingsError
from syncd.protocol.events import ConfigChanged, ConfigNeedsRestart, ConfigRead, ConfigRefused
from syncd.protocol.gone import GONE
from syncd.protocol.names import printable

log = logging.getLogger(__name__)

PREFIX: Final = "SYNCD_"
DEFAULT: Final = "default"
#: The most bytes of a configuration file, and the most characters of a value in a message.
_LIMIT: Final = 1024 * 1024
_SHOWN: Final = 200
#: How similar a name must be to a key for a suggestion.
_ALIKE: Final = 0.7
_NO_TABLES: Final = "write all keys at the top level of the file, without a table"


@dataclass(frozen=True)
class GivenValue:
    """A configured value before it is checked.

    Attributes:
        source: the file, environment variable or option, as text for people.
        is_local: True if the value may be a relative path.
    """

    value: object
    source: str
    is_local: bool = False


@dataclass(frozen=True)
class Configuration:
    """A configuration, and the source of each value.

    Attributes:
        sources: key → a file, an environment variable, an option, or ``default``.
    """

    config: RunConfig
    sources: Mapping[str, str]
    file: Path | None

    @property
    def job(self) -> Path:
        """The job directory; raises InvalidSettingsError if no job is configured."""
        if self.config.job is None:
            where = "as job = \"/…\" in a configuration file ('--config FILE')"
            if self.file is not None:
                where = f'as job = "/…" in {self.file}'
            raise InvalidSettingsError(
                f"no job is given. Give the job on the command line, or {where}"
            )
        return self.config.job

    @property
    def root(self) -> Path | None:
        """The folder of many jobs, or None; raises InvalidSettingsError if a job is named too."""
        config = self.config
        if config.root is not None and config.job is not None:
            told = " and ".join(
                f"{key} = {printable(getattr(config, key))} ({printable(self.sources[key])})"
                for key in ("job", "root")
            )
            raise InvalidSettingsError(
                f"the configuration names both a job and a folder of many jobs: {told}. "
                "Leave out one of these two keys"
            )
        return config.root


def load(
    file: Path | None,
    environ: Mapping[str, str],
    options: Mapping[str, GivenValue] | None = None,
) -> Configuration:
    """Read a configuration from a TOML file, the environment and the command line.

    An environment variable sets a key: ``SYNCD_KEEP`` sets ``keep``.

    Raises:
        InvalidSettingsError: the file cannot be read, or a value cannot be used. Each line of the
            message names one wrong value, its source and the allowed values.
    """
    given = _from_file(file) if file is not None else {}
    given |= {
        key: GivenValue(environ[name], name)
        for key in (*KEYS, *GONE)
        if (name := PREFIX + key.upper()) in environ
    }
    given |= options or {}
    optional = {key for key in KEYS if NoneType in KEYS[key].marks}
    values = {
        key: None if entry.value == "" and key in optional else entry.value
        for key, entry in given.items()
    }
    wrong = {key: _line(key, entry) for key, entry in given.items() if _is_misplaced(key, entry)}
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        for entry in error.errors(include_url=False):
            key = str(entry["loc"][0]) if entry["loc"] else ""
            wrong.setdefault(key, _refused(key, given[key]))
    if wrong:
        raise InvalidSettingsError("\n".join(wrong.values()))
    sources = {key: given[key].source if key in given else DEFAULT for key in KEYS}
    return Configuration(config, sources, file)


def misspelt(environ: Mapping[str, str]) -> dict[str, str]:
    """Misspelt environment variables: unknown name → the known name that it resembles."""
    found = {}
    for name in environ:
        if name.startswith(PREFIX):
            key = name.removeprefix(PREFIX).lower()
            if key not in {*KEYS, *GONE} and (meant := nearest(key)):
                found[name] = PREFIX + meant.upper()
    return found


def to_toml(configuration: Configuration) -> str:
    """A configuration file with all keys; comments name each value's source."""
    lines = []
    for key, value in written(configuration.config).items():
        shown = f"{key} = {toml_value(value)}"
        lines.append(f"{shown:<50} # {printable(configuration.sources[key])}")
    return "\n".join(lines) + "\n"


def written(config: RunConfig) -> dict[str, object]:
    """Key → value, in types of TOML and JSON. None becomes an empty string."""
    return {
        key: "" if value is None else value for key, value in config.model_dump(mode="json").items()
    }


def toml_value(value: object) -> str:
    """A value in TOML syntax: the same as in JSON, except that U+007F is escaped."""
    return json.dumps(value, ensure_ascii=False, default=str).replace("\x7f", "\\u007f")


@dataclass
class ConfigReloader:
    """A configuration that can be read again while the daemon runs.

    An invalid configuration changes nothing. Only the keys in ``LIVE_KEYS`` change. Other keys keep
    their old values, and a warning is logged.

    Args:
        applied: called with the first configuration, and with each one that takes effect later.

    Attributes:
        current: the configuration in force.
        whole: True if all values that were read last are in force.
    """

    read: Callable[[], Configuration]
    applied: Callable[[RunConfig], None] = lambda _: None

    def __post_init__(self) -> None:
        self.current = self.read()
        self.whole = True
        self.applied(self.current.config)

    def again(self) -> RunConfig | None:
        """Read the configuration again; returns the values in force, or None after an error."""
        self.whole = False
        try:
            asked = self.read()
        except InvalidSettingsError as error:
            ConfigRefused(self.current.file, "; ".join(str(error).split("\n"))).tell(log)
            return None
        before, after = written(self.current.config), written(asked.config)
        changed = {key for key in KEYS if before[key] != after[key]}
        for key in sorted(changed):
            kind = ConfigChanged if key in LIVE_KEYS else ConfigNeedsRestart
            kind(key, after[key], before[key]).tell(log)
        live, stays = changed & LIVE_KEYS, changed - LIVE_KEYS
        config = self.current.config.model_copy(
            update={key: getattr(asked.config, key) for key in live}
        )
        sources = {**asked.sources, **{key: self.current.sources[key] for key in stays}}
        self.current = replace(asked, config=config, sources=sources)
        self.whole = not stays
        self.applied(config)
        ConfigRead(asked.file, len(live)).tell(log)
        return config


def _from_file(file: Path) -> dict[str, GivenValue]:
    try:
        with file.open("rb") as stream:
            content = stream.read(_LIMIT + 1)
    except OSError as error:
        raise InvalidSettingsError(
            f"cannot read the configuration {printable(file)}: {error.strerror}"
        ) from error
    if len(content) > _LIMIT:
        raise InvalidSettingsError(
            f"{printable(file)} is not a configuration: it is larger than 1 MiB"
        )
    try:
        found = tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:  # ValueError: 5000 digits, for example
        raise InvalidSettingsError(f"{printable(file)} is not TOML: {error}") from error
    return {key: GivenValue(value, printable(file)) for key, value in found.items()}


def _is_misplaced(key: str, one: GivenValue) -> bool:
    """True for a relative path, or a path with NUL."""
    path = one.value
    if one.is_local or key not in KEYS or KEYS[key].base is not Path or not isinstance(path, str):
        return False
    return bool(path) and (not Path(path).is_absolute() or "\0" in path)


def _refused(key: str, entry: GivenValue) -> str:
    if key in KEYS:
        return _line(key, entry)
    shown = f"{key} = {_shown(entry.value)}"
    if isinstance(entry.value, dict):
        shown, why = f"[{key}]", f"unknown key: {_NO_TABLES}"
    elif key in GONE:
        why = f"this key was removed: {GONE[key]}"
    elif meant := nearest(key):
        why = f"unknown key; did you mean {meant}?"
    else:
        why = "unknown key: 'syncd config show' lists all keys"
    return f"{entry.source}: {printable(shown)}: {why}"


def _line(key: str, entry: GivenValue) -> str:
    of_environment = entry.source == PREFIX + key.upper()
    shown = f"the environment: {entry.source}" if of_environment else f"{entry.source}: {key}"
    return f"{shown} = {_shown(entry.value)}: must be {KEYS[key].allowed}"


def _shown(value: object) -> str:
    text = printable(toml_value(value))
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def nearest(key: str) -> str | None:
    """The most similar known key, if any is similar."""
    if key == "dtype":  # after the option
        return "cast"
    return next(iter(difflib.get_close_matches(key, KEYS, n=1, cutoff=_ALIKE)), None)
