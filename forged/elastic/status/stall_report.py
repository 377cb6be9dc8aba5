"""Why a job's training does not go on, or somebody is not taken in, in words.

Law: whatever waits is told with what it waits for, and, where that is known, with how long it will. Where nothing
stands still nothing is said.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

from forged.elastic.coordinator.cluster import Cluster
from forged.elastic.failure_detector.detector import is_lost
from forged.elastic.failure_detector.suspicion import QUARRELS_MAX
from forged.elastic.membership.member import COLLECTIVES_PER_WORLD, Member, mute_since
from forged.elastic.phases import Phase
from forged.elastic.rescale.attempt import Attempt, Stage
from forged.phrases import counted, named

STALLED_TOLD_MAX = TROUBLED_TOLD_MAX = 3
"""Who is told one by one; the others are counted."""
STILL_S_MIN = 5.0
"""No shorter time without a step is told, however often workers are heard."""

_AWAITED = {
    Stage.PAUSING: "stop",
    Stage.SYNCHRONISING: "have what the others give it",
    Stage.MOVING: "have its training data while training goes on",
}
"""What an attempt waits for somebody to do."""


def describe_stall(cluster: Cluster, now: float, trouble: str = "") -> str:
    """What stands still, and why; empty where nothing does, or where it is over. `trouble` is why the daemon cannot
    write, empty where it can."""
    return "" if cluster.over else "; ".join(_reasons(cluster, now, trouble))


def _reasons(cluster: Cluster, now: float, trouble: str) -> Iterator[str]:
    if trouble:
        yield f"the daemon cannot write, and nothing is rescaled until it can: {trouble}"
    if cluster.paused:
        yield f"paused: {cluster.paused_because}"
    if cluster.attempt is not None:
        yield from _in_attempt(cluster, cluster.attempt, now)
    elif cluster.phase is Phase.RESCALING:
        yield _interrupted(cluster, now)
    elif cluster.phase is Phase.RUNNING:
        yield from _impending(cluster, now)
        yield from _quarrels(cluster)
        yield from _held_up(cluster, now)
        yield from _outside(cluster, now)
    elif _is_short(cluster):
        yield _too_few(cluster, cluster.membership.remaining + len(cluster.membership.joining()), now)
    else:
        yield from _outside(cluster, now)


def _is_short(cluster: Cluster) -> bool:
    """Whether there are too few for a world."""
    return cluster.membership.remaining + len(cluster.membership.joining()) < cluster.config.min_workers


def _in_attempt(cluster: Cluster, attempt: Attempt, now: float) -> Iterator[str]:
    yield _attempt(attempt, now)
    yield from _troubles(attempt)
    if not attempt.troubles:
        yield from _quarrels(cluster)
    if not cluster.membership.has_room_beside(attempt.target):
        yield from _surplus(cluster, cluster.membership.left_out(attempt.target))
    yield from _held_up(cluster, now)


def _attempt(attempt: Attempt, now: float) -> str:
    waited_for, what = named(attempt.waiting_for) or "nobody", _AWAITED[attempt.stage]
    return f"attempt {attempt.number} waits for {waited_for} to {what} ({_seconds(now - attempt.began_at)})"


def _troubles(attempt: Attempt) -> Iterator[str]:
    """What those say who do not get on."""
    alike: dict[str, list[str]] = {}
    for worker in attempt.waiting_for:
        if worker in attempt.troubles:
            alike.setdefault(attempt.troubles[worker], []).append(worker)
    told = list(alike.items())
    for trouble, workers in told[:TROUBLED_TOLD_MAX]:
        yield f"{named(workers)}: {trouble}"
    if rest := sum(len(workers) for _, workers in told[TROUBLED_TOLD_MAX:]):
        yield f"{rest} more do not get on"


def _interrupted(cluster: Cluster, now: float) -> str:
    """A daemon died over an attempt, and another begins when all are back."""
    absent = [member.id for member in cluster.members.values() if not member.connected]
    left_s = cluster.rescale_at() - now
    at_the_latest = f", in {_left(left_s)} at the latest" if 0.0 < left_s < math.inf else ""
    return f"attempt {cluster.attempts + 1} begins when {named(absent) or 'everybody'} is back{at_the_latest}"


def _impending(cluster: Cluster, now: float) -> Iterator[str]:
    """That a world cannot go on, while others may follow, or what bears it out, or nothing can be decided."""
    if not cluster.why:
        return
    why = "; ".join(cluster.why[:TROUBLED_TOLD_MAX])
    if _is_short(cluster):
        yield why
        yield _too_few(cluster, cluster.membership.remaining + len(cluster.membership.joining()), now)
    else:
        yield f"attempt {cluster.attempts + 1} is about to begin: {why}"


def _quarrels(cluster: Cluster) -> Iterator[str]:
    """Who does not reach whom, since there was a step last."""
    pairs = cluster.complaints.pairs
    if not pairs:
        return
    told = list(dict.fromkeys(_complaint(one, other, pairs) for one, other in pairs))
    rest = len(told) - TROUBLED_TOLD_MAX
    more = f", and {rest} more complain{'s' if rest == 1 else ''}" if rest > 0 else ""
    worlds = f"in {counted(cluster.complaints.worlds, 'world')} so far; after {QUARRELS_MAX} somebody has to go"
    yield f"{', '.join(told[:TROUBLED_TOLD_MAX])}{more}, {worlds}"


def _complaint(one: str, other: str, pairs: Collection[tuple[str, str]]) -> str:
    if one == other:
        return f"{one} cannot go on"
    if (other, one) in pairs:
        return f"{' and '.join(sorted((one, other)))} do not reach each other"
    return f"{one} does not reach {other}"


def _held_up(cluster: Cluster, now: float) -> Iterator[str]:
    """Who holds the others up, or that nobody gets on."""
    stalled = [member for member in cluster.members.values() if member.stalled]
    if cluster.trains:
        yield from _stalled(stalled, now)
    if cluster.paused:
        return
    since = mute_since(cluster.config, now)
    present = [member for member in cluster.membership.present() if not member.stalled]
    silent = [member for member in present if member.is_mute(since) and member.has_pulse(now)]
    if cluster.trains and silent and cluster.advanced_at < since:
        yield f"no step for {_seconds(now - cluster.advanced_at)}"
    yield from _silent(silent, now)
    if cluster.trains and not (stalled or silent):
        yield from _still(cluster, now)


def _still(cluster: Cluster, now: float) -> Iterator[str]:
    """That no step is known of for long; how far a worker is comes with its heartbeats, and with those of its pulse."""
    still_s = now - cluster.advanced_at
    if still_s < max(cluster.config.worker_heartbeat_timeout_s, STILL_S_MIN):
        return
    yield f"no step for {_seconds(still_s)}{_lost(cluster, now) or _maybe(cluster)}"


def _lost(cluster: Cluster, now: float) -> str:
    """Who has no connection, and how long all of them have to come back."""
    lost = [member for member in cluster.membership.present() if is_lost(member)]
    left_s = max((member.lost_at or 0.0 for member in lost), default=0.0) + cluster.config.reconnect_grace_s - now
    grace = f", with {_left(left_s)} to come back" if left_s > 0.0 else ""
    return f": no connection to {named([member.id for member in lost])}{grace}" if lost else ""


def _maybe(cluster: Cluster) -> str:
    """That nothing may be wrong, where nothing is known to be, and for whom the others wait, if that is so."""
    return "" if cluster.complaints.pairs else f", which may be a long one{_behind(cluster)}"


def _behind(cluster: Cluster) -> str:
    """For whom the others wait, where some have come further."""
    members = [member for member in cluster.membership.present() if not member.last_step_done]
    # How far anybody came in another world is no matter.
    collective_seq = {
        member.id: max(member.collective_seq, cluster.generation * COLLECTIVES_PER_WORLD) for member in members
    }
    lowest = min(collective_seq.values(), default=0)
    last = [worker for worker, reached in collective_seq.items() if reached == lowest]
    return f": all others have come further than {named(last)}" if len(last) < len(collective_seq) else ""


def _stalled(stalled: Sequence[Member], now: float) -> Iterator[str]:
    for member in stalled[:STALLED_TOLD_MAX]:
        yield f"{member.id} is stalled for {_seconds(now - member.progress_at)} behind step {member.step}"
    if len(stalled) > STALLED_TOLD_MAX:
        yield f"{len(stalled) - STALLED_TOLD_MAX} more are stalled"


def _silent(silent: Sequence[Member], now: float) -> Iterator[str]:
    """Who holds the others up, long before that counts as standing still: it is suspended, or holds Python's lock."""
    for member in silent[:STALLED_TOLD_MAX]:
        yield f"the library of {member.id} is silent for {_seconds(now - _last_word(member))}, its pulse lives"
    if len(silent) > STALLED_TOLD_MAX:
        yield f"{len(silent) - STALLED_TOLD_MAX} more are silent"


def _last_word(member: Member) -> float:
    return max(member.seen_at, member.heard_at or 0.0)


def _outside(cluster: Cluster, now: float) -> Iterator[str]:
    """Who waits to be taken in."""
    config, joining = cluster.config, cluster.membership.joining()
    if joining and cluster.membership.remaining + len(joining) < config.min_workers:
        yield _too_few(cluster, len(joining), now)
    elif joining:
        left_s = cluster.growth_at() - now
        more = f" ({_left(left_s)} more)" if 0.0 < left_s < math.inf else ""
        yield f"{_wait(len(joining))} until nobody has joined for {config.stability_window_s:g} s{more}"
    yield from _surplus(cluster, sum(1 for _ in cluster.membership.waiting()) - len(joining))


def _surplus(cluster: Cluster, surplus: int) -> Iterator[str]:
    """Who waits and finds no room."""
    if surplus:
        yield f"{_wait(surplus)}: max_workers is {cluster.config.max_workers}"


def _too_few(cluster: Cluster, waiting: int, now: float) -> str:
    needed = cluster.config.min_workers
    missing = needed - cluster.membership.remaining - len(cluster.membership.joining())
    who = f"{_wait(waiting)} for {missing} more" if waiting else "no worker is there"
    left_s = cluster.alone_at() - now
    end = f"; given up in {_left(left_s)}" if left_s < math.inf else ""
    return f"{who}: min_workers is {needed}{end}"


def _wait(number: int) -> str:
    return f"{counted(number, 'worker')} {'wait' if number > 1 else 'waits'}"


def _seconds(seconds: float) -> str:
    return f"{max(0.0, seconds):.0f} s"


def _left(seconds: float) -> str:
    """How long it will still take; what is about to happen takes a moment, too."""
    return _seconds(max(1.0, seconds))
