"""Reports to the catalogue on virtual time: in order, once the daemon answers, and never in the way."""

from __future__ import annotations

import os
import threading
from functools import partial
from typing import Any, cast

import anyio
import anyio.lowlevel
import pytest

from forged.errors import RequestRefused, Unavailable
from forged.log import SILENT
from forged.worker.catalog.reports import REPORTS_MAX, CheckpointReports, Report
from forged.worker.registration import Registration
from tests.kernel_fixture import on_virtual_time, task_group
from tests.telemetry.recording_log import RecordingLog


class Daemon:
    """Takes reports; may be away, refuse some, or have been closed."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.is_there = anyio.Event()
        self.is_there.set()
        self.refused: set[str] = set()
        self.is_closed = False

    async def hear(self, what: str, registration: Any) -> None:
        if self.is_closed:
            raise Unavailable("client_closed", "the client was closed")
        await self.is_there.wait()
        if what in self.refused:
            raise RequestRefused("checkpoint_path_taken", "not yours")
        self.heard.append(what)

    def report(self, what: str, storage_path: str = "") -> Report:
        return Report(what, partial(self.hear, what), storage_path)


REGISTRATION = cast("Registration", None)


@on_virtual_time
async def test_reports_are_sent_in_order_as_they_come() -> None:
    daemon, reports = Daemon(), CheckpointReports(SILENT)
    reports.add(daemon.report("before the session"))
    async with task_group() as tasks:
        tasks.start_soon(reports.run, REGISTRATION)
        await anyio.sleep(1.0)
        for number in range(3):
            reports.add(daemon.report(f"{number}"))
        await anyio.sleep(1.0)
    assert daemon.heard == ["before the session", "0", "1", "2"]


async def test_reports_are_taken_from_any_thread() -> None:
    daemon, reports = Daemon(), CheckpointReports(SILENT)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(reports.run, REGISTRATION)
        await anyio.lowlevel.checkpoint()
        thread = threading.Thread(target=reports.add, args=(daemon.report("from a thread"),))
        thread.start()
        with anyio.fail_after(30):
            while not daemon.heard:
                await anyio.sleep(0.001)
        thread.join()
        tasks.cancel_scope.cancel()


@on_virtual_time
async def test_report_that_was_interrupted_is_sent_by_the_next_session() -> None:
    daemon, reports = Daemon(), CheckpointReports(SILENT)
    daemon.is_there = anyio.Event()
    reports.add(daemon.report("a"))
    reports.add(daemon.report("b"))
    async with task_group() as tasks:
        tasks.start_soon(reports.run, REGISTRATION)
        await anyio.sleep(1.0)
    daemon.is_there.set()
    await reports.deliver(REGISTRATION)
    assert daemon.heard == ["a", "b"]


@on_virtual_time
async def test_closed_client_keeps_the_reports() -> None:
    daemon, reports = Daemon(), CheckpointReports(SILENT)
    daemon.is_closed = True
    reports.add(daemon.report("a"))
    await reports.deliver(REGISTRATION)
    daemon.is_closed = False
    await reports.deliver(REGISTRATION)
    assert daemon.heard == ["a"]


@on_virtual_time
async def test_refused_report_is_logged_and_holds_up_no_other() -> None:
    daemon, log = Daemon(), RecordingLog()
    reports = CheckpointReports(log)
    daemon.refused = {"a", "b"}
    for what in "abc":
        reports.add(daemon.report(what))
    await reports.deliver(REGISTRATION)
    assert daemon.heard == ["c"]
    # The same refusal is one warning.
    levels = [level for level, event, _ in log.lines if "does not take" in event]
    assert levels == ["warning", "info"]


@on_virtual_time
async def test_oldest_reports_are_dropped_with_one_warning() -> None:
    daemon, log = Daemon(), RecordingLog()
    reports = CheckpointReports(log)
    for number in range(REPORTS_MAX + 10):
        reports.add(daemon.report(str(number)))
    await reports.deliver(REGISTRATION)
    assert daemon.heard == [str(number) for number in range(10, REPORTS_MAX + 10)]
    assert len([event for _, event, _ in log.lines if "dropped" in event]) == 1


@on_virtual_time
async def test_withdrawn_checkpoint_is_not_reported() -> None:
    daemon, reports = Daemon(), CheckpointReports(SILENT)
    daemon.is_there = anyio.Event()
    for what, path in (("a", "/c/1"), ("b", "/c/2"), ("c", "/c/1"), ("d", "/c/2")):
        reports.add(daemon.report(what, path))
    async with task_group() as tasks:
        tasks.start_soon(reports.run, REGISTRATION)
        await anyio.sleep(1.0)
        # The daemon may have learnt of the one whose report is under way.
        assert reports.withdraw("/c/1") is False
        assert reports.withdraw("/c/2") is True
        assert reports.withdraw("/c/2") is None
        daemon.is_there.set()
        await anyio.sleep(1.0)
    assert daemon.heard == ["a", "c"]


def test_forked_child_reports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    daemon, reports = Daemon(), CheckpointReports(SILENT)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    reports.add(daemon.report("a"))
    monkeypatch.undo()
    anyio.run(reports.deliver, REGISTRATION)
    assert daemon.heard == []
