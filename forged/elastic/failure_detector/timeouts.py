"""For whom an attempt has waited too long.

Law: whoever waits for others keeps nobody waiting. A step may last, and so may what somebody is sent. What is held
against a member is that its library is silent, or that all others have come further. Where one does not come by the
state though it does what it can, the source has failed it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from forged.elastic.failure_detector.peer_reports import PeerReports
from forged.elastic.membership.member import Member, holding_up, mute_since
from forged.elastic.membership.world_membership import WorldMembership
from forged.elastic.rescale.attempt import Attempt, Stage

RESTING_S = 5.0
"""How long a worker's word that it waits for others holds at least; it says so every second."""
NEVER_SAID = -math.inf


def keeping_others(
    attempt: Attempt, membership: WorldMembership, complaints: PeerReports, now: float, *, trains: bool
) -> Iterator[tuple[Member, str]]:
    """Who keeps the others waiting, and what is held against it; nobody where all are in a step that lasts, or wait for
    what none of them can give. `trains` tells whether the world before goes on meanwhile."""
    config = membership.config
    source = membership.members.get(attempt.source)
    if source is not None and source.is_mute(mute_since(config, now)):
        late = [source]
    else:
        waiting = [
            membership.members[worker] for worker in _busy(attempt, membership, now) if worker in membership.members
        ]
        waiting = [member for member in waiting if not _is_in_a_step(member, attempt, membership, now)]
        # Who fetches data while it trains waits for nobody.
        bound = {member.id for member in waiting if membership.holds(member) and not trains}
        late = holding_up(waiting, bound, config, now)
    within = f"in attempt {attempt.number} within {config.rescale_timeout_s:g} s"
    if source is not None and (kept := _kept_from(source, late, attempt, membership, complaints, now)):
        yield source, f"{kept} did not get the state from it {within}"
        return
    for member in late:
        why, trouble = f"it did not answer {within}", attempt.troubles.get(member.id)
        yield member, f"{why}: {trouble}" if trouble else why


def _kept_from(
    source: Member,
    late: Iterable[Member],
    attempt: Attempt,
    membership: WorldMembership,
    complaints: PeerReports,
    now: float,
) -> str:
    """Which of them does not come by the state through no fault of its own; empty for none.

    Newcomers do not count: what a member of the world has may be nowhere else.
    """
    since = mute_since(membership.config, now)
    for member in late:
        if member is source or member.is_mute(since) or not {member.id, source.id} <= membership.state_holders:
            continue
        ranks = {one.id: attempt.members.index(one.id) for one in (member, source)}
        if complaints.between(*ranks) and complaints.worst(ranks) == source.id:
            return member.id
    return ""


def _is_in_a_step(member: Member, attempt: Attempt, membership: WorldMembership, now: float) -> bool:
    """Whether it may come to the end of a long step: nobody of its world has come there yet, and it is heard.

    Its pulse speaks for a library that cannot: who is held up holds up a step like any other.
    """
    config = membership.config
    is_mute = member.is_mute(mute_since(config, now)) and not member.has_pulse(now)
    is_heard = membership.holds(member) and not is_mute
    is_late = config.evict_stalled and now - attempt.began_at >= config.stall_timeout_s
    return attempt.stage is Stage.PAUSING and is_heard and not (attempt.is_at_step_end or is_late)


def _busy(attempt: Attempt, membership: WorldMembership, now: float) -> list[str]:
    """Who has something to do in the attempt, and does not wait for others."""
    since = now - max(RESTING_S, membership.config.rescale_timeout_s)
    return [worker for worker in attempt.waiting_for if attempt.resting.get(worker, NEVER_SAID) < since]
