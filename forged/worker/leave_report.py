"""How a worker leaves its job: it leaves its world, reports the samples used, and tells the daemon the reason.

Invariants:
- A worker whose script raised an exception reports a failure, with that exception. A script that is interrupted, exits
  or breaks out of its loop has not failed, and neither has the worker of a job that is over.
- The first reason counts. A report that is cancelled is sent again, for a short time only.
"""

from __future__ import annotations

from typing import NamedTuple

import anyio

from forged.elastic.model import WorkerStatus
from forged.errors import describe
from forged.worker.daemon_link.registration import LEAVE_TIMEOUT_S, Registration
from forged.worker.errors import JobEnded, WorkerEvicted
from forged.worker.process.worker_process import WorkerProcess
from forged.worker.usage_report import UsageReport
from forged.worker.worker_state.session_state import SessionState


class LeaveReason(NamedTuple):
    """Why a worker leaves."""

    reason: str
    failed: bool = False
    done: bool = False
    """The training is complete."""


class LeaveReport:
    """One registered worker's leave, which is reported once."""

    def __init__(
        self, state: SessionState, registration: Registration, usage: UsageReport | None, process: WorkerProcess
    ) -> None:
        self._state = state
        self._registration = registration
        self._usage = usage
        self._process = process
        self._reason: LeaveReason | None = None
        self._was_tried = self._is_sent = False
        self._turn = anyio.Lock()

    @property
    def is_begun(self) -> bool:
        return self._reason is not None

    async def send(self, reason: LeaveReason) -> None:
        """Leave for this reason, or for the one that was given first. No effect once the leave is reported."""
        reason = self._reason = self._reason or reason
        async with self._turn:
            if not self._is_sent:
                is_again, self._was_tried = self._was_tried, True
                await self._leave(reason, is_again=is_again)
                self._is_sent = True

    async def _leave(self, leave: LeaveReason, *, is_again: bool) -> None:
        self._state.current_world.status = WorkerStatus.LEAVING
        # This worker may be the only one to know that the training is complete, so it tries for as long as the daemon
        # waits for it; a script that has cancelled the first try does not want to wait for that.
        grace_s = self._state.config.reconnect_grace_s if leave.done and not is_again else 0.0
        moment_s = LEAVE_TIMEOUT_S / 2 if is_again else LEAVE_TIMEOUT_S
        ends_at = anyio.current_time() + max(LEAVE_TIMEOUT_S, grace_s)
        try:
            # A cancelled worker does this all the same, for a moment.
            with anyio.move_on_after(moment_s, shield=True) as moment:
                await self._state.current_world.leave()
                await self._tell_usage()
            if moment.cancelled_caught:
                with anyio.move_on_after(ends_at - anyio.current_time() - moment_s):
                    await self._tell_usage()
        finally:
            left_s = max(moment_s, ends_at - anyio.current_time())
            is_acknowledged = False
            try:
                is_acknowledged = await self._registration.leave(
                    leave.reason, self._state.progress.step, left_s, done=leave.done, failed=leave.failed
                )
            finally:
                if not is_acknowledged:
                    self._process.leave_through_pulse({**leave._asdict(), "step": self._state.progress.step})

    async def _tell_usage(self) -> None:
        if self._usage is not None:
            await self._usage.tell()


def reason_of(error: BaseException | None) -> LeaveReason:
    """Why a worker leaves whose script has ended with this exception, or with none."""
    match error:
        case None:
            return LeaveReason("its script left the step loop")
        case JobEnded(code="job_removed"):
            return LeaveReason("the job was removed")
        case JobEnded():
            return LeaveReason("the job was aborted")
        case WorkerEvicted():
            return LeaveReason("the daemon declared it failed")
        case SystemExit():
            return LeaveReason(f"its script exited with {_exit_code(error)}")
        case Exception():
            return LeaveReason(f"its script failed: {_in_one_line(error)}", failed=True)
        case _:
            return LeaveReason("its script was interrupted")


def _exit_code(error: SystemExit) -> str:
    """The exit code of the process: Python prints a value that is no number, and exits with 1."""
    if error.code is None:
        return "0"
    said = _in_one_line(error).removeprefix(f"{type(error).__name__}: ")
    return said if isinstance(error.code, int) else f"1: {said}"


def _in_one_line(error: BaseException) -> str:
    return " ".join(describe(error).split())
