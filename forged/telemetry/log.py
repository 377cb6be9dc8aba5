"""The daemon's log.

Invariants:
- Logging never raises and never blocks.
- Each event is one line: JSON, or aligned text on a terminal. Under journald a line begins with its syslog priority,
  which journald parses and removes.
- A level change applies to all bound loggers.
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
from forged.telemetry.rendering import PrettyFormatter, to_json
from forged.telemetry.writer import LineWriter, writer_for

FORMATS = ("auto", "json", "pretty")
CLOSE_TIMEOUT_S = 1.0
"""How long a stopping daemon waits for its log to be written."""

Render = Callable[[Mapping[str, Any]], bytes]
_PRIORITIES: Mapping[str, bytes] = {"debug": b"<7>", "info": b"<6>", "warning": b"<4>", "error": b"<3>"}
_BROKEN = "event cannot be formatted"


class Logs:
    """Owns the log, its level, and the thread that writes it."""

    def __init__(self, render: Render, stream: TextIO | None, clock: Clock, threshold: int) -> None:
        self._sink = writer_for(stream)
        self._outlet = _Outlet(LineWriter(self._sink, self._loss_line), threshold)
        self._render = render
        self._clock = clock
        self.log: Log = _Logger(self._outlet, (self._stamp, format_exc_info, self._finish), {})

    @property
    def lost(self) -> int:
        """The number of lines lost since the start."""
        return self._outlet.writer.lost

    def set_level(self, level: str) -> None:
        """Log events of this level and above."""
        self._outlet.threshold = _threshold(level)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Write the queued lines, for at most `timeout_s`; later lines are discarded."""
        if self._outlet.writer.close(timeout_s):
            self._sink.close()

    def _stamp(self, logger: Any, level: str, event: Mapping[str, Any]) -> dict[str, Any]:
        now = datetime.fromtimestamp(self._clock.wall(), UTC).isoformat(timespec="milliseconds")
        head = {"timestamp": now.replace("+00:00", "Z"), "level": level, "event": event["event"]}
        # A field cannot override the timestamp, level or event.
        return head | {key: value for key, value in event.items() if key not in head}

    def _finish(self, logger: Any, level: str, event: Mapping[str, Any]) -> bytes:
        return self._render(event) + b"\n"

    def _loss_line(self, lines: int, why: str) -> bytes:
        event = {"event": "log lines lost", "lines": lines, "reason": why}
        return self._finish(None, "warning", self._stamp(None, "warning", event))


def configure(
    level: str = "info",
    format: str = "auto",  # noqa: A002 - the name of the setting
    stream: TextIO | None = None,
    *,
    clock: Clock | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Logs:
    """Log to a stream, by default standard error. Format `auto` is pretty on a terminal, otherwise JSON."""
    if format not in FORMATS:
        raise ConfigError("log_format", f"log_format must be one of {', '.join(FORMATS)}, got {format!r}")
    threshold = _threshold(level)
    stream = sys.stderr if stream is None else stream
    terminal = _is_terminal(stream)
    if format == "pretty" or (format == "auto" and terminal):
        render: Render = PrettyFormatter(colours=terminal and _wants_colours(environment))
    elif _is_journal(stream, environment):
        render = _with_priority
    else:
        render = to_json
    return Logs(render, stream, clock or SystemClock(), threshold)


class _Outlet:
    """The writer and level that all bound loggers share."""

    __slots__ = ("threshold", "writer")

    def __init__(self, writer: LineWriter, threshold: int) -> None:
        self.writer = writer
        self.threshold = threshold


class _Logger(BoundLoggerBase):
    """A structlog logger that reads its level at each call, so that it can change."""

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
        except Exception as error:  # noqa: BLE001 - logging must not fail its caller
            outlet.writer.lose(f"{_BROKEN}: {describe(error)}")


def _with_priority(event: Mapping[str, Any]) -> bytes:
    return _PRIORITIES[event["level"]] + to_json(event)


def _threshold(level: str) -> int:
    if level not in LEVELS:
        raise ConfigError("log_level", f"log_level must be one of {', '.join(LEVELS)}, got {level!r}")
    return LEVELS[level]


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:
        return False


def _wants_colours(environment: Mapping[str, str]) -> bool:
    return not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"


def _is_journal(stream: TextIO | None, environment: Mapping[str, str]) -> bool:
    """Whether the stream is the journal: `JOURNAL_STREAM` names its device and inode."""
    try:
        status = os.fstat(stream.fileno()) if stream is not None else None
    except (OSError, ValueError):
        return False
    return status is not None and environment.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"
