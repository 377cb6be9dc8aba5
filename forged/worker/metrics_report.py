"""Reports to the daemon what a worker measures and what its script logs.

Invariants:
- The newest value of a name counts. Logging stores numbers in memory and sends nothing, so it never waits.
- One report every `REPORT_EVERY_S`, with totals: a lost one loses nothing.
- A value that is not finite is reported at once, until the daemon has answered; again only after a finite value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import anyio

from forged.errors import ForgedError, RequestRefused
from forged.log import Log
from forged.metrics.messages import NAME_CHARS_MAX, NAMES_MAX, ReportNonFinite, TrainingReport
from forged.worker.registration import Registration
from forged.worker.worker_state.session_state import SessionState

REPORT_EVERY_S = 1.0
NON_FINITE_WAITING_MAX = NAMES_MAX


class LoggedValues:
    """What a script has logged; any thread may log. It outlives the worker's session."""

    def __init__(self) -> None:
        self.step = 0
        """The step of the newest value."""
        self.values: dict[str, float] = {}
        self.not_finite: dict[str, tuple[int, str]] = {}
        """By name: the step and the value that are still to be reported."""
        self.wake: Callable[[], object] = lambda: None
        """Called when there is something to report at once."""
        self._was_finite: dict[str, bool] = {}

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Take values of a step; each is a number or converts to one."""
        for name, value in values.items():
            number = value if type(value) is float else _number(name, value)
            if name not in self.values:
                self._check_name(name)
            self.values[name] = number
            is_finite = number - number == 0.0
            if is_finite != self._was_finite.get(name, True):
                self._was_finite[name] = is_finite
                if not is_finite and len(self.not_finite) < NON_FINITE_WAITING_MAX:
                    self.not_finite[name] = step, repr(number)
                    self.wake()
        self.step = step

    def _check_name(self, name: str) -> None:
        if not 0 < len(name) <= NAME_CHARS_MAX:
            raise RequestRefused(
                "log_name_invalid",
                f"the name of a logged value must be a text of 1 to {NAME_CHARS_MAX} characters, got {name[:80]!r}",
                "shorten the name",
            )
        if len(self.values) >= NAMES_MAX:
            raise RequestRefused(
                "log_names_full",
                f"{NAMES_MAX} values are logged under other names, so {name!r} cannot be; limit {NAMES_MAX}",
                "log fewer names",
            )


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise RequestRefused(
            "log_value_invalid",
            f"a logged value must be a number, got {type(value).__name__} for {name!r}",
            "log one number for each name, such as the mean",
        ) from error


class MetricsReporter:
    """Reports of one worker in one session."""

    def __init__(self, state: SessionState, registration: Registration, logged: LoggedValues, log: Log) -> None:
        self._state = state
        self._registration = registration
        self._logged = logged
        self._log = log
        self._woken = anyio.Event()

    def wake(self) -> None:
        self._woken.set()

    async def run(self) -> None:
        """Report until cancelled."""
        while True:
            await anyio.sleep(REPORT_EVERY_S)
            self.report()

    async def run_urgent(self) -> None:
        """Report values that are not finite, until cancelled."""
        while True:
            self._woken = anyio.Event()
            while self._logged.not_finite:
                name, (step, value) = next(iter(self._logged.not_finite.items()))
                await self._report_non_finite(name, step, value)
                self._logged.not_finite.pop(name, None)
            await self._woken.wait()

    def report(self) -> None:
        """Send a report, if there is anything to tell."""
        clock, progress, logged = self._state.current_world.step_clock, self._state.progress, self._logged
        if not clock.has_begun and not logged.values:
            return
        registration = self._registration
        report = TrainingReport(
            registration.job,
            registration.worker.id,
            registration.incarnation,
            progress.step,
            clock.steps,
            clock.spent(),
            progress.global_batch_size,
            dict(logged.values),
            logged.step,
        )
        registration.signal(report)

    async def _report_non_finite(self, name: str, step: int, value: str) -> None:
        who = self._registration.job, self._registration.worker.id, self._registration.incarnation
        try:
            await self._registration.send(ReportNonFinite(*who, step, name, value))
        except ForgedError as error:
            # An older daemon does not know the request; a worker that is gone has other news.
            self._log.warning("a value that is not finite was not reported", name=name, reason=str(error))
