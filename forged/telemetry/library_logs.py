"""Log records of libraries and errors of the event loop, written to the daemon's log.

Invariants:
- Only the daemon's log writes to the log stream, so that every line can be parsed.
- Library lines are limited per second, because clients can cause them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from forged.clock import Clock
from forged.errors import describe
from forged.log import Log
from forged.rate_limit import RateLimit

LINES_PER_S_MAX = 10.0

ReportException = Callable[[str, BaseException], None]


class LibraryLogs(logging.Handler):
    """A handler of Python's `logging` for warnings and errors."""

    def __init__(self, log: Log, report_exception: ReportException, clock: Clock) -> None:
        super().__init__(logging.WARNING)
        self._log = log
        self._report_exception = report_exception
        self._now = clock.monotonic
        self._limit = RateLimit(LINES_PER_S_MAX, LINES_PER_S_MAX, clock.monotonic())

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._log_one(record)
        except Exception as error:  # noqa: BLE001 - a badly formatted record must not raise in the library
            self._log.warning("library log cannot be formatted", logger=record.name, error=describe(error))

    def look(self, now: float) -> None:
        """Log how many lines were left out."""
        if omitted := self._limit.count(now):
            self._log.warning("library logs left out", times=omitted)

    def take(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """The event loop's exception handler."""
        error, message = context.get("exception"), str(context.get("message"))
        if error is not None:
            self._report_exception(message, error)
        elif self._limit.admits(self._now()):
            self._log.error("event loop error", reason=message)

    def _log_one(self, record: logging.LogRecord) -> None:
        if record.exc_info is not None and record.exc_info[1] is not None:
            self._report_exception(f"{record.name}: {record.msg}", record.exc_info[1])
        elif self._limit.admits(self._now()):
            tell = self._log.error if record.levelno >= logging.ERROR else self._log.warning
            tell("library log", logger=record.name, reason=record.getMessage())


@contextmanager
def collected(library_logs: LibraryLogs) -> Iterator[None]:
    """Collect library logs and event loop errors inside the block. Enter it on the event loop."""
    loop, root = asyncio.get_running_loop(), logging.getLogger()
    before = loop.get_exception_handler()
    loop.set_exception_handler(library_logs.take)
    root.addHandler(library_logs)
    try:
        yield
    finally:
        root.removeHandler(library_logs)
        loop.set_exception_handler(before)
