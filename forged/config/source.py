"""Where the settings come from: a file in TOML, under the command line, over the defaults of a user.

Law: what is read is whole or refused. A file that is being written is not taken for the truth, every problem is told
with the line or the flag where somebody can mend it, and a refused reload leaves everything as it was.
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

from forged.config.lines import broken_line, key_lines
from forged.config.model import Config, find_problems
from forged.errors import ConfigError, Problem
from forged.paths import default_data_dir, default_socket

FILE_BYTES_MAX = 256 << 10
"""All settings of the largest file fit, twice, into the smallest frame that can be configured."""
PAUSE_S = 0.1
READS_MAX = 20
"""How often a file is read that is different each time, before a reload is refused."""
PROBLEMS_MAX = 100
COMMAND_LINE = "the command line"


@dataclass(frozen=True)
class Source:
    """A text of settings, and where in it they are; for those that find something wrong with them later, too."""

    path: Path
    text: str

    def line_of(self, key: str) -> int | None:
        """The line at which a key is written, a dotted path, or else the nearest table that it is in."""
        while key and key not in self._lines:
            key = key.rpartition(".")[0]
        return self._lines.get(key)

    def locate(self, problem: Problem) -> Problem:
        """The problem with its line."""
        return replace(problem, line=self.line_of(problem.key))

    @cached_property
    def _lines(self) -> Mapping[str, int]:
        return key_lines(self.text)


class Settings:
    """The settings of one daemon: reads them for its start, and again while it runs.

    `adapt` is what the process makes of them, such as fewer connections where the system allows fewer open files; it
    is asked each time, so that what it changes does not look like somebody's wish.
    """

    def __init__(
        self,
        path: Path | None,
        overrides: Mapping[str, Any],
        environment: Mapping[str, str],
        uid: int,
        *,
        adapt: Callable[[Config], Config] = lambda config: config,
        pause: Callable[[], None] = lambda: time.sleep(PAUSE_S),
    ) -> None:
        self.path = None if path is None else path.absolute()
        self.source: Source | None = None
        """What was read and found valid last."""
        self._overrides = {key: value for key, value in overrides.items() if value is not None}
        self._environment = dict(environment)
        self._uid = uid
        self._adapt = adapt
        self._pause = pause

    @property
    def defaults(self) -> Config:
        """What holds where neither the file nor the command line says anything."""
        return self._complete(Config())

    def load(self) -> Config:
        """The settings to start with."""
        return self._accept(None if self.path is None else _source(self.path, _read(self.path)))

    def reload(self) -> Config:
        """The settings as they are now; takes a while, because the file must not change meanwhile."""
        return self._accept(None if self.path is None else _source(self.path, self._read_settled(self.path)))

    def locate(self, problem: Problem) -> Problem:
        """The problem with the place where its key was set."""
        return self._locate(problem, self.source)

    def _read_settled(self, path: Path) -> bytes:
        """A file that is the same twice; also when it is missing for a moment, as while an editor saves."""
        last = _look(path)
        for _ in range(READS_MAX):
            self._pause()
            before, last = last, _look(path)
            if isinstance(last, bytes):
                if last == before:
                    return last
            elif isinstance(before, ConfigError) and before.code == last.code:
                raise last
        raise ConfigError("config_unsettled", f"{path} does not stop changing", "reload again when it is written")

    def _accept(self, source: Source | None) -> Config:
        values = ({} if source is None else _parse(source)) | self._overrides
        problems = [self._locate(problem, source) for problem in find_problems(values)]
        if problems:
            raise _invalid(self.path, problems)
        config = self._adapt(self._complete(Config(**values)))
        self.source = source
        return config

    def _locate(self, problem: Problem, source: Source | None) -> Problem:
        if problem.key.partition(".")[0] in self._overrides:
            return replace(problem, place=COMMAND_LINE)
        return problem if source is None else source.locate(problem)

    def _complete(self, config: Config) -> Config:
        data_dir = config.data_dir or default_data_dir(self._environment, self._uid)
        socket = config.socket or default_socket(self._environment, self._uid)
        # Absolute, so that what `status` tells holds in every directory.
        return replace(
            config,
            data_dir=_absolute(data_dir),
            socket=_absolute(socket),
            plugin_dir=_absolute(config.plugin_dir) if config.plugin_dir else "",
        )


def load(path: Path | None, overrides: Mapping[str, Any], environment: Mapping[str, str], uid: int) -> Config:
    """The settings of a file, under those of the command line, over the defaults of this user."""
    return Settings(path, overrides, environment, uid).load()


def _absolute(path: str) -> str:
    return os.path.abspath(path)  # noqa: PTH100 - Path.resolve would follow links


def _look(path: Path) -> bytes | ConfigError:
    """What can be read of a file that is there for good; empty is what one is that somebody begins to write."""
    try:
        data = _read(path, again=True)
    except ConfigError as error:
        return error
    return data or ConfigError("config_empty", f"{path} is empty", "write settings, or a comment, into it")


def _read(path: Path, *, again: bool = False) -> bytes:
    """A file's bytes. The first time that may be a pipe; later one in its place would be waited for without end."""
    try:
        with open(path, "rb", opener=_open_at_once if again else None) as file:
            if again and not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise _unreadable(path, "it is not a file that can be read again")
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise _unreadable(path, error.strerror) from error
    if len(data) > FILE_BYTES_MAX:
        reason = f"{path} has more than {FILE_BYTES_MAX} bytes"
        raise ConfigError("config_too_large", reason, "name a file with settings")
    return data


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def _unreadable(path: Path, reason: str | None) -> ConfigError:
    return ConfigError("config_unreadable", f"{path}: {reason}", "name a file that can be read")


def _source(path: Path, data: bytes) -> Source:
    try:
        # Some editors mark their files as UTF-8.
        return Source(path, data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _not_toml(path, f"byte {data[error.start]:#04x} is no UTF-8 (at line {line})") from error


def _parse(source: Source) -> dict[str, Any]:
    try:
        return tomllib.loads(source.text)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
        line = None if "(at line" in reason else broken_line(source.text)
        where = "" if line is None else f"; what is not right begins at line {line}"
        raise _not_toml(source.path, reason + where) from error


def _not_toml(path: Path, reason: str) -> ConfigError:
    return ConfigError("config_not_toml", f"{path}: {reason}", "write it as TOML")


def _invalid(path: Path | None, problems: Iterable[Problem]) -> ConfigError:
    found = sorted(problems, key=lambda problem: (problem.line is None, problem.line or 0))
    where = COMMAND_LINE if all(problem.place == COMMAND_LINE for problem in found) else path
    more = len(found) - PROBLEMS_MAX
    fix = "mend these keys" if more <= 0 else f"mend these keys and {more} more"
    return ConfigError("config_invalid", f"{where} is not a valid configuration", fix, found[:PROBLEMS_MAX])
