"""Warnings and errors of libraries and the event loop in the daemon's log."""

from __future__ import annotations

import asyncio
import logging

import pytest

from forged.telemetry.library_logs import LINES_PER_S_MAX, LibraryLogs, collected
from forged.telemetry.report import ExceptionReport
from tests.net.manual_daemon import ManualClock, until
from tests.telemetry.recording_log import RecordingLog

library = logging.getLogger("a.library")


class LogFixture:
    """A recording log that collects library logs."""

    def __init__(self) -> None:
        self.log, self.clock = RecordingLog(), ManualClock()
        self.library_logs = LibraryLogs(self.log, ExceptionReport(self.log, self.clock).log, self.clock)


@pytest.fixture
async def fixture() -> LogFixture:
    return LogFixture()


async def test_library_warnings_and_errors_are_logged_and_lower_levels_are_not(fixture: LogFixture) -> None:
    with collected(fixture.library_logs):
        library.info("not collected")
        library.warning("a %s", "warning")
        library.error("an error")
    assert fixture.log.lines == [
        ("warning", "library log", {"logger": "a.library", "reason": "a warning"}),
        ("error", "library log", {"logger": "a.library", "reason": "an error"}),
    ]


async def test_library_exception_is_logged_with_its_traceback(fixture: LogFixture) -> None:
    with collected(fixture.library_logs):
        try:
            raise ZeroDivisionError
        except ZeroDivisionError:
            library.exception("it broke")
    [mistake] = fixture.log.of("unexpected exception")
    assert mistake["owner"] == "a.library: it broke"
    assert "ZeroDivisionError" in mistake["exception"]


async def test_failed_callback_is_logged_with_its_traceback(fixture: LogFixture) -> None:
    with collected(fixture.library_logs):
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)
        await until(lambda: bool(fixture.log.lines))
    assert "ZeroDivisionError" in fixture.log.of("unexpected exception")[0]["exception"]


async def test_event_loop_error_without_exception_is_logged(fixture: LogFixture) -> None:
    with collected(fixture.library_logs):
        asyncio.get_running_loop().call_exception_handler({"message": "something odd"})
    assert fixture.log.of("event loop error") == [{"reason": "something odd"}]


async def test_library_logs_over_the_rate_are_counted(fixture: LogFixture) -> None:
    with collected(fixture.library_logs):
        for _ in range(1000):
            library.warning("again")
    assert len(fixture.log.lines) == LINES_PER_S_MAX
    fixture.library_logs.look(fixture.clock.now + 10)
    assert fixture.log.of("library logs left out") == [{"times": 990}]


async def test_library_record_with_a_bad_format_does_not_raise(fixture: LogFixture) -> None:
    fixture.library_logs.handle(logging.LogRecord("a.library", logging.WARNING, "", 1, "%d", ("no number",), None))
    assert fixture.log.of("library log cannot be formatted")[0]["logger"] == "a.library"


async def test_logging_is_restored_after_the_block(fixture: LogFixture) -> None:
    loop = asyncio.get_running_loop()
    before = loop.get_exception_handler()
    with collected(fixture.library_logs):
        assert loop.get_exception_handler() is not before
    assert loop.get_exception_handler() is before
    assert fixture.library_logs not in logging.getLogger().handlers
