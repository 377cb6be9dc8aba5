from __future__ import annotations

from itertools import islice
from random import Random
from typing import cast

import anyio

from forged.errors import Unavailable
from forged.worker.registration import Registration, WaitReporter, log_pauses, persevere
from tests.kernel_fixture import on_virtual_time, task_group
from tests.telemetry.recording_log import RecordingLog


class Daemon:
    """Says what the job waits for."""

    async def why_waiting(self) -> str:
        return "1 worker waits for 1 more"


@on_virtual_time
async def test_long_wait_is_logged_repeatedly_after_growing_pauses() -> None:
    log = RecordingLog()
    async with task_group() as tasks:
        waiting = WaitReporter(cast("Registration", Daemon()), tasks, log)
        for _ in range(9):
            waiting.begin()
            await anyio.sleep(10.0)
    said = log.of("this worker is waiting")
    assert [fields["for_s"] for fields in said] == [2, 6, 14, 30, 62]
    assert {fields["reason"] for fields in said} == {"1 worker waits for 1 more"}
    assert log.levels("this worker is waiting") == {"warning"}


@on_virtual_time
async def test_short_wait_is_not_logged() -> None:
    log = RecordingLog()
    async with task_group() as tasks:
        waiting = WaitReporter(cast("Registration", Daemon()), tasks, log)
        for _ in range(9):
            waiting.begin()
            await anyio.sleep(1.9)
            waiting.end()
            waiting.end()
        await anyio.sleep(1.9)
    assert log.lines == []


@on_virtual_time
async def test_repeated_short_waits_are_logged_when_they_add_up() -> None:
    log, began_at = RecordingLog(), anyio.current_time()

    async def fail() -> float:
        if anyio.current_time() < began_at + 60.0:
            raise Unavailable("worker_undecided", "nothing says yet that it died", "try again")
        return anyio.current_time()

    await persevere(fail, Random(1), log)
    told = log.of("still retrying a request to the daemon")
    assert log.levels("still retrying a request to the daemon") == {"warning"}
    times = [0, *(fields["for_s"] for fields in told)]
    spans = zip(times, times[1:], (2, 4, 8, 16), strict=False)
    assert all(pause <= after - before <= pause + 2 for before, after, pause in spans)
    assert len(told) == 4
    assert {fields["reason"] for fields in told} == {"nothing says yet that it died (try again)"}
    assert len(log.of("retrying a request to the daemon")) > 20


def test_pauses_between_log_lines_are_bounded() -> None:
    assert list(islice(log_pauses(), 11)) == [2, 4, 8, 16, 32, 64, 128, 256, 512, 600, 600]
