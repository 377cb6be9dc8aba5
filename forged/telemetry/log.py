"""The daemon's log.

Law: logging never fails and never waits. Each event is one line: a JSON object for programs, text for people on a
terminal. Under journald a line begins with its priority, which journald takes off again and files it by. The level can
be changed while the daemon runs, for everybody who logs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

from structlog import BoundLoggerBase
from structlog.processors import format_exc_info

from forged.clock import Clock, SystemClock
from forged.errors import ConfigError, describe
from forged.log import LEVELS, Log
from forged.telemetry.rendering import ForPeople, to_json
from forged.telemetry.writer import LineWriter, writer_for

FORMATS = ("auto", "json", "pretty")
CLOSE_TIMEOUT_S = 1.0
"""What the end of the daemon may wait for whoever reads its log."""

Render = Callable[[Mapping[str, Any]], bytes]
_PRIORITIES: Mapping[str, bytes] = {"debug": b"<7>", "info": b"<6>", "warning": b"<4>", "error": b"<3>"}
_BROKEN = "an event could not be shown"


class Logs:
    """Owns the log, its level, and the thread that writes it."""

    def __init__(self, render: Render, stream: TextIO | None, clock: Clock, threshold: int) -> None:
        self._sink = writer_for(stream)
        self._outlet = _Outlet(LineWriter(self._sink, self._tell_loss), threshold)
        self._render = render
        self._clock = clock
        self.log: Log = _Logger(self._outlet, (self._stamp, format_exc_info, self._finish), {})

    @property
    def lost(self) -> int:
        """How many lines could not be written since the start."""
        return self._outlet.writer.lost

    def set_level(self, level: str) -> None:
        """Say what is of this level or above, from now on."""
        self._outlet.threshold = _threshold(level)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Write what waits, for so long at most; what is logged afterwards is lost."""
        if self._outlet.writer.close(timeout_s):
            self._sink.close()

    def _stamp(self, logger: Any, level: str, event: Mapping[str, Any]) -> dict[str, Any]:
        now = datetime.fromtimestamp(self._clock.wall(), UTC).isoformat(timespec="milliseconds")
        head = {"timestamp": now.replace("+00:00", "Z"), "level": level, "event": event["event"]}
        # Who gives a field one of these names does not get to say when and how bad it was.
        return head | {key: value for key, value in event.items() if key not in head}

    def _finish(self, logger: Any, level: str, event: Mapping[str, Any]) -> bytes:
        return self._render(event) + b"\n"

    def _tell_loss(self, lines: int, why: str) -> bytes:
        event = {"event": "log lines were lost", "lines": lines, "why": why}
        return self._finish(None, "warning", self._stamp(None, "warning", event))


def configure(
    level: str = "info",
    format: str = "auto",  # noqa: A002 - the name of the setting
    stream: TextIO | None = None,
    *,
    clock: Clock | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Logs:
    """Begin to log to a stream, standard error unless another is given. `auto` is pretty on a terminal, else JSON."""
    if format not in FORMATS:
        raise ConfigError("log_format", f"log_format = {format!r}", f"one of {', '.join(FORMATS)}")
    threshold = _threshold(level)
    stream = sys.stderr if stream is None else stream
    terminal = _is_terminal(stream)
    if format == "pretty" or (format == "auto" and terminal):
        render: Render = ForPeople(colours=terminal and _wants_colours(environment))
    elif _is_journal(stream, environment):
        render = _with_priority
    else:
        render = to_json
    return Logs(render, stream, clock or SystemClock(), threshold)


class _Outlet:
    """Where all bound loggers lead."""

    __slots__ = ("threshold", "writer")

    def __init__(self, writer: LineWriter, threshold: int) -> None:
        self.writer = writer
        self.threshold = threshold


class _Logger(BoundLoggerBase):
    """A bound logger of structlog whose level can change after it was given away."""

    _logger: _Outlet

    def hears(self, level: str, /) -> bool:
        return LEVELS[level] >= self._logger.threshold

    def debug(self, event: str, **fields: Any) -> None:
        self._say("debug", event, fields)

    def info(self, event: str, **fields: Any) -> None:
        self._say("info", event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._say("warning", event, fields)

    def error(self, event: str, **fields: Any) -> None:
        self._say("error", event, fields)

    def _say(self, level: str, event: str, fields: dict[str, Any]) -> None:
        outlet = self._logger
        if LEVELS[level] < outlet.threshold:
            return
        try:
            (line,), _ = self._process_event(level, event, fields)
            outlet.writer.put(line)
        except Exception as error:  # noqa: BLE001 - whoever logs has something better to do than to fail over it
            outlet.writer.lose(f"{_BROKEN}: {describe(error)}")


def _with_priority(event: Mapping[str, Any]) -> bytes:
    return _PRIORITIES[event["level"]] + to_json(event)


def _threshold(level: str) -> int:
    if level not in LEVELS:
        raise ConfigError("log_level", f"log_level = {level!r}", f"one of {', '.join(LEVELS)}")
    return LEVELS[level]


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:
        return False


def _wants_colours(environment: Mapping[str, str]) -> bool:
    return not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"


def _is_journal(stream: TextIO | None, environment: Mapping[str, str]) -> bool:
    """Whether what is written goes to journald: it says which file that is, in case the stream leads elsewhere."""
    try:
        status = os.fstat(stream.fileno()) if stream is not None else None
    except (OSError, ValueError):
        return False
    return status is not None and environment.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"
