"""Checks the daemon's reasons for failing a worker or aborting a job.

Invariants:
- A reason is compared with what really happened: which processes live, which scripts were blocked, which networks were
  bad and for how long. A reason that is not listed here is wrong.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

from forged.elastic.config import tolerated_failures
from tests.simulation.elastic.truth import SETTLED_AFTER_S, Disturbances, SimulatedWorker, Truth

HELD_BEFORE_S = 2.0
"""How long after a script was held up that may still be seen."""
STEP_S_MAX = 1.5
"""How long before something holds up a script it may have made its last step."""
SOON_S = 0.01
TOLD_LATE_S = 3.5
"""How long after the daemon has decided something that may be told: it may have been suspended."""
NOT_TOGETHER = ("most peer reports in", "could not fetch the state from it")
GIVEN_UP = "other group ranks are lost"
STANDING_STILL = ("alive, but no progress", "no answer in attempt")


class Evidence:
    """Judges reasons; what is wrong with one is returned in words, and nothing where it is right."""

    def __init__(
        self, simulated_workers: Sequence[SimulatedWorker], disturbances: Disturbances, now: Callable[[], float]
    ) -> None:
        self._trainees = simulated_workers
        self._disturbances = disturbances
        self._now = now

    # Workers.

    def against_death(self, simulated: SimulatedWorker, reason: str, truth: Truth) -> str | None:
        """What speaks against a worker's being failed for this reason."""
        if not simulated.alive:
            return None
        if reason.startswith("evicted: "):
            return None if simulated.name in truth.evictions_wanted else "no eviction was requested"
        if reason.startswith("its process") or "refuses connections" in reason:
            return "it lives"
        if GIVEN_UP in reason:
            return self._against_giving_up(truth)
        if reason.startswith("draining for"):
            return self._against_impatience(simulated, reason, truth)
        if reason.startswith(STANDING_STILL) or any(text in reason for text in NOT_TOGETHER):
            return None if self._is_disturbed(truth) else self._against_stillness(simulated, reason, truth)
        return self._against_silence(simulated, reason, truth)

    def _against_giving_up(self, truth: Truth) -> str | None:
        """Whether no step is one whose state was reported for all group ranks."""
        group_ranks = {one.incarnation: one.group_rank for one in self._trainees}
        reported = {
            (stop.position, group_ranks[one]) for one, stop in truth.stops[truth.attempt].items() if stop.holds_state
        }
        steps = {step for step, _ in reported}
        whole = [step for step in steps if all((step, rank) in reported for rank in range(truth.group_size))]
        return f"all group ranks have the state after step {whole[0]}" if whole else None

    def _against_impatience(self, simulated: SimulatedWorker, reason: str, truth: Truth) -> str | None:
        """Whether it had its time to go, and did not."""
        assert simulated.me is not None
        told_s = self._now() - truth.told_to_go.get(simulated.me, math.inf)
        if told_s < max(truth.config.leave_timeout_s, truth.config.worker_heartbeat_timeout_s) - TOLD_LATE_S:
            return f"it was told so {told_s:.1f} s ago"
        if reason.endswith("has not left"):
            return "its world needs it" if simulated.me in truth.world else None
        return None if self._is_disturbed(truth) or self._was_held(simulated) else "its library is heard"

    def _against_stillness(self, simulated: SimulatedWorker, reason: str, truth: Truth) -> str | None:
        """Whether it was itself that did not get on, where every network was good."""
        if reason.startswith("alive, but no progress"):
            held_s = truth.config.stall_timeout_s - STEP_S_MAX
            return None if self._was_held(simulated, held_s) else "it was not held up for so long"
        if self._has_taken_too_long(simulated, truth):
            return None
        return None if self._was_held(simulated) else "nothing kept it from getting on"

    def _has_taken_too_long(self, simulated: SimulatedWorker, truth: Truth) -> bool:
        """Whether the rescale has taken `rescale_timeout_ms`, and the worker is not ready."""
        limit_s = truth.config.rescale_timeout_s
        took_s = self._now() - truth.began_at
        is_ready = simulated.incarnation in truth.ready[truth.attempt]
        return 0.0 < limit_s <= took_s and not (truth.in_background or is_ready)

    def _against_silence(self, simulated: SimulatedWorker, reason: str, truth: Truth) -> str | None:
        """Whether its network was bad enough, and for long enough."""
        config = truth.config
        limits_s = {
            "connection lost": config.reconnect_grace_s,
            "no heartbeat and no pulse": config.worker_heartbeat_timeout_s - config.heartbeat_interval_s,
            "unreachable from the daemon": 0.0,
        }
        limit_s = next((limit_s for text, limit_s in limits_s.items() if reason.startswith(text)), None)
        if limit_s is None:
            return "that is no reason"
        if reason.startswith("unreachable from the daemon") and self._was_held(simulated):
            # A blocked worker answers neither daemon nor peer, and its network may be good.
            return None
        if reason.startswith("unreachable from the daemon") and self._disturbances.is_but_a_pause(simulated.host):
            return "the whole network paused, for the reporter too"
        if self._was_good(simulated.host):
            return f"its network is good for {self._disturbances.good_for_s(simulated.host):.1f} s"
        bad_s = self._disturbances.bad_for_s(simulated.host)
        return None if bad_s >= limit_s - SOON_S else f"its network is bad for {bad_s:.1f} s only"

    def _was_held(self, simulated: SimulatedWorker, seconds: float = 0.0) -> bool:
        """Whether its script was held up for so long, until a moment ago."""
        return simulated.held_since + seconds - SOON_S <= self._now() <= simulated.held_until + HELD_BEFORE_S

    def _was_good(self, host: str) -> bool:
        return self._disturbances.good_for_s(host) > SETTLED_AFTER_S

    def _is_disturbed(self, truth: Truth) -> bool:
        """Whether anything was wrong with any host of the job."""
        hosts = {simulated.host for simulated in self._trainees if simulated.job == truth.job}
        return not all(map(self._was_good, hosts))

    # Jobs.

    def against_abort(self, reason: str, truth: Truth) -> str | None:
        """What speaks against a job's being aborted for this reason."""
        config, size = truth.config, truth.world.world_size // truth.group_size
        tolerated = tolerated_failures(size, config.failure_tolerance_percentage)
        if found := re.fullmatch(r"(\d+) of (\d+) (?:workers|groups) failed; limit (\d+)", reason):
            is_true = tuple(map(int, found.groups())) == (truth.failures, size, tolerated)
            is_true = is_true and truth.failures > tolerated
        elif found := re.fullmatch(r"(\d+) failures? without a committed step in between", reason):
            is_true = config.max_consecutive_failures <= int(found[1]) <= len(truth.failed_behind)
        elif reason.startswith(f"fewer than {config.min_workers} workers for"):
            is_true = self._is_short(truth)
        elif re.match(r"[\d,]+ shards? lost: ", reason):
            is_true = truth.data_lost
        else:
            is_true = truth.abort_wanted
        if is_true:
            return None
        return f"{truth.failures} of {size} failed, {len(truth.failed_behind)} since the last step, {truth.phase}"

    def _is_short(self, truth: Truth) -> bool:
        if truth.waiting_since is None:
            return truth.generation == truth.reopened_after
        return self._now() - truth.waiting_since >= truth.config.min_workers_timeout_s - TOLD_LATE_S
