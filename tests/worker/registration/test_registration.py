"""What a worker says to the daemon."""

from __future__ import annotations

from random import Random
from typing import Any

import anyio

from forged.elastic.model import WorkerId
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
