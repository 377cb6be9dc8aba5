"""Why a job's training does not go on, or somebody is not taken in, in words.

Law: whatever waits is told with what it waits for, and, where that is known, with how long it will. Where nothing
stands still nothing is said.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from forged.elastic.attempt import Attempt, Stage
from forged.elastic.cluster import Cluster
from forged.elastic.members import Member, mute_since
from forged.elastic.phases import Phase
from forged.elastic.words import counted, named

STALLED_TOLD_MAX = TROUBLED_TOLD_MAX = 3
"""Who is told one by one; the others are counted."""

_AWAITED = {
    Stage.PAUSING: "stop",
    Stage.SYNCHRONISING: "have what the others give it",
    Stage.MOVING: "have its training data while training goes on",
}
"""What an attempt waits for somebody to do."""


def standing(cluster: Cluster, now: float) -> str:
    """What stands still, and why; empty where nothing does, or where it is over."""
    return "" if cluster.over else "; ".join(_reasons(cluster, now))


def _reasons(cluster: Cluster, now: float) -> Iterator[str]:
    if cluster.paused:
        yield f"paused: {cluster.paused_because}"
    if cluster.attempt is not None:
        yield _attempt(cluster.attempt, now)
        yield from _troubles(cluster.attempt)
        if not cluster.lineup.has_room_beside(cluster.attempt.target):
            yield from _surplus(cluster, cluster.lineup.left_out(cluster.attempt.target))
        yield from _stalled(cluster, now) if cluster.trains else ()
        yield from _silent(cluster, now)
    elif cluster.phase is Phase.RESCALING:
        yield _interrupted(cluster, now)
    elif cluster.phase is Phase.RUNNING:
        yield from _stalled(cluster, now)
        yield from _silent(cluster, now)
        yield from _outside(cluster, now)
    elif cluster.lineup.remaining + len(cluster.lineup.joining()) < cluster.config.min_workers:
        yield _too_few(cluster, cluster.lineup.remaining + len(cluster.lineup.joining()), now)
    else:
        yield from _outside(cluster, now)


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


def _stalled(cluster: Cluster, now: float) -> Iterator[str]:
    stalled = [member for member in cluster.members.values() if member.stalled]
    for member in stalled[:STALLED_TOLD_MAX]:
        yield f"{member.id} is stalled for {_seconds(now - member.progress_at)} behind step {member.step}"
    if len(stalled) > STALLED_TOLD_MAX:
        yield f"{len(stalled) - STALLED_TOLD_MAX} more are stalled"


def _silent(cluster: Cluster, now: float) -> Iterator[str]:
    """Who holds the others up, long before that counts as standing still: it is suspended, or holds Python's lock."""
    if cluster.paused:
        return
    since = mute_since(cluster.config, now)
    members = (member for member in cluster.members.values() if cluster.lineup.holds(member) and not member.stalled)
    silent = [member for member in members if member.is_mute(since) and member.has_pulse(now)]
    if cluster.trains and silent:
        yield f"no step for {_seconds(now - max(member.progress_at for member in silent))}"
    for member in silent[:STALLED_TOLD_MAX]:
        yield f"the library of {member.id} is silent for {_seconds(now - _last_word(member))}, its pulse lives"
    if len(silent) > STALLED_TOLD_MAX:
        yield f"{len(silent) - STALLED_TOLD_MAX} more are silent"


def _last_word(member: Member) -> float:
    return max(member.seen_at, member.heard_at or 0.0)


def _outside(cluster: Cluster, now: float) -> Iterator[str]:
    """Who waits to be taken in."""
    config, joining = cluster.config, cluster.lineup.joining()
    if joining and cluster.lineup.remaining + len(joining) < config.min_workers:
        yield _too_few(cluster, len(joining), now)
    elif joining:
        left_s = cluster.growth_at() - now
        more = f" ({_left(left_s)} more)" if 0.0 < left_s < math.inf else ""
        yield f"{_wait(len(joining))} until nobody has joined for {config.stability_window_s:g} s{more}"
    yield from _surplus(cluster, sum(1 for _ in cluster.lineup.waiting()) - len(joining))


def _surplus(cluster: Cluster, surplus: int) -> Iterator[str]:
    """Who waits and finds no room."""
    if surplus:
        yield f"{_wait(surplus)}: max_workers is {cluster.config.max_workers}"


def _too_few(cluster: Cluster, waiting: int, now: float) -> str:
    needed = cluster.config.min_workers
    missing = needed - cluster.lineup.remaining - len(cluster.lineup.joining())
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
