"""Which members fail when an attempt makes no progress for `rescale_silence_ms`, or takes `rescale_timeout_ms`.

Invariants:
- A member that waits for other members never fails for it, nor a member in a step that no member has finished.
- Without progress a member fails because its library is silent, or because all other members have come further.
- If the whole takes too long, joiners fail before members of the world.
- A member whose shard store fails does so over all attempts: a new attempt, or a new run of the daemon, does not let it
  hold the world up for another `rescale_silence_ms`.
- If a member cannot fetch the state though it does what it can, the state source fails; else it does not fail for a
  slow attempt.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from forged.elastic.failure_detector.peer_reports import PeerReports
from forged.elastic.membership.member import Member, members_holding_up, silent_since
from forged.elastic.membership.world_membership import WorldMembership
from forged.elastic.rescale.attempt import Attempt, Stage

WAITING_REPORT_S = 5.0
"""How long a member's report that it waits for other members holds at least; it is repeated every second."""
NEVER_REPORTED = -math.inf


def blocking_members(
    attempt: Attempt, membership: WorldMembership, peer_reports: PeerReports, now: float, *, trains: bool
) -> Iterator[tuple[Member, str]]:
    """The members that block an attempt without progress, with the evidence.

    None if all are in a long step or wait for data that no member can give. `trains` tells whether the previous world
    trains on meanwhile.
    """
    config = membership.config
    within = f"in attempt {attempt.number} within {config.rescale_silence_s:g} s"
    silence_s = config.rescale_silence_s or math.inf
    if failing := [one for one in attempt.failing_stores(silence_s) if one in membership.members]:
        for worker in failing:
            yield membership.members[worker], _with_failing_store(worker, attempt, within, now)
        return
    late = late_members(attempt, membership, now, trains=trains)
    if cut_off := _cut_off(late, attempt, membership, peer_reports, now):
        source, member_id = cut_off
        yield source, _not_fetched_by(member_id, within)
        return
    for member in late:
        yield member, _without_answer(member.id, attempt, within)


def late_members(attempt: Attempt, membership: WorldMembership, now: float, *, trains: bool) -> list[Member]:
    """The members that hold the attempt up; none if all are in a long step or wait for other members."""
    config, since = membership.config, silent_since(membership.config, now)
    sources = [membership.members[one] for one in attempt.sources if one in membership.members]
    if silent := [source for source in sources if source.is_silent(since)]:
        return silent
    active = [membership.members[one] for one in _active(attempt, membership, now) if one in membership.members]
    active = [member for member in active if not is_in_step(member, attempt, membership, now)]
    # A member that fetches data while it trains waits for no other member.
    waiting = {member.id for member in active if membership.in_world(member) and not trains}
    return members_holding_up(active, waiting, config, now)


def _without_answer(worker: str, attempt: Attempt, within: str) -> str:
    problem, received = attempt.problems.get(worker), sum(attempt.received.get(worker, ()))
    done = f" ({received:,} bytes received)" if received else ""
    return f"no answer {within}{done}: {problem}" if problem else f"no answer {within}{done}"


def _with_failing_store(worker: str, attempt: Attempt, within: str, now: float) -> str:
    failing_s = attempt.store_failing_s[worker]
    if failing_s <= now - attempt.began_at:
        return _without_answer(worker, attempt, within)
    problem = attempt.problems.get(worker, "its shard store fails")
    return f"no shard stored for {failing_s:.0f} s, in several attempts: {problem}"


def overdue_members(
    attempt: Attempt, membership: WorldMembership, peer_reports: PeerReports, now: float
) -> Iterator[tuple[Member, str]]:
    """The members for which an attempt has taken too long, with what they have done."""
    owing = [worker for worker in _active(attempt, membership, now) if worker not in attempt.sources]
    late = [membership.members[worker] for worker in owing if worker in membership.members]
    joiners = [member for member in late if member.id in attempt.added]
    within = f"in attempt {attempt.number} within {membership.config.rescale_timeout_s:g} s"
    if not joiners and (cut_off := _cut_off(late, attempt, membership, peer_reports, now)):
        source, member_id = cut_off
        yield source, _not_fetched_by(member_id, within)
        return
    for member in joiners or late:
        yield member, _without_answer(member.id, attempt, within)


def _not_fetched_by(worker: str, within: str) -> str:
    return f"{worker} could not fetch the state from it {within}"


def _cut_off(
    late: Iterable[Member], attempt: Attempt, membership: WorldMembership, peer_reports: PeerReports, now: float
) -> tuple[Member, str] | None:
    """The state source that a late member cannot fetch from through no fault of its own, and the first such member.

    Joiners do not count: the source's state may exist nowhere else, so it is not failed for them.
    """
    since = silent_since(membership.config, now)
    for member in late:
        source = membership.members.get(attempt.source_of(member.id))
        if source is None or member is source or member.is_silent(since):
            continue
        if not {member.id, source.id} <= membership.state_holders:
            continue
        ranks = {one.id: attempt.members.index(one.id) for one in (member, source)}
        if peer_reports.between(*ranks) and peer_reports.worst(ranks) == source.id:
            return source, member.id
    return None


def is_in_step(member: Member, attempt: Attempt, membership: WorldMembership, now: float) -> bool:
    """Whether the member may still finish a long step: it is heard, and no member of its world has finished yet.

    A live pulse counts as being heard: the library may be blocked by a step like any other.
    """
    config = membership.config
    is_silent = member.is_silent(silent_since(config, now)) and not member.has_pulse(now)
    is_heard = membership.in_world(member) and not is_silent
    is_late = config.evict_stalled and now - attempt.began_at >= config.stall_timeout_s
    return attempt.stage is Stage.STOPPING and is_heard and not (attempt.is_at_step_end or is_late)


def _active(attempt: Attempt, membership: WorldMembership, now: float) -> list[str]:
    """The members that owe an answer and have not reported that they wait for other members."""
    since = now - max(WAITING_REPORT_S, membership.config.rescale_silence_s)
    return [worker for worker in attempt.waiting_for if attempt.waiting_reports.get(worker, NEVER_REPORTED) < since]
