"""What a worker says to the daemon."""

from __future__ import annotations

from random import Random
from typing import Any

import anyio

from forged.elastic.model import WorkerId
from forged.worker.daemon.registration import Registration
from tests.kernel_fixture import on_virtual_time
from tests.telemetry.recording_log import RecordingLog


class Deaf:
    """A client without an answer from its daemon."""

    async def request(self, request: Any, **_: Any) -> Any:
        await anyio.sleep_forever()


@on_virtual_time
async def test_how_long_the_daemon_was_given_for_a_goodbye_is_told_as_people_read_it() -> None:
    log, deaf = RecordingLog(), Deaf()
    line = Registration(deaf, "run", WorkerId("a", "host", 1), bytes(16), Random(1), log)  # type: ignore[arg-type]
    await line.leave("training completed", 7, 2.99918, done=True, failed=False)
    assert [said["why"] for said in log.of("the daemon did not acknowledge this worker's leave")] == [
        "the daemon did not answer within 3 s"
    ]
