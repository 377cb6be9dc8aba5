"""Why a worker goes."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from forged.worker.errors import JobEnded, StepAborted, WorkerEvicted
from forged.worker.session import LeaveReason, LeaveReport, reason_of


class UnprintableError(Exception):
    """What cannot be shown."""

    def __str__(self) -> str:
        raise RuntimeError("not even that")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (None, "its script left the step loop"),
        (KeyboardInterrupt(), "its script was interrupted"),
        (GeneratorExit(), "its script was interrupted"),
        (SystemExit(), "its script exited with 0"),
        (SystemExit(0), "its script exited with 0"),
        (SystemExit(3), "its script exited with 3"),
        (SystemExit("no data"), "its script exited with 1: no data"),
        (JobEnded("job_aborted", "the job was aborted: enough"), "the job was aborted"),
        (JobEnded("job_removed", "the job was removed"), "the job was removed"),
        (WorkerEvicted("evicted: slow"), "the daemon declared it failed"),
    ],
)
def test_interrupted_or_evicted_worker_has_not_failed(error: BaseException | None, reason: str) -> None:
    assert reason_of(error) == LeaveReason(reason, failed=False)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("nan"), "its script failed: ValueError: nan"),
        (ValueError("one\n  two"), "its script failed: ValueError: one two"),
        (StepAborted("b is gone"), "its script failed: the step was aborted: b is gone (do the step inside"),
        (UnprintableError(), "its script failed: UnprintableError (its text cannot be shown)"),
        (ValueError("\ud800"), "its script failed: ValueError: \\ud800"),
    ],
)
def test_failed_script_is_described_in_one_line(error: Exception, reason: str) -> None:
    said = reason_of(error)
    assert said.failed
    assert said.reason.startswith(reason)


@pytest.mark.parametrize("error", [ValueError("x" * 1_000_000), SystemExit("x" * 1_000_000)])
def test_reason_is_short_for_any_exception(error: BaseException) -> None:
    assert len(reason_of(error).reason) < 2_100


async def test_interrupted_leave_request_is_repeated_once() -> None:
    said: list[tuple[LeaveReason, bool]] = []

    async def leave(last: LeaveReason, /, *, is_again: bool) -> None:
        said.append((last, is_again))
        if not is_again:
            scope.cancel()
            await anyio.sleep_forever()

    anything: Any = None
    report, reason = (
        LeaveReport(anything, anything, anything, anything, anything),
        LeaveReason("training completed", done=True),
    )
    report._leave = leave  # type: ignore[method-assign, assignment]
    with anyio.CancelScope() as scope:
        await report.send(reason)
    for _ in range(2):
        await report.send(LeaveReason("it was disconnected"))
    assert said == [(reason, False), (reason, True)]
