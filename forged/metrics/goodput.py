"""What a job's time was spent on, from what its workers measure and what facts say.

Invariants:
- The seconds by cause and the unknown ones add up to the time from the first world to `until`.
- A worker's totals are compared with those at an earlier time of the same process, so that a restart of the daemon, or
  a lost report, loses nothing as long as one of the workers whose totals are stored lives on.
- A step that is under way counts as committed; if it is aborted later, its time moves to the aborted steps.
- What no worker can tell about has the cause that facts name: a rescale, too few workers, a pause. Without one it is
  unknown.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from forged.metrics.messages import Goodput, TimeSpent

STALE_S = 15.0
"""Beyond this, time that no worker tells about is not waited for any more."""
BASELINES_STORED_MAX = 4

CAUSES = TimeSpent.__struct_fields__


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """The time of one job that is accounted for."""

    began_at: float
    until: float
    spent: TimeSpent = TimeSpent()
    unknown_s: float = 0.0
    idle_cause: str = ""
    """The cause, of `CAUSES`, of time that no worker tells about; empty for none."""
    is_over: bool = False
    """Whether training is complete or aborted, so that no further time counts."""


def advanced(account: Account, now: float, deltas: Sequence[TimeSpent]) -> Account:
    """Account for the time up to now by what workers have spent since `account.until`, each its own time.

    What they have not reported yet is left for later; older than `STALE_S`, it has the idle cause or is unknown.
    """
    told = [delta for delta in deltas if delta.total_s > 0]
    covered_s = min(max((delta.total_s for delta in told), default=0.0), max(0.0, now - account.until))
    if covered_s > 0:
        added = (covered_s * share for share in mean_shares(told))
        sums = [old + new for old, new in zip(msgspec.structs.astuple(account.spent), added, strict=True)]
        spent = TimeSpent(*_without_negatives(sums))
        account = msgspec.structs.replace(account, spent=spent, until=account.until + covered_s)
    return idled(account, now) if now - account.until > STALE_S else account


def idled(account: Account, now: float) -> Account:
    """Account for all time up to now that no worker has told about."""
    left_s = now - account.until
    if left_s <= 0:
        return account
    if not account.idle_cause:
        return msgspec.structs.replace(account, unknown_s=account.unknown_s + left_s, until=now)
    spent = {account.idle_cause: getattr(account.spent, account.idle_cause) + left_s}
    return msgspec.structs.replace(account, spent=msgspec.structs.replace(account.spent, **spent), until=now)


def mean_shares(deltas: Sequence[TimeSpent]) -> list[float]:
    """The mean shares of the causes, which add up to 1.

    All ranks of a step meet, so what the slowest of them waits is not waiting for another: it counts as the step's.
    """
    total_s = sum(delta.total_s for delta in deltas)
    means = [sum(column) / total_s for column in zip(*map(msgspec.structs.astuple, deltas), strict=True)]
    step, waiting = CAUSES.index("step_s"), CAUSES.index("waiting_s")
    least = min(delta.waiting_s / delta.total_s for delta in deltas)
    means[step] += least
    means[waiting] -= least
    return means


def _without_negatives(parts: list[float]) -> list[float]:
    """The parts with the same sum and none below 0, whatever a worker has reported."""
    if min(parts) >= 0.0:
        return parts
    positive = sum(max(0.0, part) for part in parts)
    factor = max(0.0, sum(parts)) / positive if positive else 0.0
    return [max(0.0, part) * factor for part in parts]


def difference(now: TimeSpent, before: TimeSpent | None) -> TimeSpent:
    """What was spent in between; all of it if nothing is known of before."""
    if before is None:
        return now
    parts = zip(msgspec.structs.astuple(now), msgspec.structs.astuple(before), strict=True)
    return TimeSpent(*(new - old for new, old in parts))


def view(account: Account) -> Goodput:
    wall_s = max(0.0, account.until - account.began_at)
    share = account.spent.step_s / wall_s if wall_s > 0 else None
    return Goodput(wall_s=wall_s, spent=account.spent, unknown_s=account.unknown_s, goodput=share)
