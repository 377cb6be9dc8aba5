"""What a worker says to the daemon."""

from __future__ import annotations

from random import Random
from typing import Any

import anyio

from forged.elastic.model import WorkerId
from forged.errors import Unavailable
from forged.worker.registration import Registration
from tests.kernel_fixture import on_virtual_time
from tests.telemetry.recording_log import RecordingLog


class UnansweredClient:
    """A client without an answer from its daemon."""

    async def request(self, request: Any, **_: Any) -> Any:
        await anyio.sleep_forever()


@on_virtual_time
async def test_timed_out_leave_request_is_logged_with_a_readable_duration() -> None:
    log, deaf = RecordingLog(), UnansweredClient()
    line = Registration(deaf, "run", WorkerId("a", "host", 1), bytes(16), Random(1), log)  # type: ignore[arg-type]
    await line.leave("training completed", 7, 2.99918, done=True, failed=False)
    assert [said["reason"] for said in log.of("the daemon did not acknowledge this worker's leave")] == [
        "the daemon did not answer within 3 s"
    ]


class AwayClient:
    """A client whose daemon is away, or does not answer; a request waits for it until its timeout."""

    def __init__(self, *, connected: bool) -> None:
        self.connected = connected
        self.last_failures = "" if connected else "cannot connect to tcp://10.0.0.1:7433: Connection refused"

    async def request(self, request: Any, *, timeout_s: float = 3600.0) -> Any:
        await anyio.sleep(timeout_s)
        raise Unavailable("timed_out", f"no answer to ShowCluster within {timeout_s:g} s", "try again")


@on_virtual_time
async def test_worker_without_a_connection_says_at_once_why_it_waits() -> None:
    began_at, away = anyio.current_time(), AwayClient(connected=False)
    registration = Registration(away, "run", WorkerId("a", "host", 1), bytes(16), Random(1), RecordingLog())  # type: ignore[arg-type]
    assert await registration.why_waiting() == (
        "no connection to the daemon: cannot connect to tcp://10.0.0.1:7433: Connection refused; "
        "the worker tries again until it answers"
    )
    assert anyio.current_time() == began_at


@on_virtual_time
async def test_worker_whose_daemon_does_not_answer_says_so_after_a_few_seconds() -> None:
    began_at, away = anyio.current_time(), AwayClient(connected=True)
    registration = Registration(away, "run", WorkerId("a", "host", 1), bytes(16), Random(1), RecordingLog())  # type: ignore[arg-type]
    assert (await registration.why_waiting()).startswith(
        "the daemon does not answer: no answer to ShowCluster within 5 s"
    )
    assert anyio.current_time() == began_at + 5.0
