"""Whether a job trains on while its training data moves.

Invariants:
- Steps are expected unless something else holds them up: all members are alive and not blocked, the job is not paused,
  and the network between their hosts is good except for shard transfers. The daemon is not needed for steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tests.simulation.elastic.truth import SETTLED_AFTER_S, Disturbances, SimulatedWorker, Truth

STANDSTILL_MAX_S = 2.5
HELD_BEFORE_S = 2.0
"""How long after a script was held up that may still be seen."""
NOT_NEEDED = frozenset({"link_quality", "daemon"})


class Background:
    """Judges standstills; what is wrong with one is returned in words, and nothing where it is right."""

    def __init__(
        self, simulated_workers: Sequence[SimulatedWorker], disturbances: Disturbances, now: Callable[[], float]
    ) -> None:
        self._trainees = simulated_workers
        self._disturbances = disturbances
        self._now = now
        self._hindered_at: dict[str, float] = {}
        """When a job was last known to have a reason to stand still."""

    def against(self, truth: Truth) -> str | None:
        """What speaks against a job's being where it is. To be asked again and again."""
        now = self._now()
        if not truth.in_background or self._is_hindered(truth):
            self._hindered_at[truth.job] = now
            return None
        still_s = now - max(truth.stepped_at, truth.began_at, self._hindered_at.get(truth.job, -math.inf))
        if still_s <= STANDSTILL_MAX_S:
            return None
        return f"{truth.job} makes no step for {still_s:.1f} s, and nothing but attempt {truth.attempt} is under way"

    def _is_hindered(self, truth: Truth) -> bool:
        members = [
            simulated for simulated in self._trainees if simulated.me is not None and simulated.me in truth.world
        ]
        return (
            truth.paused or len(members) < truth.world.world_size or any(self._is_held(truth, one) for one in members)
        )

    def _is_held(self, truth: Truth, member: SimulatedWorker) -> bool:
        is_late = not member.alive or member.generation != truth.generation
        was_held = self._now() <= member.held_until + HELD_BEFORE_S
        return is_late or was_held or self._disturbances.quiet_for_s(member.host, NOT_NEEDED) <= SETTLED_AFTER_S
