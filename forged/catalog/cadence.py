"""When to save: every so many steps or seconds, or at the interval that loses least time.

A save costs time; a failure loses the time since the last save. The interval at which both cost least follows from the
cost of a save and the mean time between failures (Young 1974, Daly 2006).

Invariants:
- Each choice says in words where it comes from.
- Times are differences of a monotonic clock, and arguments.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from forged.catalog.model import is_integer, is_number
from forged.errors import ConfigError, Problem
from forged.phrases import counted

MEAN_TIME_BETWEEN_FAILURES_S = 86_400.0
"""What is assumed before failures have been observed: one a day."""


def should_checkpoint(current_step: int, last_step: int, interval: int) -> bool:
    """Whether `interval` steps have passed since the last save."""
    return current_step - last_step >= interval


def young_daly_interval_s(save_cost_s: float, between_failures_s: float) -> float:
    """Daly's interval between the end of a save and the start of the next; Young's where saves are cheap."""
    if save_cost_s >= 2.0 * between_failures_s:
        # Saves take longer than training survives: no interval is good, and a longer one loses less.
        return between_failures_s
    ratio = save_cost_s / (2.0 * between_failures_s)
    return (
        math.sqrt(2.0 * save_cost_s * between_failures_s) * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - save_cost_s
    )


def mean_time_between_failures_s(
    failures: int, observed_s: float, assumed_s: float = MEAN_TIME_BETWEEN_FAILURES_S
) -> float:
    """The estimate after so many failures in a time: as if one more failure had been seen in `assumed_s`."""
    return (observed_s + assumed_s) / (failures + 1)


class CadencePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """When a run saves: at whichever of these comes first. Nothing set: never."""

    every_steps: int | None = None
    every_seconds: float | None = None
    automatic: bool = False
    """At the interval that follows from measurements."""
    seconds_min: float = 10.0
    """The bounds of the automatic interval."""
    seconds_max: float = 3600.0

    def __post_init__(self) -> None:
        problems = tuple(self._problems())
        if problems:
            raise ConfigError("cadence_invalid", "the checkpoint cadence is not valid", problems=problems)

    def _problems(self) -> Iterator[Problem]:
        if self.every_steps is not None and not is_integer(self.every_steps, 1):
            yield Problem("every_steps", self.every_steps, "an integer >= 1, or None")
        for key in ("every_seconds", "seconds_min", "seconds_max"):
            value = getattr(self, key)
            is_unset = key == "every_seconds" and value is None
            if not is_unset and not (is_number(value) and 0 < value < math.inf):
                yield Problem(key, value, "finite seconds > 0")
        if is_number(self.seconds_min) and is_number(self.seconds_max) and self.seconds_min > self.seconds_max:
            yield Problem("seconds_max", self.seconds_max, f"at least seconds_min, which is {self.seconds_min}")


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What has been measured of a run."""

    save_cost_s: float | None = None
    """For how long a save holds up training; None before the first one."""
    failures: int = 0
    """The failures of workers in `observed_s` seconds of training."""
    observed_s: float = 0.0
    drain_notice_s: float | None = None
    """In how many seconds a worker leaves; None if none has been told to."""


class SinceLastSave(msgspec.Struct, frozen=True, kw_only=True):
    """How far training has come since the last save, or since its start."""

    steps: int
    seconds: float


class CadenceChoice(msgspec.Struct, frozen=True):
    """Whether to save now, the interval in seconds if there is one, and the reason in words."""

    is_due: bool
    interval_s: float | None
    reason: str


def choose_cadence(policy: CadencePolicy, measured: Measured, progress: SinceLastSave) -> CadenceChoice:
    """Whether to save after this step."""
    interval_s, reason = min(_intervals(policy, measured), default=(None, ""))
    if interval_s is None and policy.every_steps is None:
        return CadenceChoice(is_due=False, interval_s=None, reason="no interval is set")
    if progress.steps < 1:
        return CadenceChoice(is_due=False, interval_s=interval_s, reason="no step since the last save")
    notice_s, cost_s = measured.drain_notice_s, measured.save_cost_s
    if notice_s is not None and cost_s is not None and cost_s > notice_s:
        text = f"a worker leaves in {notice_s:.1f} s, and a save takes {cost_s:.1f} s"
        return CadenceChoice(is_due=False, interval_s=interval_s, reason=text)
    if interval_s is not None and progress.seconds >= interval_s:
        return CadenceChoice(is_due=True, interval_s=interval_s, reason=reason)
    steps = policy.every_steps
    is_due = steps is not None and should_checkpoint(progress.steps, 0, steps)
    in_steps = "" if steps is None else f"every {counted(steps, 'step')}"
    return CadenceChoice(is_due, interval_s, in_steps if is_due or not reason else reason)


def _intervals(policy: CadencePolicy, measured: Measured) -> Iterator[tuple[float, str]]:
    """Each interval in seconds that holds at present, and its reason; the shortest is used."""
    if policy.every_seconds is not None:
        yield policy.every_seconds, f"every {policy.every_seconds:g} s"
    if policy.automatic:
        yield _automatic(policy, measured)
    notice_s = measured.drain_notice_s
    if notice_s is not None and (policy.automatic or policy.every_seconds or policy.every_steps):
        # The loss of the worker is as certain as a failure within that time.
        best_s = young_daly_interval_s(measured.save_cost_s or 0.0, notice_s)
        yield best_s, f"every {best_s:.1f} s: a worker leaves in {notice_s:.1f} s"


def _automatic(policy: CadencePolicy, measured: Measured) -> tuple[float, str]:
    if measured.save_cost_s is None:
        return policy.seconds_min, f"every {policy.seconds_min:g} s until the first save has been measured"
    between_s = mean_time_between_failures_s(measured.failures, measured.observed_s)
    best_s = young_daly_interval_s(measured.save_cost_s, between_s)
    chosen_s = min(max(best_s, policy.seconds_min), policy.seconds_max)
    bound = "" if chosen_s == best_s else f" (bounded; {best_s:.1f} s would lose least)"
    seen = f"{counted(measured.failures, 'failure')} in {measured.observed_s / 3600.0:.1f} h"
    return chosen_s, f"every {chosen_s:.1f} s{bound}: a save costs {measured.save_cost_s:.3g} s, {seen}"
