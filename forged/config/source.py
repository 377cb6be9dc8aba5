"""Reads the settings: defaults, overridden by a TOML file, overridden by the command line.

Invariants:
- A file is accepted as a whole or refused with all problems, each with its line or as a command line option.
- A reload reads the file until it is unchanged, because an editor may be writing it.
"""

from __future__ import annotations

import os
import stat
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from forged.config.lines import invalid_line, key_lines
from forged.config.model import Config, find_problems
from forged.errors import ConfigError, Problem
from forged.paths import default_data_dir, default_socket

FILE_BYTES_MAX = 256 << 10
"""Twice this size fits into the smallest configurable frame."""
READ_PAUSE_S = 0.1
READS_MAX = 20
"""How often a changing file is read before a reload is refused."""
PROBLEMS_MAX = 100
COMMAND_LINE = "the command line"


@dataclass(frozen=True)
class SettingsFile:
    """The text of a settings file, which can find the lines of keys."""

    path: Path
    text: str

    def line_of(self, key: str) -> int | None:
        """The line of a key, a dotted path, or of the nearest table above it."""
        while key and key not in self._lines:
            key = key.rpartition(".")[0]
        return self._lines.get(key)

    def locate(self, problem: Problem) -> Problem:
        """The problem with its line."""
        return replace(problem, line=self.line_of(problem.key))

    @cached_property
    def _lines(self) -> Mapping[str, int]:
        return key_lines(self.text)


class SettingsReader:
    """Reads the settings of one daemon, at the start and at reloads.

    `adapt` adjusts them to the process, such as fewer connections if the limit of open files is low. It is applied to
    each reading, so that its changes are not reported as changed settings.
    """

    def __init__(
        self,
        path: Path | None,
        overrides: Mapping[str, Any],
        environment: Mapping[str, str],
        uid: int,
        *,
        adapt: Callable[[Config], Config] = lambda config: config,
        pause: Callable[[], None] = lambda: time.sleep(READ_PAUSE_S),
    ) -> None:
        self.path = None if path is None else path.absolute()
        self.source: SettingsFile | None = None
        """The last valid file."""
        self._overrides = {key: value for key, value in overrides.items() if value is not None}
        self._environment = dict(environment)
        self._uid = uid
        self._adapt = adapt
        self._pause = pause

    @property
    def defaults(self) -> Config:
        """The settings without a file and command line."""
        return self._complete(Config())

    def load(self) -> Config:
        return self._accept(None if self.path is None else _source(self.path, _read(self.path)))

    def reload(self) -> Config:
        """Read the settings again; takes a moment, because the file must stay unchanged."""
        return self._accept(None if self.path is None else _source(self.path, self._read_settled(self.path)))

    def locate(self, problem: Problem) -> Problem:
        return self._locate(problem, self.source)

    def _read_settled(self, path: Path) -> bytes:
        """Read until two readings are equal; also if the file is missing for a moment, while an editor saves it."""
        last = _try_read(path)
        for _ in range(READS_MAX):
            self._pause()
            before, last = last, _try_read(path)
            if isinstance(last, bytes):
                if last == before:
                    return last
            elif isinstance(before, ConfigError) and before.code == last.code:
                raise last
        raise ConfigError("config_unsettled", f"{path} keeps changing", "reload again when it is complete")

    def _accept(self, source: SettingsFile | None) -> Config:
        values = ({} if source is None else _parse(source)) | self._overrides
        problems = [self._locate(problem, source) for problem in find_problems(values)]
        if problems:
            raise _invalid(self.path, problems)
        config = self._adapt(self._complete(Config(**values)))
        self.source = source
        return config

    def _locate(self, problem: Problem, source: SettingsFile | None) -> Problem:
        if problem.key.partition(".")[0] in self._overrides:
            return replace(problem, place=COMMAND_LINE)
        return problem if source is None else source.locate(problem)

    def _complete(self, config: Config) -> Config:
        data_dir = config.data_dir or default_data_dir(self._environment, self._uid)
        socket = config.socket or default_socket(self._environment, self._uid)
        # Absolute, so that the paths in `status` are valid in every directory.
        return replace(
            config,
            data_dir=_absolute(data_dir),
            socket=_absolute(socket),
            plugin_dir=_absolute(config.plugin_dir) if config.plugin_dir else "",
        )


def load(path: Path | None, overrides: Mapping[str, Any], environment: Mapping[str, str], uid: int) -> Config:
    """The settings of a file and the command line, over the defaults of this user."""
    return SettingsReader(path, overrides, environment, uid).load()


def _absolute(path: str) -> str:
    return os.path.abspath(path)  # noqa: PTH100 - Path.resolve would follow links


def _try_read(path: Path) -> bytes | ConfigError:
    """The file's bytes or the error; an empty file is an error, because an editor may have just truncated it."""
    try:
        data = _read(path, again=True)
    except ConfigError as error:
        return error
    return data or ConfigError("config_empty", f"{path} is empty", "write settings, or a comment, into it")


def _read(path: Path, *, again: bool = False) -> bytes:
    """The file's bytes. `again` refuses pipes, which would block a reload."""
    try:
        with open(path, "rb", opener=_open_at_once if again else None) as file:
            if again and not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise _unreadable(path, "it is not a regular file")
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise _unreadable(path, error.strerror) from error
    if len(data) > FILE_BYTES_MAX:
        reason = f"{path} has more than {FILE_BYTES_MAX} bytes"
        raise ConfigError("config_too_large", reason, "name a settings file")
    return data


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def _unreadable(path: Path, reason: str | None) -> ConfigError:
    return ConfigError("config_unreadable", f"{path}: {reason}", "name a readable file")


def _source(path: Path, data: bytes) -> SettingsFile:
    try:
        # Some editors mark their files as UTF-8.
        return SettingsFile(path, data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _not_toml(path, f"byte {data[error.start]:#04x} is not UTF-8 (at line {line})") from error


def _parse(source: SettingsFile) -> dict[str, Any]:
    try:
        return tomllib.loads(source.text)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        line = None if "(at line" in reason else invalid_line(source.text)
        where = "" if line is None else f"; the invalid statement begins at line {line}"
        raise _not_toml(source.path, reason + where) from error


def _not_toml(path: Path, reason: str) -> ConfigError:
    return ConfigError("config_not_toml", f"{path}: {reason}", "write it as TOML")


def _invalid(path: Path | None, problems: Iterable[Problem]) -> ConfigError:
    found = sorted(problems, key=lambda problem: (problem.line is None, problem.line or 0))
    where = COMMAND_LINE if all(problem.place == COMMAND_LINE for problem in found) else path
    more = len(found) - PROBLEMS_MAX
    fix = "fix these keys" if more <= 0 else f"fix these keys and {more} more"
    return ConfigError("config_invalid", f"{where} is not a valid configuration", fix, found[:PROBLEMS_MAX])
