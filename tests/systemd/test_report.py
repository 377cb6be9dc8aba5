from __future__ import annotations

from typing import Any

import anyio
import msgspec
import pytest

from forged.errors import Unavailable
from forged.status.model import Status
from forged.systemd.report import UPDATE_INTERVAL_S, report, status_line
from tests.kernel_fixture import on_virtual_time
from tests.systemd.service_manager import FakeServiceManager


def status(**known: Any) -> Status:
    """A status with nothing in it but this."""
    blank: dict[str, Any] = {}
    for field in msgspec.structs.fields(Status):
        kinds = {int: 0, float: 0.0, str: ""}
        blank[field.name] = kinds.get(field.type, [] if "list" in str(field.type) else None)
    return Status(**blank | {"write_error": None} | known)


@pytest.mark.parametrize(
    ("known", "line"),
    [
        ({"jobs": 3, "connections": 12, "last_fact": 1234}, "3 jobs, 12 connections, fact 1234"),
        ({"jobs": 1, "connections": 1}, "1 job, 1 connection, fact 0"),
        ({"jobs": 3, "write_error": "the disk is full (make room)"}, "cannot write: the disk is full (make room)"),
    ],
)
def test_status_line_shows_write_error_or_counts(known: dict[str, Any], line: str) -> None:
    assert status_line(status(**known)) == line


@on_virtual_time
async def test_status_line_is_sent_once_per_change(
    manager: FakeServiceManager,
) -> None:
    jobs = 0

    async def read() -> Status:
        return status(jobs=jobs)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(report, manager.notifier, read)
        await anyio.sleep(UPDATE_INTERVAL_S * 3.5)
        for jobs in range(1, 100):  # noqa: B007 - the reader sees it
            await anyio.sleep(UPDATE_INTERVAL_S / 50)
        await anyio.sleep(UPDATE_INTERVAL_S)
        tasks.cancel_scope.cancel()
    messages = manager.received()
    assert messages[0] == ["STATUS=0 jobs, 0 connections, fact 0"]
    assert messages[-1] == ["STATUS=99 jobs, 0 connections, fact 0"]
    assert len(messages) <= 4


@on_virtual_time
async def test_status_is_read_again_after_an_error_or_timeout(manager: FakeServiceManager) -> None:
    looks = 0

    async def read() -> Status:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise Unavailable("reloading", "state is being reloaded", "try again")
        if looks == 2:
            await anyio.sleep_forever()
        return status()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(report, manager.notifier, read)
        await anyio.sleep(UPDATE_INTERVAL_S * 4)
        tasks.cancel_scope.cancel()
    assert manager.received() == [
        ["STATUS=cannot answer: state is being reloaded"],
        ["STATUS=0 jobs, 0 connections, fact 0"],
    ]


@on_virtual_time
async def test_unsent_readiness_is_sent_again(manager: FakeServiceManager) -> None:
    async def read() -> Status:
        return status()

    waiting, notifier = manager.fill_queue(), manager.notifier
    notifier.ready("serving")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(report, notifier, read)
        await anyio.sleep(UPDATE_INTERVAL_S)
        assert notifier.has_unsent
        assert len(manager.received()) == waiting
        await anyio.sleep(1)
        tasks.cancel_scope.cancel()
    assert manager.received()[0] == ["READY=1", "STATUS=serving"]
