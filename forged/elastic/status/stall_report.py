"""The stall report: why a job's training does not progress, or why joiners are not taken in.

Invariants:
- Everything that waits is reported with what ends the wait: which workers are awaited, until when where that is known,
  and the command that an operator can end it with where there is one.
- The report is empty if nothing waits.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

from forged.elastic.coordinator import rescale_schedule
from forged.elastic.coordinator.job_state import JobState
from forged.elastic.failure_detector.detector import is_lost
from forged.elastic.failure_detector.suspicion import REPORTED_WORLDS_MAX
from forged.elastic.failure_detector.timeouts import is_in_step, late_members
from forged.elastic.membership.member import COLLECTIVES_PER_WORLD, Member, silent_since
from forged.elastic.phases import Phase
from forged.elastic.rescale.attempt import Attempt, Stage
from forged.phrases import counted, named

STALLED_SHOWN_MAX = PROBLEMS_SHOWN_MAX = 3
"""So many are listed one by one; the rest is counted."""
NO_STEP_S_MIN = 5.0
"""A shorter time without a step is not reported, however short the heartbeat timeout is."""


def describe_stall(job: JobState, now: float, write_error: str = "") -> str:
    """What is stalled and why; empty if nothing is. `write_error` is why the daemon cannot write."""
    return "" if job.over else "; ".join(_reasons(job, now, write_error))


def _reasons(job: JobState, now: float, write_error: str) -> Iterator[str]:
    if write_error:
        yield f"the daemon cannot write, so no rescale can start: {write_error}"
    if job.paused:
        yield f"paused: {job.pause_reason} (until `forgectl jobs resume {job.name}`)"
    if job.attempt is not None:
        yield from _in_attempt(job, job.attempt, now)
    elif job.phase is Phase.RESCALING:
        yield _interrupted_attempt(job, now)
    elif job.phase is Phase.RUNNING:
        yield from _due_rescale(job, now)
        yield from _peer_reports(job)
        yield from _no_progress(job, now)
        # A rescale that is due takes the joiners in.
        yield from () if job.rescale_reasons else _joiners(job, now)
    elif _is_short(job):
        yield _too_few(job, job.membership.ready_count(job.membership.next_joiners()), now)
        yield from _incomplete_groups(job)
    else:
        yield from _joiners(job, now)


def _is_short(job: JobState) -> bool:
    """Whether there are too few workers for a world."""
    return job.membership.ready_count(job.membership.next_joiners()) < job.config.min_workers


def _in_attempt(job: JobState, attempt: Attempt, now: float) -> Iterator[str]:
    awaited = attempt.waiting_for
    if job.member_is_missing:
        yield from _due_rescale(job, now)
    elif awaited:
        in_step = _in_step(job, attempt, now)
        waits = f"attempt {attempt.number} waits for {named(awaited)} to {_awaited_action(job, attempt, in_step)}"
        yield f"{waits} ({_seconds(now - attempt.began_at)} so far{_attempt_limit(job, attempt, in_step, now)})"
    yield from _problems(attempt)
    if not attempt.problems:
        yield from _peer_reports(job)
    if not job.membership.has_room_beside(attempt.target):
        yield from _surplus(job, job.membership.left_out(attempt.target))
    yield from _no_progress(job, now)


def _awaited_action(job: JobState, attempt: Attempt, in_step: Sequence[str]) -> str:
    """What an attempt waits for its members to do."""
    if attempt.stage is Stage.TRANSFERRING:
        return "receive training data while training continues"
    if attempt.stage is Stage.SYNCHRONISING:
        return "receive state and data"
    if not any(worker in job.membership.world for worker in attempt.waiting_for):
        return "enter the step loop"
    return "finish the current step and stop" if in_step else "stop"


def _in_step(job: JobState, attempt: Attempt, now: float) -> list[str]:
    """The awaited members that may take any time, because they may be in a long step."""
    members = (job.members.get(worker) for worker in attempt.waiting_for)
    return [member.id for member in members if member is not None and is_in_step(member, attempt, job.membership, now)]


def _attempt_limit(job: JobState, attempt: Attempt, in_step: Sequence[str], now: float) -> str:
    """When awaited members fail, or that a long step has no limit; empty where only other members can end the wait."""
    late = [member.id for member in late_members(attempt, job.membership, now, trains=job.trains)]
    left_s = rescale_schedule.attempt_timeout_at(job) - now
    if late and left_s < math.inf:
        return f", {named(late)} will fail in {_left(left_s)} if nothing changes"
    return f", without a limit while the step lasts: {_evict(in_step)} if it hangs" if in_step else ""


def _problems(attempt: Attempt) -> Iterator[str]:
    """The problems that awaited members report, with equal ones together."""
    workers_by_problem: dict[str, list[str]] = {}
    for worker in attempt.waiting_for:
        if worker in attempt.problems:
            workers_by_problem.setdefault(attempt.problems[worker], []).append(worker)
    found = list(workers_by_problem.items())
    for problem, workers in found[:PROBLEMS_SHOWN_MAX]:
        yield f"{named(workers)}: {problem}"
    if rest := sum(len(workers) for _, workers in found[PROBLEMS_SHOWN_MAX:]):
        yield f"{rest} more report problems"


def _interrupted_attempt(job: JobState, now: float) -> str:
    """The daemon restarted during an attempt; the next one starts when all members are back."""
    absent = [member.id for member in job.members.values() if not member.connected]
    left_s = rescale_schedule.rescale_at(job) - now
    at_the_latest = f", in {_left(left_s)} at the latest" if 0.0 < left_s < math.inf else ""
    return f"attempt {job.attempts + 1} starts when {named(absent) or 'every worker'} has reconnected{at_the_latest}"


def _due_rescale(job: JobState, now: float) -> Iterator[str]:
    """A rescale that is due, while its window runs, its evidence is awaited, or the daemon cannot write."""
    if not job.rescale_reasons:
        return
    reasons = "; ".join(job.rescale_reasons[:PROBLEMS_SHOWN_MAX])
    if _is_short(job):
        yield reasons
        yield _too_few(job, job.membership.remaining + len(job.membership.next_joiners()), now)
    else:
        yield f"attempt {job.attempts + 1} is about to start: {reasons}"


def _peer_reports(job: JobState) -> Iterator[str]:
    """Which workers cannot reach which, since the last committed step."""
    pairs = job.peer_reports.pairs
    if not pairs:
        return
    reports = list(dict.fromkeys(_peer_report(one, other, pairs) for one, other in pairs))
    rest = len(reports) - PROBLEMS_SHOWN_MAX
    more = f", {rest} more report{'s' if rest == 1 else ''} problems" if rest > 0 else ""
    worlds = f"in {counted(job.peer_reports.worlds, 'world')} so far"
    limit = f"one worker is evicted after {REPORTED_WORLDS_MAX} such worlds"
    yield f"{', '.join(reports[:PROBLEMS_SHOWN_MAX])}{more}, {worlds}; {limit}"


def _peer_report(one: str, other: str, pairs: Collection[tuple[str, str]]) -> str:
    if one == other:
        return f"{one} cannot continue"
    if (other, one) in pairs:
        return f"{' and '.join(sorted((one, other)))} cannot reach each other"
    return f"{one} cannot reach {other}"


def _no_progress(job: JobState, now: float) -> Iterator[str]:
    """Which members hold training up, or that no step is committed."""
    stalled = [member for member in job.members.values() if member.stalled]
    if job.trains:
        yield from _stalled(job, stalled, now)
    if job.paused:
        return
    since = silent_since(job.config, now)
    present = [member for member in job.membership.present() if not member.stalled]
    silent = [member for member in present if member.is_silent(since) and member.has_pulse(now)]
    if job.trains and silent and job.last_progress_at < since:
        yield f"no step for {_seconds(now - job.last_progress_at)}"
    yield from _silent(silent, now)
    if job.trains and not (stalled or silent):
        yield from _no_step(job, now)


def _no_step(job: JobState, now: float) -> Iterator[str]:
    """That no step was reported for long; steps are reported with heartbeats and pulses."""
    still_s = now - job.last_progress_at
    if still_s < max(job.config.worker_heartbeat_timeout_s, NO_STEP_S_MIN):
        return
    yield f"no step for {_seconds(still_s)}{_lost(job, now) or _long_step(job)}"


def _lost(job: JobState, now: float) -> str:
    """Which members are lost, and how long all of them have to reconnect."""
    lost = [member for member in job.membership.present() if is_lost(member)]
    left_s = max((member.lost_at or 0.0 for member in lost), default=0.0) + job.config.reconnect_grace_s - now
    grace = f" ({_left(left_s)} left to reconnect)" if left_s > 0.0 else ""
    return f": no connection to {named([member.id for member in lost])}{grace}" if lost else ""


def _long_step(job: JobState) -> str:
    """That the step may be long, if no problem is known, and which members are behind."""
    return "" if job.peer_reports.pairs else f", possibly a long step{_behind(job)}"


def _behind(job: JobState) -> str:
    """Which members the rest waits for, if some have come further."""
    members = [member for member in job.membership.present() if not member.last_step_done]
    # Progress in an earlier world does not count.
    progress = {member.id: max(member.collective_seq, job.generation * COLLECTIVES_PER_WORLD) for member in members}
    lowest = min(progress.values(), default=0)
    last = [worker for worker, reached in progress.items() if reached == lowest]
    if len(last) == len(progress):
        return ""
    return f": all other workers are ahead of {named(last)}{_in_meeting(members, last)}"


def _in_meeting(members: Sequence[Member], late: Collection[str]) -> str:
    """The meeting in which other members wait for the late ones, if it is known."""
    meeting = next((member.meeting for member in members if member.meeting and member.id not in late), "")
    return f", not come to meeting {meeting!r}" if meeting else ""


def _stalled(job: JobState, stalled: Sequence[Member], now: float) -> Iterator[str]:
    missed = _in_meeting(list(job.membership.present()), [member.id for member in stalled])
    for member in stalled[:STALLED_SHOWN_MAX]:
        lasts = f"{member.id} stalled for {_seconds(now - member.progress_at)} after step {member.step}"
        yield f"{lasts}, alive without progress{missed}: {_stack(member.id)}, {_evict([member.id])} if it hangs"
    if len(stalled) > STALLED_SHOWN_MAX:
        yield f"{len(stalled) - STALLED_SHOWN_MAX} more stalled"


def _silent(silent: Sequence[Member], now: float) -> Iterator[str]:
    """Members without connection or heartbeats whose pulse is alive, long before they count as stalled."""
    for member in silent[:STALLED_SHOWN_MAX]:
        if member.lost_at is not None:
            yield f"no connection from {member.id} for {_seconds(now - member.lost_at)}, but its process lives"
            continue
        silent_s = now - max(member.seen_at, member.heard_at or 0.0)
        silence = f"no heartbeat from {member.id} for {_seconds(silent_s)}"
        yield f"{silence}, but its process lives: suspended, or the GIL is held: {_stack(member.id)}"
    if len(silent) > STALLED_SHOWN_MAX:
        yield f"no heartbeat from {len(silent) - STALLED_SHOWN_MAX} more"


def _joiners(job: JobState, now: float) -> Iterator[str]:
    """Which joiners wait, and for what."""
    config, joiners = job.config, job.membership.next_joiners()
    if joiners and job.membership.ready_count(joiners) < config.min_workers:
        yield _too_few(job, len(joiners), now)
    elif joiners:
        left_s = rescale_schedule.growth_at(job) - now
        left = f"{_left(left_s)} left, " if 0.0 < left_s < math.inf else ""
        waits = f"{_wait(len(joiners))} until no worker has joined for {config.stability_window_s:g} s"
        yield f"{waits} ({left}at once with `forgectl jobs rescale {job.name}`)"
    yield from _surplus(job, sum(1 for _ in job.membership.connected_joiners()) - len(joiners))
    yield from _incomplete_groups(job)


def _incomplete_groups(job: JobState) -> Iterator[str]:
    """Which groups wait for which of their processes."""
    size = job.membership.group_size
    groups = list(job.membership.incomplete_groups()) if size > 1 else []
    for group in groups[:STALLED_SHOWN_MAX]:
        missing = sorted(set(range(size)).difference(one.group_rank for one in group if one.connected))
        waits = f"{_wait(len(group))} until group {group[0].group} is whole"
        yield f"{waits}: rank{'s' if len(missing) > 1 else ''} {named([str(one) for one in missing])} of {size} missing"
    if len(groups) > STALLED_SHOWN_MAX:
        yield f"{counted(len(groups) - STALLED_SHOWN_MAX, 'more group')} not whole"


def _surplus(job: JobState, surplus: int) -> Iterator[str]:
    if surplus:
        yield f"{_wait(surplus)} until another leaves: max_workers is {job.config.max_workers}"


def _too_few(job: JobState, waiting: int, now: float) -> str:
    needed = job.config.min_workers
    missing = needed - job.membership.ready_count(job.membership.next_joiners())
    subject = (
        f"{_wait(waiting)} for {missing} more to join" if waiting else f"no worker is connected, {missing} must join"
    )
    left_s = rescale_schedule.abort_at(job) - now
    deadline = f", otherwise the job is aborted in {_left(left_s)}" if left_s < math.inf else ""
    return f"{subject}: min_workers is {needed}{deadline}"


def _stack(worker: str) -> str:
    """The command that shows where a worker is."""
    return f"`forgectl workers stack {worker}` shows where"


def _evict(workers: Sequence[str]) -> str:
    """The command that ends the wait for a worker."""
    worker = workers[0] if len(workers) == 1 else "WORKER"
    return f"`forgectl workers evict {worker}`"


def _wait(number: int) -> str:
    return f"{counted(number, 'worker')} {'wait' if number > 1 else 'waits'}"


def _seconds(seconds: float) -> str:
    return f"{max(0.0, seconds):.0f} s"


def _left(seconds: float) -> str:
    """Time left, at least 1 s: what is about to happen takes a moment, too."""
    return _seconds(max(1.0, seconds))
