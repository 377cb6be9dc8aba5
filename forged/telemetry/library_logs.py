"""What libraries and the event loop complain about, in the daemon's own log.

Law: nothing in the process writes to the log's stream but the log, so every line can be read by a program. What others
say is limited like everything that strangers can cause.
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

COMPLAINTS_PER_S_MAX = 10.0

TellMistake = Callable[[str, BaseException], None]


class LibraryLogs(logging.Handler):
    """Takes what is logged by Python's `logging`, warnings and worse."""

    def __init__(self, log: Log, tell_mistake: TellMistake, clock: Clock) -> None:
        super().__init__(logging.WARNING)
        self._log = log
        self._tell_mistake = tell_mistake
        self._now = clock.monotonic
        self._flood = RateLimit(COMPLAINTS_PER_S_MAX, COMPLAINTS_PER_S_MAX, clock.monotonic())

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._tell(record)
        except Exception as error:  # noqa: BLE001 - a library that formats badly must not fail over being heard
            self._log.warning("a library said what cannot be shown", logger=record.name, error=describe(error))

    def look(self, now: float) -> None:
        """Tell how many were left out."""
        if left_out := self._flood.count(now):
            self._log.warning("libraries complained more than is told", times=left_out)

    def take(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Hear what the event loop has to say about a task or a callback that failed."""
        error, message = context.get("exception"), str(context.get("message"))
        if error is not None:
            self._tell_mistake(message, error)
        elif self._flood.admits(self._now()):
            self._log.error("the event loop complained", why=message)

    def _tell(self, record: logging.LogRecord) -> None:
        if record.exc_info is not None and record.exc_info[1] is not None:
            self._tell_mistake(f"{record.name}: {record.msg}", record.exc_info[1])
        elif self._flood.admits(self._now()):
            tell = self._log.error if record.levelno >= logging.ERROR else self._log.warning
            tell("a library complained", logger=record.name, why=record.getMessage())


@contextmanager
def adopted(complaints: LibraryLogs) -> Iterator[None]:
    """Hear everybody inside the block. To be entered on the event loop."""
    loop, root = asyncio.get_running_loop(), logging.getLogger()
    before = loop.get_exception_handler()
    loop.set_exception_handler(complaints.take)
    root.addHandler(complaints)
    try:
        yield
    finally:
        root.removeHandler(complaints)
        loop.set_exception_handler(before)
