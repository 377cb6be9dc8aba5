"""Whether a worker that has ended is started again, and after what pause.

Invariants:
- A worker whose job is over is not started again.
- Restarts in a row are limited: those of a worker that never ran for `lasting_s`. A worker that ran longer counts from
  the start again, and has no pause.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import StrEnum


class RestartPolicy(StrEnum):
    """Which workers are started again."""

    NEVER = "never"
    ON_FAILURE = "on-failure"
    """Those that ended with another exit code than 0."""
    ALWAYS = "always"
    """All, until the job is over."""


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """How often and how fast workers are started again."""

    policy: RestartPolicy = RestartPolicy.ON_FAILURE
    restarts_max: int = 3
    """Restarts in a row."""
    lasting_s: float = 60.0
    pause_s: float = 1.0
    """Before the second restart in a row; doubles for each further one."""
    pause_max_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Restart:
    """Start it again after a pause."""

    after_s: float


@dataclass(frozen=True, slots=True)
class Finished:
    """It has ended, and is not started again."""

    problem: str = ""
    """Why that is a failure; empty if it is none."""


class RestartHistory:
    """The restarts of one worker, or of the workers of one group."""

    def __init__(self, limits: RestartLimits) -> None:
        self.restarts = 0
        """All restarts."""
        self._limits = limits
        self._in_a_row = 0

    def ended(self, code: int, lasted_s: float, *, job_is_over: bool) -> Restart | Finished:
        """Decide about a worker that has ended with this exit code; negative: by a signal."""
        limits = self._limits
        failure = "" if code == 0 else in_words(code)
        if job_is_over or limits.policy is RestartPolicy.NEVER:
            return Finished(failure)
        if not failure and limits.policy is RestartPolicy.ON_FAILURE:
            return Finished()
        if lasted_s >= limits.lasting_s:
            self._in_a_row = 0
        if self._in_a_row >= limits.restarts_max:
            return Finished(f"{failure or in_words(code)}{self._exhausted()}")
        self.restarts += 1
        self._in_a_row += 1
        if lasted_s >= limits.lasting_s:
            return Restart(0.0)
        return Restart(min(limits.pause_s * 2 ** (self._in_a_row - 1), limits.pause_max_s))

    def _exhausted(self) -> str:
        limits = self._limits
        if not self._in_a_row:
            return ""
        times = "once" if self._in_a_row == 1 else f"{self._in_a_row} times"
        return f" after it was restarted {times} without running for {limits.lasting_s:g} s"


def in_words(code: int) -> str:
    """An exit code as a predicate."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}"
